"""Train the model of docs/guide.md under torchrun: on GPUs if torch sees one, else on the CPU."""

from __future__ import annotations

import os
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor

import shardrec
from shardrec.pipeline import TrainPipeline

USERS, ITEMS, DENSE, BATCH = 1000, 5000, 4, 128


class ClickModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bags = EmbeddingBagCollection(
            tables=[
                EmbeddingBagConfig(name="t_user", num_embeddings=USERS, embedding_dim=16, feature_names=["user"]),
                EmbeddingBagConfig(
                    name="t_item", num_embeddings=ITEMS, embedding_dim=16, feature_names=["item", "history"]
                ),
            ],
            device=torch.device("meta"),  # each rank fills its own shards
        )
        self.top = nn.Sequential(nn.Linear(3 * 16 + DENSE, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, dense: torch.Tensor, sparse: KeyedJaggedTensor) -> torch.Tensor:
        pooled = self.bags(sparse)
        return self.top(torch.cat([dense, pooled.values()], dim=1)).squeeze(1)


Batch = tuple[torch.Tensor, KeyedJaggedTensor, torch.Tensor]


def batches(steps: range, rank: int) -> Iterator[Batch]:
    """Generated clicks: replace these batches by your own. Each rank reads other rows."""
    for step in steps:
        generator = torch.Generator().manual_seed(1000 * step + rank)
        dense = torch.randn(BATCH, DENSE, generator=generator)
        lengths = torch.cat([torch.ones(2 * BATCH), torch.randint(0, 5, (BATCH,), generator=generator)]).long()
        users = torch.randint(0, USERS, (BATCH,), generator=generator)
        items = torch.randint(0, ITEMS, (int(lengths.sum()) - BATCH,), generator=generator)
        sparse = KeyedJaggedTensor(keys=["user", "item", "history"], values=torch.cat([users, items]), lengths=lengths)
        labels = (dense[:, 0] + users % 3 - 1 > 0).float()
        yield dense, sparse, labels


def loss_of(model: nn.Module, batch: Batch) -> torch.Tensor:
    dense, sparse, labels = batch
    return nn.functional.binary_cross_entropy_with_logits(model(dense, sparse), labels)


def main() -> None:
    local_rank = int(os.environ["LOCAL_RANK"])
    if torch.cuda.is_available():
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
        dist.init_process_group("nccl")
    else:
        device = torch.device("cpu")
        dist.init_process_group("gloo")
    rank = dist.get_rank()

    torch.manual_seed(0)  # the same first values on every rank
    model = ClickModel()
    apply_optimizer_in_backward(torch.optim.Adagrad, model.bags.parameters(), {"lr": 0.1})
    model = shardrec.shard(model, device=device)
    optimizer = torch.optim.Adam(model.dense_parameters(), lr=1e-2)

    checkpoints = shardrec.Checkpoints("checkpoints", keep_last=2)
    last = checkpoints.load_last(model, optimizer)
    step = last.step if last else 0
    if rank == 0:
        print(f"begins at step {step}", flush=True)

    pipeline = TrainPipeline(model, optimizer, batches(range(step, step + 100), rank), loss_fn=loss_of)
    for loss in pipeline:
        step += 1
        if step % 50 == 0:
            checkpoints.save(step, model, optimizer)
            if rank == 0:
                print(f"step {step}: loss {loss.item():.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

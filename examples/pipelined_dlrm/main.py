"""Train the model in two stages beside the plain one: ``torchrun --nproc-per-node 2 -m examples.pipelined_dlrm.main``.

With 4 ranks there are two pipelines, on ranks 0, 1 and 2, 3. The first stages share the tables, each holding half of
them, and the others average their gradients.
"""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from examples.pipelined_dlrm.model import BALANCE, DENSE, DIM, FEATURES, ROWS, pipelined_dlrm
from shardrec.layout import ShardingPlan, Topology, cuts
from shardrec.modules import ShardedEmbeddingBagCollection
from shardrec.pipeline import Pipeline

__all__ = ["main", "train"]

Batch = tuple[tuple[Tensor, KeyedJaggedTensor], Tensor]


def batch(step: int, size: int, shard: int) -> Batch:
    """Inputs and (B,) labels that the ids decide on."""
    generator = torch.Generator().manual_seed(1000 * step + shard)
    lengths = torch.randint(0, 4, (FEATURES * size,), generator=generator)
    values = torch.randint(0, ROWS, (int(lengths.sum()),), generator=generator)
    dense = torch.randn(size, DENSE, generator=generator)
    ids = KeyedJaggedTensor(keys=[f"f{one}" for one in range(FEATURES)], values=values, lengths=lengths, stride=size)
    return (dense, ids), (dense[:, 0] + lengths.view(FEATURES, size)[0] > 1).float()


def loss_fn(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross entropy of (B, 1) logits."""
    return binary_cross_entropy_with_logits(logits.squeeze(1), labels)


def train(steps: int = 20, size: int = 64, chunks: int = 4, schedule: str = "1f1b") -> list[tuple[float, float]]:
    """Losses of the plain model and of the pipelined model, step by step, on 2 or 4 ranks.

    Args:
        steps: optimizer steps.
        size: samples B of each pipeline.
        chunks: micro-batches.
        schedule: of the pipeline.
    """
    rank, pipelines = dist.get_rank(), dist.get_world_size() // 2
    own = rank // 2
    torch.manual_seed(0)
    plain = pipelined_dlrm()
    model = copy.deepcopy(plain)
    groups = [dist.new_group([2 * one, 2 * one + 1]) for one in range(pipelines)]
    stage_groups = [dist.new_group([2 * one + stage for one in range(pipelines)]) for stage in range(2)]
    stage_group = stage_groups[rank % 2]
    if rank % 2 == 0:
        plan = ShardingPlan(
            topology=Topology(ranks_per_host=pipelines),
            tables=tuple(cuts.row_wise(f"t{one}", ROWS, DIM, ranks=range(pipelines)) for one in range(FEATURES)),
        )
        model[0].module.bags = ShardedEmbeddingBagCollection(model[0].module.bags, plan, group=stage_group)
    pipeline = Pipeline(model, BALANCE, group=groups[own], chunks=chunks, schedule=schedule)  # type: ignore[arg-type]
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.5) for one in (plain, pipeline)]
    losses = []
    for step in range(steps):
        (input, labels), wanted = batch(step, size, own), torch.zeros(())
        for one in range(pipelines):
            (all_input, all_labels) = batch(step, size, one)
            part = loss_fn(plain(all_input), all_labels) / pipelines
            part.backward()
            wanted += part.detach()
        loss = pipeline.step(input, labels, loss_fn=loss_fn)
        dist.all_reduce(loss, group=stage_group)
        average_dense(pipeline, stage_group, pipelines)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        losses.append((float(wanted), float(loss) / pipelines))
    return losses


def average_dense(module: nn.Module, group: dist.ProcessGroup, pipelines: int) -> None:
    """Average gradients over the same stage of all pipelines.

    The gradients of the tables' shards are averages already.
    """
    for name, parameter in module.named_parameters():
        if parameter.grad is not None and "embedding_bags" not in name:
            dist.all_reduce(parameter.grad, group=group)
            parameter.grad /= pipelines


def main() -> None:
    """Print the losses of both."""
    dist.init_process_group("gloo")
    losses = train()
    if dist.get_rank() == 0:
        print("step  plain     pipelined")
        for step, (plain, pipelined) in enumerate(losses):
            print(f"{step:4}  {plain:.6f}  {pipelined:.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

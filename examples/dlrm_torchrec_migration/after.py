"""The same on shardrec: ``torchrun --nproc-per-node 2 -m examples.dlrm_torchrec_migration.after``."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.nn.functional import binary_cross_entropy_with_logits
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.models.dlrm import DLRM
from torchrec.optim import RowWiseAdagrad
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper

import shardrec
from examples.dlrm_torchrec_migration.batches import DENSE, DIM, FEATURES, ROWS, batches, first_values


def main() -> None:
    """Train, and show the loss of each tenth step on rank 0."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    tables = [
        EmbeddingBagConfig(
            name=f"t_{name}", embedding_dim=DIM, num_embeddings=ROWS, feature_names=[name], init_fn=first_values
        )
        for name in FEATURES
    ]
    model = DLRM(
        embedding_bag_collection=EmbeddingBagCollection(tables=tables),
        dense_in_features=DENSE,
        dense_arch_layer_sizes=[32, DIM],
        over_arch_layer_sizes=[32, 1],
    )
    apply_optimizer_in_backward(RowWiseAdagrad, model.sparse_arch.parameters(), {"lr": 0.05, "eps": 1e-8})
    model = shardrec.shard(model)
    dense = KeyedOptimizerWrapper(
        {name: one for name, one in model.named_parameters() if name not in model.fused_optimizer.params},
        lambda params: torch.optim.Adagrad(params, lr=0.02),
    )
    optimizer = CombinedOptimizer([model.fused_optimizer, dense])
    for step, (features, ids, labels) in enumerate(batches(dist.get_rank())):
        optimizer.zero_grad()
        loss = binary_cross_entropy_with_logits(model(features, ids).squeeze(1), labels)
        loss.backward()
        optimizer.step()
        if step % 10 == 9 and dist.get_rank() == 0:
            print(f"step {step + 1}: loss {loss.item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""The sharded module of a workload, over collectives of one's own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.optim import RowWiseAdagrad
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from benchmarks.harness.workload import WorkloadTable
from shardrec.layout import ShardingPlan
from shardrec.modules import ShardedEmbeddingBagCollection, ShardedEmbeddingCollection, ShardedModel
from shardrec.step.context import ModelContext

__all__ = ["EPS", "LEARNING_RATE", "sharded_module", "total_of", "unsharded_module"]

LEARNING_RATE, EPS = 0.01, 1e-8
"""``EPS`` is said, for TorchRec takes fbgemm's where an optimizer's settings leave it out, not that of its class."""

_OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, float]]] = {
    "sgd": (torch.optim.SGD, {}),
    "adagrad": (torch.optim.Adagrad, {"eps": EPS}),
    "rowwise_adagrad": (RowWiseAdagrad, {"eps": EPS}),
    "adam": (torch.optim.Adam, {"eps": EPS}),
}


def unsharded_module(
    tables: Sequence[WorkloadTable], *, pooled: bool, weighted: bool, optimizer: str
) -> EmbeddingBagCollection | EmbeddingCollection:
    """TorchRec's module on meta, its optimizer to be fused."""
    sizes: list[dict[str, Any]] = [
        {
            "name": table.name,
            "num_embeddings": table.rows,
            "embedding_dim": table.dim,
            "feature_names": [table.feature],
        }
        for table in tables
    ]
    meta = torch.device("meta")
    module: EmbeddingBagCollection | EmbeddingCollection
    if pooled:
        bags = [EmbeddingBagConfig(**size) for size in sizes]
        module = EmbeddingBagCollection(tables=bags, is_weighted=weighted, device=meta)
    else:
        module = EmbeddingCollection(tables=[EmbeddingConfig(**size) for size in sizes], device=meta)
    cls, settings = _OPTIMIZERS[optimizer]
    apply_optimizer_in_backward(cls, module.parameters(), {"lr": LEARNING_RATE, **settings})
    return module


def sharded_module(
    module: EmbeddingBagCollection | EmbeddingCollection,
    plan: ShardingPlan,
    context: ModelContext,
    *,
    dedup: bool,
) -> ShardedModel:
    """What ``shardrec.shard`` makes of a module by itself, with the context's collectives."""
    sharded: ShardedEmbeddingBagCollection | ShardedEmbeddingCollection
    if isinstance(module, EmbeddingBagCollection):
        sharded = ShardedEmbeddingBagCollection(module, plan, device=context.device, context=context)
    else:
        sharded = ShardedEmbeddingCollection(module, plan, device=context.device, context=context, dedup=dedup)
    return ShardedModel(sharded, plan, context, dist.group.WORLD if context.collectives.world_size > 1 else None)


def total_of(output: Any) -> Tensor:
    """The sum of all the output's values; of a KeyedTensor, or of a dict of JaggedTensors."""
    value = output.wait()
    if isinstance(value, dict):
        return torch.stack([one.values().sum() for one in value.values()]).sum()
    total: Tensor = value.values().sum()
    return total

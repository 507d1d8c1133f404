"""A click model's tables, a plan that mixes cuts, and comparisons of whole models."""

from __future__ import annotations

from random import Random

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torchrec.modules.embedding_configs import EmbeddingBagConfig

from shardrec.layout import ShardingPlan, Topology
from shardrec.modules import ShardedEmbeddingBagCollection
from shardrec.trainer.data import ClickBatch
from tests.batches import random_bags
from tests.models import feature_rows, table_sizes
from tests.modules.tables import local_part
from tests.plans import CUTS

__all__ = [
    "CONFIGS",
    "ROWS",
    "SIZES",
    "assert_dense_equal",
    "assert_tables_equal",
    "batch",
    "dense_parameters",
    "loss_fn",
    "mixed_plan",
]

CONFIGS = [
    EmbeddingBagConfig(name="movies", num_embeddings=10, embedding_dim=8, feature_names=["watched", "liked"]),
    EmbeddingBagConfig(name="tags", num_embeddings=6, embedding_dim=4, feature_names=["tag"]),
    EmbeddingBagConfig(name="users", num_embeddings=9, embedding_dim=12, feature_names=["liked"]),
]
ROWS = feature_rows(CONFIGS)
SIZES = table_sizes(CONFIGS, "sparse")


def mixed_plan(world_size: int, path: str = "sparse") -> ShardingPlan:
    """Row-wise, data-parallel and column-wise."""
    rng, topology = Random(1), Topology(ranks_per_host=world_size)
    cuts = ("row_wise", "data_parallel", "column_wise")
    tables = [
        CUTS[cut](rng, name, rows, dim, topology)
        for cut, (name, (rows, dim)) in zip(cuts, table_sizes(CONFIGS, path).items(), strict=True)
    ]
    return ShardingPlan(topology=topology, tables=tuple(tables))


def assert_tables_equal(model: nn.Module, reference: nn.Module, where: str, atol: float = 1e-5) -> None:
    """This rank's shards of every collection of a model."""
    wholes = dict(reference.named_modules())
    for path, module in model.named_modules():
        if isinstance(module, ShardedEmbeddingBagCollection):
            for name, table in module.tables().items():
                whole = wholes[path].embedding_bags[name].weight
                for place, parameter in table.locals.items():
                    part = local_part(whole, place)
                    difference = (parameter.cpu() - part).abs().max().item()
                    assert torch.allclose(parameter.cpu(), part, atol=atol), f"{where}: {place or name} by {difference}"


def assert_dense_equal(model: nn.Module, reference: nn.Module, where: str, atol: float = 1e-5) -> None:
    mine = dict(model.named_parameters())
    for name, parameter in reference.named_parameters():
        if "embedding_bags" not in name:
            assert torch.allclose(mine[name].cpu(), parameter, atol=atol), f"{where}: {name}"


def dense_parameters(model: nn.Module) -> list[nn.Parameter]:
    return [one for name, one in model.named_parameters() if "embedding_bags" not in name]


def batch(step: int, rank: int, *, bad: bool = False) -> ClickBatch:
    rng = Random(100 * step + rank)
    size = rng.randrange(1, 5)
    sparse = random_bags(rng, ROWS, size).kjt()
    if bad:
        sparse.values()[:] = 10**6
    generator = torch.Generator().manual_seed(step)
    return ClickBatch(
        dense=torch.randn(size, 3, generator=generator),
        sparse=sparse,
        labels=torch.rand(size, generator=generator).round(),
    )


def loss_fn(model: nn.Module, batch: ClickBatch) -> Tensor:
    return binary_cross_entropy_with_logits(model(batch.dense, batch.sparse), batch.labels)

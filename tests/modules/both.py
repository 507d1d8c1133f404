"""A model with a pooled collection and one of rows, which share features."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from shardrec.exchange.batch import OnBadId
from shardrec.layout import ShardingPlan, Topology, cuts
from shardrec.modules import ShardedModel, shard
from tests.models import apply_optimizer_in_backward

__all__ = ["POLICIES", "ROWS", "sharded_both"]

ROWS = {"a": 11, "b": 5, "c": 7}
"""Per feature, ids must be below this."""
POLICIES: Mapping[str, OnBadId] = {"b": "zero", "c": "wrap"}


class Both(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        pooled = [("ta", 11, 8, ["a"]), ("tb", 7, 4, ["b", "c"]), ("tc", 5, 4, ["b"])]
        rows = [("td", 11, 8, ["a"]), ("te", 9, 8, ["b", "c"])]
        self.bags = EmbeddingBagCollection(
            tables=[
                EmbeddingBagConfig(
                    name=name,
                    num_embeddings=count,
                    embedding_dim=dim,
                    feature_names=keys,
                    pooling=PoolingType.MEAN if name == "tb" else PoolingType.SUM,
                )
                for name, count, dim, keys in pooled
            ]
        )
        self.rows = EmbeddingCollection(
            tables=[
                EmbeddingConfig(name=name, num_embeddings=count, embedding_dim=dim, feature_names=keys)
                for name, count, dim, keys in rows
            ]
        )
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, features: KeyedJaggedTensor) -> list[Tensor]:
        rows = self.rows(features)
        pooled = self.bags(features).values()
        return [pooled * self.scale, rows["a"].values(), rows["b"].values(), rows["c"].values()]


def sharded_both(on_bad_id: Mapping[str, OnBadId] | None = None) -> ShardedModel:
    """By rows, whole, and replicated; trained by SGD in backward."""
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    torch.manual_seed(0)
    model = Both()
    for collection in (model.bags, model.rows):
        apply_optimizer_in_backward(torch.optim.SGD, collection.parameters(), {"lr": 0.05})
    layouts = (
        cuts.row_wise("bags.ta", 11, 8, ranks=range(world_size)),
        cuts.table_wise("bags.tb", 7, 4, rank=world_size - 1),
        cuts.data_parallel("bags.tc", 5, 4),
        cuts.row_wise("rows.td", 11, 8, ranks=range(world_size)),
        cuts.table_wise("rows.te", 9, 8, rank=world_size - 1),
    )
    return shard(
        model, ShardingPlan(topology=Topology(ranks_per_host=world_size), tables=layouts), on_bad_id=on_bad_id or {}
    )

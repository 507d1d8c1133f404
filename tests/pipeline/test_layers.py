"""Layers that reduce gradients or update weights by themselves, which a pipeline would have do it per micro-batch."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig

from shardrec.errors import ConfigError
from shardrec.layout import ShardingPlan, Topology, cuts
from shardrec.modules import shard
from shardrec.pipeline import Pipeline
from tests.models import apply_optimizer_in_backward, collection
from tests.ranks import ranks

CONFIG = EmbeddingBagConfig(name="t", embedding_dim=4, num_embeddings=10, feature_names=["f"])


class Bags(nn.Module):
    """A model of one collection."""

    def __init__(self, optimizer: str) -> None:
        super().__init__()
        self.ebc = collection([CONFIG], optimizers=optimizer)


def test_optimizers_in_backward_are_refused() -> None:
    fused = shard(Bags("adagrad")).module
    with pytest.raises(ConfigError, match=r"table 't' of 0\.ebc has a fused optimizer, which would update it in each"):
        Pipeline(nn.Sequential(fused, nn.Linear(4, 1)), balance=[1, 1])
    layer = nn.Linear(4, 1)
    apply_optimizer_in_backward(torch.optim.SGD, layer.parameters(), {"lr": 0.1})
    with pytest.raises(ConfigError, match=r"0\.weight has an optimizer in backward(.|\n)*0\.bias has"):
        Pipeline(nn.Sequential(layer), balance=[1])
    Pipeline(nn.Sequential(shard(Bags("none")).module, nn.Linear(4, 1)), balance=[1, 1])


def refused_on_two_ranks() -> None:
    size = dist.get_world_size()
    plan = ShardingPlan(tables=(cuts.data_parallel("ebc.t", 10, 4),), topology=Topology(ranks_per_host=size))
    model = shard(Bags("none"), plan)
    with pytest.raises(ConfigError, match=r"0 \(ShardedModel\) reduces gradients(.|\n)*table 't' .* is replicated"):
        Pipeline(nn.Sequential(model), balance=[1])


def test_reducers_are_refused() -> None:
    ranks(2, refused_on_two_ranks)

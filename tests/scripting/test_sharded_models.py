"""TorchRec's models sharded and scripted: outputs, gradients and ten training steps equal the eager sharded model's."""

from __future__ import annotations

from itertools import product
from random import Random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torchrec.models.dlrm import DLRM, DLRM_DCN
from torchrec.modules.embedding_configs import EmbeddingBagConfig

import shardrec
from shardrec.layout import Topology
from shardrec.layout.discover import table_shapes
from shardrec.modules import ShardedModel, shard
from tests.batches import random_bags
from tests.models import collection
from tests.plans import random_plan
from tests.ranks import ranks
from tests.scripting.scorers import Towers

DIM = 8
ROWS = {"a": 11, "b": 7, "c": 30, "d": 5}
STEPS = 10
FAST = {("dlrm", 1), ("dcn", 2), ("towers", 2)}
"""Each model; on four ranks, random ones are in test_sharded_bags.py."""


def bags(features: str) -> nn.Module:
    configs = [
        EmbeddingBagConfig(name=f"t_{one}", embedding_dim=DIM, num_embeddings=ROWS[one], feature_names=[one])
        for one in features
    ]
    return collection(configs, optimizers="adagrad", seed=3)


def unsharded(name: str) -> nn.Module:
    torch.manual_seed(1)
    if name == "towers":
        return Towers(bags("ab"), bags("cd"), DIM)
    parts: dict[str, Any] = {
        "embedding_bag_collection": bags("abcd"),
        "dense_in_features": 3,
        "dense_arch_layer_sizes": [6, DIM],
        "over_arch_layer_sizes": [5, 1],
    }
    torch.manual_seed(1)
    return DLRM(**parts) if name == "dlrm" else DLRM_DCN(**parts, dcn_num_layers=2, dcn_low_rank_dim=4)


def sharded(name: str, seed: int) -> ShardedModel:
    model = unsharded(name)
    plan = random_plan(Random(seed), table_shapes(model), Topology(ranks_per_host=dist.get_world_size()))
    return shard(model, plan)


@pytest.mark.parametrize(
    ("name", "world_size"),
    [
        pytest.param(*pair, marks=() if pair in FAST else pytest.mark.slow)
        for pair in product(["dlrm", "dcn", "towers"], [1, 2, 4])
    ],
)
def test_ten_steps(name: str, world_size: int) -> None:
    def rank_main() -> None:
        rank = dist.get_rank()
        eager, live = sharded(name, 4), sharded(name, 4)
        scripted: Any = shardrec.script(live)
        if world_size > 1:
            scripted = DistributedDataParallel(scripted)
        dense = [torch.optim.SGD(model.dense_parameters(), lr=0.1) for model in (eager, live)]
        rng = Random(rank)
        torch.manual_seed(rank)
        for step in range(STEPS):
            inputs = torch.randn(4, 3), random_bags(rng, ROWS, 4).kjt()
            expected, found = eager(*inputs), scripted(*inputs)
            assert torch.allclose(found, expected, atol=1e-5), step
            expected.square().mean().backward()
            found.square().mean().backward()
            for (key, one), (_, two) in zip(eager.named_parameters(), live.named_parameters(), strict=True):
                if one.grad is not None:
                    assert two.grad is not None and torch.allclose(one.grad, two.grad, atol=1e-5), (step, key)
            for one in dense:
                one.step()
                one.zero_grad()
        for (key, one), (_, two) in zip(eager.named_parameters(), live.named_parameters(), strict=True):
            assert torch.allclose(one, two, atol=1e-5), key

    ranks(world_size, rank_main)

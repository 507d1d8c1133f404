"""Weights of ids that take a gradient, in scripted and compiled models: from cut tables, replicated ones, and both."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import shardrec
from shardrec.layout import ShardingPlan, Topology, cuts
from shardrec.modules import shard
from tests.batches import random_bags
from tests.models import collection, feature_rows

CONFIGS = [
    EmbeddingBagConfig(name=f"t{number}", num_embeddings=7, embedding_dim=4, feature_names=[feature])
    for number, feature in enumerate("ab")
]


def with_leaf(features: KeyedJaggedTensor) -> tuple[KeyedJaggedTensor, Tensor]:
    leaf = features.weights().detach().clone().requires_grad_()
    return KeyedJaggedTensor(features.keys(), features.values(), leaf, features.lengths(), stride=3), leaf


@pytest.mark.parametrize("make", [partial(shardrec.script, portable=False), torch.compile], ids=["script", "compile"])
@pytest.mark.parametrize("replicated", [(), ("t0",), ("t0", "t1")])
def test_gradients_of_the_weights(make: Callable[[Any], Any], replicated: tuple[str, ...]) -> None:
    torch._dynamo.reset()
    tables = [
        cuts.data_parallel(config.name, 7, 4)
        if config.name in replicated
        else cuts.table_wise(config.name, 7, 4, rank=0)
        for config in CONFIGS
    ]
    plan = ShardingPlan(topology=Topology(ranks_per_host=1), tables=tuple(tables))
    model = make(shard(collection(CONFIGS, weighted=True, optimizers="sgd"), plan))
    reference = collection(CONFIGS, weighted=True)
    for step in range(2):
        features, leaf = with_leaf(random_bags(Random(step), feature_rows(CONFIGS), 3, weighted=True).kjt())
        same, expected = with_leaf(features)
        model(features).values().square().sum().backward()
        reference(same).values().square().sum().backward()
        assert expected.grad is not None and expected.grad.any()
        torch.testing.assert_close(leaf.grad, expected.grad)
        with torch.no_grad():
            for parameter in reference.parameters():
                assert parameter.grad is not None
                parameter -= 0.5 * parameter.grad
                parameter.grad = None

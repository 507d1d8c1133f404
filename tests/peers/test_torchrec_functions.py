"""Functions and classes of TorchRec that docs/migration.md calls the same take a model of ``shardrec.shard``."""

from __future__ import annotations

from random import Random
from typing import Any

import torch
import torch.distributed as dist
import torchrec.fx
from torch import nn
from torchrec.inference.state_dict_transform import state_dict_gather, state_dict_to_device
from torchrec.optim import OptimizerWrapper, WarmupOptimizer, WarmupPolicy, WarmupStage

from shardrec.layout import Topology
from shardrec.modules import shard
from tests.models import click_model, table_sizes
from tests.modules.clicks import CONFIGS, assert_tables_equal
from tests.plans import random_plan
from tests.ranks import ranks


def sharded(seed: int) -> Any:
    topology = Topology(ranks_per_host=dist.get_world_size())
    return shard(click_model(CONFIGS), random_plan(Random(seed), table_sizes(CONFIGS, "sparse"), topology))


def test_a_gathered_state_is_the_unsharded_model_s() -> None:
    def rank_main(seed: int) -> None:
        expected = click_model(CONFIGS)
        state = state_dict_to_device(sharded(seed).state_dict(), dist.group.WORLD, torch.device("cpu"))
        gathered = click_model(CONFIGS)
        with torch.no_grad():
            for parameter in gathered.parameters():
                parameter.zero_()
        state_dict_gather(state, gathered.state_dict())
        if dist.get_rank() == 0:
            assert_tables_equal(gathered, expected, "gathered")
            assert torch.equal(gathered.top.weight, expected.top.weight)

    for seed in range(4):
        ranks(2, rank_main, seed)


def test_wrapped_optimizers_set_the_learning_rates_of_the_fused_one() -> None:
    fused = shard(click_model(CONFIGS)).fused_optimizer
    stage = WarmupStage(policy=WarmupPolicy.CONSTANT, max_iters=10, value=0.5)
    WarmupOptimizer(OptimizerWrapper(fused), [stage], lr=0.2).step()
    assert [group["lr"] for group in fused.param_groups] == [0.5 * 0.2]


def test_a_traced_module_holds_a_sharded_model_as_one_node() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = shard(click_model(CONFIGS))

        def forward(self, dense: Any, sparse: Any) -> Any:
            return 2 * self.inner(dense, sparse)

    graph = torchrec.fx.symbolic_trace(Twice()).graph
    assert [node.target for node in graph.nodes if node.op == "call_module"] == ["inner"]

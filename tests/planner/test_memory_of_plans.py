"""The bytes that a plan is priced at are those that the sharded model has: weights and fused optimizers' states."""

from __future__ import annotations

from itertools import cycle
from typing import cast

import pytest
import torch
import torch.distributed as dist
from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig

from shardrec.layout import ShardingPlan, Topology, cuts
from shardrec.layout.presets import preset
from shardrec.modules import shard
from shardrec.modules.collection import ShardedCollection
from shardrec.planner.cost import CostModel, Profile
from shardrec.planner.describe import table_loads
from shardrec.planner.price import priced_plan
from tests.models import OPTIMIZERS, click_model
from tests.ranks import ranks

FUSED = [name for name, each in OPTIMIZERS.items() if each.optimizer is not None]


@pytest.mark.parametrize("optimizer", FUSED)
def test_weights_and_states_take_the_bytes_that_were_planned(optimizer: str) -> None:
    def rank_main() -> None:
        configs = [
            EmbeddingBagConfig(
                name=f"t{number}",
                num_embeddings=40 + 2 * number,
                embedding_dim=16,
                feature_names=[f"f{number}"],
                data_type=DataType.FP16 if number % 3 == 2 and optimizer != "adam" else DataType.FP32,
            )
            for number in range(8)
        ]
        model = click_model(configs, optimizer=optimizer)
        loads = table_loads(model)
        kinds = cycle(
            [
                lambda *shape: cuts.row_wise(*shape, ranks=range(2)),
                lambda *shape: cuts.column_wise(*shape, ranks=range(2)),
                lambda *shape: cuts.table_wise(*shape, rank=1),
                lambda *shape: cuts.data_parallel(*shape),
            ]
        )
        topology = Topology(ranks_per_host=2)
        plan = ShardingPlan(
            topology=topology,
            tables=tuple(
                kind(name, load.num_embeddings, load.embedding_dim)
                for (name, load), kind in zip(loads.items(), kinds, strict=False)
            ),
        )
        cost_model = CostModel(profile=Profile.of_machine(preset("cpu")), topology=topology, batch_size=4)
        weights, states, _ = priced_plan(cost_model, loads, plan)[0][dist.get_rank()].memory
        sharded = shard(model, plan)
        collection = cast("ShardedCollection", sharded.module.sparse)
        found = sum(
            parameter.numel() * parameter.element_size()
            for table in collection.tables().values()
            for parameter in table.parameters()
        )
        held = 0
        for name, fused in collection.fused_optimizers().items():
            for state in fused.states:
                for part in collection.fused_state(name, state).values():
                    assert part.dtype is torch.float32
                    held += part.numel() * part.element_size()
        assert found == weights
        assert held == states

    ranks(2, rank_main)

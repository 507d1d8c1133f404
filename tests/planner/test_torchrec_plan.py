"""TorchRec's plans and constraints: read, written, and read again unchanged."""

from __future__ import annotations

import pytest
import torch
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.planner.types import Topology as TheirTopology
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from shardrec.errors import PlanError
from shardrec.layout import ShardingPlan, Topology, cuts
from shardrec.planner import Constraint, constraints_from_torchrec, from_torchrec, to_torchrec

TOPOLOGY = Topology(hosts=2, ranks_per_host=2)
PLAN = ShardingPlan(
    topology=TOPOLOGY,
    tables=(
        cuts.table_wise("sparse.a", 10, 8, rank=3),
        cuts.row_wise("sparse.b", 10, 8, ranks=range(4)),
        cuts.column_wise("sparse.c", 10, 16, ranks=[2, 0]),
        cuts.table_row_wise("sparse.d", 10, 8, host=1, topology=TOPOLOGY),
        cuts.table_column_wise("e", 10, 16, host=0, topology=TOPOLOGY),
        cuts.grid("f", 10, 16, hosts=[1, 0], topology=TOPOLOGY),
        cuts.data_parallel("g", 10, 8),
    ),
)
SHAPES = {table.name: (table.num_embeddings, table.embedding_dim) for table in PLAN.tables}


def test_there_and_back() -> None:
    theirs = to_torchrec(PLAN)
    assert sorted(theirs.plan) == ["", "sparse"]
    kinds = {name: each.sharding_type for module in theirs.plan.values() for name, each in module.items()}  # type: ignore[attr-defined]
    assert kinds == {
        "a": "table_wise",
        "b": "row_wise",
        "c": "column_wise",
        "d": "table_row_wise",
        "e": "table_column_wise",
        "f": "grid_shard",
        "g": "data_parallel",
    }
    again = from_torchrec(theirs, TOPOLOGY, SHAPES)
    assert {t.name: (t.cut, sorted(t.shards), t.replicated) for t in again.tables} == {
        t.name: (t.cut, sorted(t.shards), t.replicated) for t in PLAN.tables
    }


def test_a_plan_of_torchrecs_planner() -> None:
    tables = [
        EmbeddingBagConfig(name=f"t{n}", num_embeddings=10 ** (n + 1), embedding_dim=64, feature_names=[f"f{n}"])
        for n in range(4)
    ]
    module = EmbeddingBagCollection(tables=tables, device=torch.device("meta"))
    planner = EmbeddingShardingPlanner(
        topology=TheirTopology(world_size=2, compute_device="cpu"), batch_size=32, stats=[], debug=False
    )
    theirs = planner.plan(module, [EmbeddingBagCollectionSharder()])
    shapes = {each.name: (each.num_embeddings, each.embedding_dim) for each in tables}
    plan = from_torchrec(theirs, Topology(ranks_per_host=2), shapes)
    plan.check_tables(shapes)
    assert from_torchrec(to_torchrec(plan), plan.topology, shapes) == plan


def test_what_torchrec_has_not() -> None:
    plan = ShardingPlan(topology=TOPOLOGY, tables=(cuts.row_wise("t", 10, 8, ranks=[3, 1]),))
    with pytest.raises(PlanError, match=r"'t': TorchRec cuts rows over all ranks in order, the plan over \[3, 1\]"):
        to_torchrec(plan)
    with pytest.raises(PlanError, match=r"a table 'sparse\.a' that is not among the shapes"):
        from_torchrec(to_torchrec(PLAN), TOPOLOGY, {})


def test_constraints() -> None:
    theirs = {
        "a": ParameterConstraints(sharding_types=["column_wise", "grid_shard"], min_partition=16),
        "b": ParameterConstraints(pooling_factors=[3.0, 5.0], feature_names=["f", "g"]),
        "c": ParameterConstraints(pooling_factors=[2.0], feature_names=["h", "i"]),
    }
    constraints, poolings = constraints_from_torchrec(theirs)
    assert constraints == {
        "a": Constraint(cuts=("column_wise", "grid"), min_columns=16),
        "b": Constraint(),
        "c": Constraint(),
    }
    assert poolings == {"f": 3.0, "g": 5.0, "h": 2.0, "i": 2.0}
    with pytest.raises(PlanError, match="does not have the sharding types"):
        constraints_from_torchrec({"a": ParameterConstraints(sharding_types=["diagonal"])})

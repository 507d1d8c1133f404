"""The plan of a case: one cut for all the tables, three of them in turn, or the planner's choice."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal

from benchmarks.harness.layouts import cut_plan
from benchmarks.harness.timing.case import Case
from benchmarks.harness.workload import WorkloadTable
from shardrec.layout import ShardingPlan, Topology

__all__ = ["TABLES_OF_DLRM", "CaseLayout", "case_plan", "renamed"]

CaseLayout = Literal["table_wise", "row_wise", "column_wise", "mixed", "planner"]
"""``mixed``: table-wise, row-wise and column-wise by turns. ``planner``: what :func:`shardrec.plan` makes of the cuts
that TorchRec has, too."""

TABLES_OF_DLRM = "sparse_arch.embedding_bag_collection."
"""Before the table names of a DLRM."""

_MIXED = ("table_wise", "row_wise", "column_wise")


def case_plan(case: Case) -> ShardingPlan:
    """The plan that all the sides follow, under the tables' own names. The same each time."""
    topology = Topology(ranks_per_host=case.ranks)
    if case.layout == "planner":
        return _planned(case.tables, topology, case)
    if case.layout == "mixed":
        return cut_plan(case.tables, "mixed", topology, turns=_MIXED)
    return cut_plan(case.tables, case.layout, topology)


def renamed(plan: ShardingPlan, prefix: str) -> ShardingPlan:
    """The plan of tables whose names begin with ``prefix``."""
    tables = tuple(
        dataclasses.replace(
            layout,
            name=prefix + layout.name,
            shards=tuple(dataclasses.replace(shard, table=prefix + shard.table) for shard in layout.shards),
        )
        for layout in plan.tables
    )
    return ShardingPlan(topology=plan.topology, tables=tables)


def _planned(tables: Sequence[WorkloadTable], topology: Topology, case: Case) -> ShardingPlan:
    from benchmarks.harness.module import unsharded_module
    from shardrec.planner import Constraint
    from shardrec.planner import plan as make_plan

    module = unsharded_module(tables, pooled=True, weighted=False, optimizer=case.optimizer)
    return make_plan(
        module,
        topology,
        batch_size=case.batch_size,
        poolings={table.feature: float(table.pooling) for table in tables},
        constraints={"*": Constraint(cuts=_MIXED)},
    )

"""The plan of a workload: every table by one cut, or by all of them in turn; or from a file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from benchmarks.harness.workload import WorkloadTable
from shardrec.errors import ConfigError
from shardrec.layout import COLUMN_UNIT, ShardingPlan, TableLayout, Topology, cuts

__all__ = ["cut_plan", "given_plan"]


def cut_plan(
    tables: Sequence[WorkloadTable], cut: str, topology: Topology, *, turns: Sequence[str] = ()
) -> ShardingPlan:
    """Every table by ``cut``, tables by turns where a table has one rank or one host.

    Args:
        tables: of the workload.
        cut: of ``benchmarks.harness.config.Cut`` but the planner's. ``"mixed"`` takes the cuts in turn, without
            ``data_parallel``.
        topology: the ranks.
        turns: the cuts that ``"mixed"`` takes instead.

    Raises:
        PlanError: if a table cannot be cut so.
    """
    if cut != "mixed" and cut not in _CUTS:
        raise ConfigError(f"there is no cut {cut!r}. The cuts are mixed, {', '.join(_CUTS)}")
    every = [cut] if cut != "mixed" else turns or [name for name in _CUTS if name != "data_parallel"]
    layouts = [
        _CUTS[every[number % len(every)]](number // len(every), table, topology) for number, table in enumerate(tables)
    ]
    return ShardingPlan(topology=topology, tables=tuple(layouts))


def given_plan(path: str, tables: Sequence[WorkloadTable], world_size: int) -> ShardingPlan:
    """The plan in a file.

    Args:
        path: what ``ShardingPlan.save`` wrote.
        tables: of the workload.
        world_size: number of ranks.

    Raises:
        ConfigError: if there is no such file, or it is for another number of ranks.
        PlanError: if it is no plan, or one of other tables.
    """
    try:
        plan = ShardingPlan.load(path)
    except OSError as error:
        raise ConfigError(f"plan (--plan) is {path!r}: {error.strerror}. Give a plan.json") from error
    plan.check_tables({table.name: (table.rows, table.dim) for table in tables})
    if plan.world_size != world_size:
        raise ConfigError(
            f"plan (--plan) {path!r} is for {plan.world_size} ranks and there are {world_size}: start "
            f"{plan.world_size} (--nproc)"
        )
    return plan


def _stripes(table: WorkloadTable, most: int) -> int:
    """Column stripes that the table's width allows."""
    return min(most, max(1, table.dim // COLUMN_UNIT))


def _table_wise(turn: int, table: WorkloadTable, topology: Topology) -> TableLayout:
    return cuts.table_wise(table.name, table.rows, table.dim, rank=turn % topology.world_size)


def _row_wise(turn: int, table: WorkloadTable, topology: Topology) -> TableLayout:
    return cuts.row_wise(table.name, table.rows, table.dim, ranks=range(topology.world_size))


def _column_wise(turn: int, table: WorkloadTable, topology: Topology) -> TableLayout:
    size = topology.world_size
    ranks = [(turn + number) % size for number in range(_stripes(table, size))]
    return cuts.column_wise(table.name, table.rows, table.dim, ranks=ranks)


def _table_row_wise(turn: int, table: WorkloadTable, topology: Topology) -> TableLayout:
    return cuts.table_row_wise(table.name, table.rows, table.dim, host=turn % topology.hosts, topology=topology)


def _table_column_wise(turn: int, table: WorkloadTable, topology: Topology) -> TableLayout:
    return cuts.table_column_wise(table.name, table.rows, table.dim, host=turn % topology.hosts, topology=topology)


def _grid(turn: int, table: WorkloadTable, topology: Topology) -> TableLayout:
    size = topology.hosts
    hosts = [(turn + number) % size for number in range(_stripes(table, size))]
    return cuts.grid(table.name, table.rows, table.dim, hosts=hosts, topology=topology)


def _data_parallel(turn: int, table: WorkloadTable, topology: Topology) -> TableLayout:
    return cuts.data_parallel(table.name, table.rows, table.dim)


_CUTS: Mapping[str, Callable[[int, WorkloadTable, Topology], TableLayout]] = {
    "table_wise": _table_wise,
    "row_wise": _row_wise,
    "column_wise": _column_wise,
    "table_row_wise": _table_row_wise,
    "table_column_wise": _table_column_wise,
    "grid": _grid,
    "data_parallel": _data_parallel,
}

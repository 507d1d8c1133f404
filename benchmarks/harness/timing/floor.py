"""The least time that a step could take: the bytes that must move, over bandwidths measured in the same run (pure).

docs/performance.md has the formula of what ranks send each other; this adds what a rank reads and writes in its own
memory. Each figure is the expectation for the case's ids::

    read       ids     8 N + 4 bags      the rank's own batch, as its KeyedJaggedTensor holds it
    read       rows    u C 4             u distinct rows of the rank's shards, looked up by any rank; the bags of a row
                                         that is looked up twice may find it in a cache
    read       sums    4 B C (A - 1)     partial sums of the other row blocks, where a table has A of them
    write      output  4 B D
    -- training
    read       gradient 4 B D
    both       update  2 u C 4 + state   rows read and written again, and their optimizer's state
    -- several ranks
    sent       S                         what leaves the rank

    through memory  (memory + 2 S) / copy bandwidth          what is sent is written once and read once more
    over the links  memory / copy bandwidth + S / link bandwidth

Rows are random, which costs more than a copy. The gather floor counts them at the rates of random rows::

    memory          (memory - rows - update) / copy bandwidth + rows / gather bandwidth + update / scatter bandwidth

Legend: B samples of a rank, N ids of its batch, D columns of all tables, C columns of a shard.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from benchmarks.harness.timing.case import Case
from benchmarks.harness.volume import (
    CollectionTraffic,
    TableTraffic,
    Volume,
    header_columns,
    step_volume,
    uniform_traffic,
)
from benchmarks.harness.workload import WorkloadTable
from shardrec.layout import ShardingPlan, TableLayout

__all__ = ["Floor", "RankBytes", "floor_of", "step_bytes"]

_FLOAT, _ID, _LENGTH = 4, 8, 4
_ZIPF_EXPONENT = 1.05


@dataclass(frozen=True, kw_only=True)
class RankBytes:
    """Bytes that one rank has to move in a step.

    Args:
        ids: of its batch, read.
        rows: of its shards, read in forward.
        sums: other row blocks' partial sums, read.
        output: written.
        gradient: of the output, read.
        update: rows and optimizer state, read and written.
        sent: to other ranks.
    """

    ids: float
    rows: float
    sums: float
    output: float
    gradient: float
    update: float
    sent: float

    @property
    def memory(self) -> float:
        """All that is read and written, without the exchange's own."""
        return self.ids + self.rows + self.sums + self.output + self.gradient + self.update


@dataclass(frozen=True, kw_only=True)
class Floor:
    """The least time of a step, in milliseconds.

    Args:
        through_memory: ranks exchange by reading each other's memory.
        over_links: they exchange with the process group's all-to-alls.
    """

    through_memory: float
    over_links: float


def step_bytes(case: Case, plan: ShardingPlan) -> list[RankBytes]:
    """What each rank has to move in a step of the embeddings (of a whole model, too: its embeddings)."""
    tables = case.tables
    ids = sum(table.pooling for table in tables) * case.batch_size
    columns = sum(table.dim for table in tables)
    volume = _volume(case, plan)
    found = []
    for rank in range(case.ranks):
        rows = update = 0.0
        for table in tables:
            for shard in plan.by_name[table.name].on_rank(rank):
                distinct = _distinct(case, table) * shard.rows / table.rows
                rows += distinct * shard.cols * _FLOAT
                update += 2 * distinct * (shard.cols * _FLOAT + _state_bytes(case.optimizer, shard.cols))
        sums = sum(table.dim * (_blocks(plan.by_name[table.name]) - 1) for table in tables)
        output = float(_FLOAT * case.batch_size * columns)
        found.append(
            RankBytes(
                ids=_ID * ids + _LENGTH * case.batch_size * len(tables),
                rows=rows,
                sums=_FLOAT * case.batch_size * sums,
                output=output,
                gradient=output if case.trains else 0.0,
                update=update if case.trains else 0.0,
                sent=volume.sent(rank=rank),
            )
        )
    return found


def floor_of(
    ranks: Sequence[RankBytes], machine: Mapping[str, float], *, other_ms: float = 0.0, gather: bool = False
) -> Floor:
    """The least time of the slowest rank.

    Args:
        ranks: what each has to move.
        machine: ``memory``, bytes read and written per second by a copy; ``link``, bytes per second that leave a rank;
            for ``gather`` also ``gather`` and ``scatter``, of random rows.
        other_ms: what the step takes besides, such as a model's dense part, measured by itself.
        gather: count rows and their updates at the rates of random rows, not of a copy.
    """
    memory, link = machine["memory"], machine["link"]
    read, changed = (machine["gather"], machine["scatter"]) if gather else (memory, memory)

    def own(rank: RankBytes) -> float:
        return (rank.memory - rank.rows - rank.update) / memory + rank.rows / read + rank.update / changed

    return Floor(
        through_memory=other_ms + 1e3 * max(own(rank) + 2 * rank.sent / memory for rank in ranks),
        over_links=other_ms + 1e3 * max(own(rank) + (rank.sent / link if rank.sent else 0.0) for rank in ranks),
    )


def _volume(case: Case, plan: ShardingPlan) -> Volume:
    per_rank = [case.batch_size] * case.ranks
    traffic = [_traffic(case, table, plan.by_name[table.name]) for table in case.tables]
    groups = {one.whole_rows for one in traffic}
    collection = CollectionTraffic(tables=traffic, batch_sizes=per_rank)
    return step_volume([collection], plan.topology, columns=header_columns([len(groups)]), train=case.trains)


def _traffic(case: Case, table: WorkloadTable, layout: TableLayout) -> TableTraffic:
    whole_rows = case.optimizer == "rowwise_adagrad" and len(layout.stripes()) > 1
    even = uniform_traffic(layout, [table.pooling * case.batch_size] * case.ranks, whole_rows=whole_rows)
    # Which rows are frequent is random, so that row blocks get equal shares of them.
    scale = _distinct(case, table) / max(sum(even.rows), 1e-30)
    return replace(even, rows=tuple(count * scale for count in even.rows))


def _distinct(case: Case, table: WorkloadTable) -> float:
    """Expected number of a table's rows that the ranks together look up."""
    import numpy as np

    from shardrec.trainer.data.zipf import zipf_probabilities  # whose package imports torch

    draws = table.pooling * case.batch_size * case.ranks
    if case.ids == "uniform":
        return table.rows * -float(np.expm1(draws * np.log1p(-1 / table.rows))) if table.rows > 1 else 1.0
    missed = np.exp(draws * np.log1p(-np.minimum(zipf_probabilities(table.rows, _ZIPF_EXPONENT), 1 - 1e-12)))
    return float((1 - missed).sum())


def _blocks(layout: TableLayout) -> int:
    """Row blocks of a column: as many partial sums are added up."""
    return max(len(stripe.shards) for stripe in layout.stripes())


def _state_bytes(optimizer: str, columns: int) -> int:
    """Of a row's part."""
    return {"rowwise_adagrad": _FLOAT, "adagrad": _FLOAT * columns, "adam": 2 * _FLOAT * columns}.get(optimizer, 0)

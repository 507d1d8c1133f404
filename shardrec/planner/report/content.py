"""What a report of a plan says, whatever it is shown as: headings, facts, a table and charts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shardrec.layout.plan import ShardingPlan
    from shardrec.layout.report import PlanReport
    from shardrec.layout.table_layout import TableLayout

_GIB = 2.0**30
_MIB = 2.0**20
_BYTES_PER_WEIGHT = 4


@dataclass(frozen=True, kw_only=True)
class Chart:
    """Stacked bars, one per rank.

    Args:
        title: of the chart.
        unit: of the values.
        names: of the parts of a bar.
        bars: per rank, one value for each part.
        lines: (name, value) of horizontal lines.
    """

    title: str
    unit: str
    names: tuple[str, ...]
    bars: tuple[tuple[float, ...], ...]
    lines: tuple[tuple[str, float], ...] = ()

    @property
    def top(self) -> float:
        """Highest bar or line."""
        return max([*(sum(bar) for bar in self.bars), *(value for _, value in self.lines)], default=0.0) or 1.0


@dataclass(frozen=True, kw_only=True)
class Column:
    """A column of the table of tables.

    Args:
        name: its heading.
        cells: text per table.
        is_number: the cells are numbers, with commas between thousands.
        is_detail: left out where there is little room.
    """

    name: str
    cells: tuple[str, ...]
    is_number: bool = False
    is_detail: bool = False


@dataclass(frozen=True, kw_only=True)
class Content:
    """What there is to say of a plan.

    Args:
        title: one line.
        facts: of the whole plan, a line each.
        columns: of the table of tables.
        charts: load per rank.
    """

    title: str
    facts: tuple[str, ...]
    columns: tuple[Column, ...]
    charts: tuple[Chart, ...]


def content(plan: ShardingPlan) -> Content:
    """The contents of a plan's report. A plan that the planner did not make has the weights alone (fp32)."""
    report, world = plan.report, plan.world_size
    title = f"Sharding plan: {len(plan.tables)} tables on {world} rank{'s' * (world > 1)}"
    reports = {} if report is None else {table.name: table for table in report.tables}
    sizes, cuts = [], []
    for layout in plan.tables:
        known = reports.get(layout.name)
        weights = layout.num_embeddings * layout.embedding_dim * _BYTES_PER_WEIGHT
        sizes.append(f"{(weights if known is None else known.bytes) / _MIB:,.2f}")
        cuts.append((layout.cut if known is None else known.cut).replace("_", "-"))
    rows, dims = zip(
        *((f"{layout.num_embeddings:,}", str(layout.embedding_dim)) for layout in plan.tables), strict=True
    )
    columns = [
        Column(name="table", cells=tuple(layout.name for layout in plan.tables)),
        Column(name="rows", cells=rows, is_number=True),
        Column(name="dim", cells=dims, is_number=True),
        Column(name="MiB", cells=tuple(sizes), is_number=True, is_detail=report is not None),
        Column(name="cut", cells=tuple(cuts)),
        Column(name="ranks", cells=tuple(map(_ranks, plan.tables))),
    ]
    if report is None:
        numels = [plan.local_numel(rank) * _BYTES_PER_WEIGHT for rank in range(world)]
        facts = [_by_rank("embedding MiB", [size / _MIB for size in numels], 1)]
        bars = tuple((size / _GIB,) for size in numels)
        charts = [Chart(title="Weights of each rank (fp32)", unit="GiB", names=("weights",), bars=bars)]
    else:
        title += f", {report.batch_size:,} samples a rank"
        facts, charts = _facts(report, uneven=plan.topology.rank_memory is not None), _charts(report)
        about = [reports[layout.name] for layout in plan.tables]
        columns += [
            Column(name="ms, all ranks", cells=tuple(f"{table.ms:,.3f}" for table in about), is_number=True),
            Column(
                name="next-best cut",
                cells=tuple(table.next_cut.replace("_", "-") for table in about),
                is_detail=True,
            ),
            Column(name="why it lost", cells=tuple(table.reason for table in about), is_detail=True),
        ]
    return Content(title=title, facts=tuple(facts), columns=tuple(columns), charts=tuple(charts))


def headline(report: PlanReport) -> str:
    """What a step is estimated to take, and how good the plan is proven to be, in a sentence each."""
    if report.gap == 0:
        proven = "Proven to be the best plan"
    elif report.gap == inf:
        proven = "Nothing is proven about better plans"
    else:
        proven = f"Proven within {max(report.gap, 1e-4):.2%} of the best plan"
    return (
        f"Step estimate: {report.cost_ms:,.3f} ms on the slowest rank + {report.overhead_ms:,.3f} ms fixed. "
        f"{proven} by this cost model."
    )


def _facts(report: PlanReport, *, uneven: bool) -> list[str]:
    limit = "" if report.capacity == inf else f" of {'up to ' * uneven}{report.capacity / _GIB:,.2f}"
    slowest = max(range(len(report.times)), key=report.rank_ms.__getitem__)
    parts = zip(report.components, report.times[slowest], strict=True)
    facts = [
        headline(report),
        f"figures: {report.profile} ({report.source})",
        _by_rank("ms", report.rank_ms, 3),
        _by_rank("GiB", [size / _GIB for size in report.rank_bytes], 3) + limit,
        f"rank {slowest} is the slowest: " + ", ".join(f"{name} {ms:,.3f}" for name, ms in parts),
    ]
    if any(report.host_bytes):
        facts.append(_by_rank("GiB in the host's memory", [size / _GIB for size in report.host_bytes], 3))
    if report.timed_out:
        facts.append("the time limit ended the search. More time may find a better plan or a higher bound")
    if report.exhausted:
        facts.append("the search used up its effort (--effort). More may find a better plan or a higher bound")
    return facts


def _by_rank(what: str, values: Sequence[float], digits: int) -> str:
    if len(values) > 8:
        return f"{what} per rank: {min(values):,.{digits}f} to {max(values):,.{digits}f}"
    return f"{what} per rank: " + ", ".join(f"{rank}: {value:,.{digits}f}" for rank, value in enumerate(values))


def _ranks(layout: TableLayout) -> str:
    """The ranks of a table: all, a range, or a list."""
    if layout.replicated:
        return "all"
    ranks = layout.ranks
    if len(ranks) > 4 and ranks == tuple(range(ranks[0], ranks[-1] + 1)):
        return f"{ranks[0]}-{ranks[-1]}"
    return ", ".join(map(str, ranks))


def _charts(report: PlanReport) -> list[Chart]:
    # A limit far above the bars would flatten them.
    near = report.capacity < inf and report.capacity <= 4 * max(report.rank_bytes)
    return [
        Chart(
            title="Time per rank in a step",
            unit="ms",
            names=report.components,
            bars=report.times,
            lines=(("proven bound", report.bound_ms),),
        ),
        Chart(
            title="Memory per rank",
            unit="GiB",
            names=report.uses,
            bars=tuple(tuple(size / _GIB for size in sizes) for sizes in report.memory),
            lines=(("limit", report.capacity / _GIB),) if near else (),
        ),
    ]

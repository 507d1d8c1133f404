"""A plan of the planner's as a table for people (rich)."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.table import Table

from shardrec.layout.report import PlanReport, TableReport
from shardrec.planner.report.bare import bare_table, ranks_text

if TYPE_CHECKING:
    from shardrec.layout.plan import ShardingPlan

__all__ = ["explain", "headline", "reasons_text"]

_GIB = 2**30


def headline(report: PlanReport) -> str:
    """What a step is estimated to take, and how good the plan is proven to be, in a sentence each."""
    if report.gap == 0:
        proven = "Proven to be the best plan"
    elif report.gap == inf:
        proven = "Nothing is proven about better plans"
    else:
        proven = f"Proven within {report.gap:.2%} of the best plan"
    return (
        f"Step estimate: {report.cost_ms:,.3f} ms on the slowest rank + {report.overhead_ms:,.3f} ms fixed. "
        f"{proven} by this cost model."
    )


def explain(plan: ShardingPlan, *, reasons: bool = True) -> Table:
    """A plan as a rich table for people: each table's shape, cut and ranks, then the load of each rank.

    Of a plan that the planner made it also shows what each table costs, and how good the plan is proven to be.

    Args:
        plan: any plan.
        reasons: show each table's MiB and why its next-best cut lost, too, which takes 100 columns, and a line or more
            per table.

    Returns:
        The table; ``rich.print`` shows it.
    """
    report = plan.report
    return bare_table(plan) if report is None else _explained(plan, report, reasons)


def _explained(plan: ShardingPlan, report: PlanReport, reasons: bool) -> Table:
    world = plan.world_size
    table = Table(
        title=f"Sharding plan: {len(plan.tables)} tables on {world} rank{'s' * (world > 1)}, "
        f"{report.batch_size:,} samples a rank",
        caption="\n".join(_caption(report, uneven=plan.topology.rank_memory is not None)),
        caption_justify="left",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        min_width=60,  # as far as the terminal has them: the caption is as wide as the table
    )
    table.add_column("table", overflow="fold")
    for heading in ("rows", "dim", "MiB")[: 3 if reasons else 2]:
        table.add_column(heading, justify="right", no_wrap=True)
    # Long ones, such as "column-wise 16|16|16|16", are broken; a cut's name should not be.
    is_short = all(len(about.cut) <= 16 for about in report.tables)
    table.add_column("cut", overflow="fold", no_wrap=is_short)
    table.add_column("ranks", overflow="fold")
    table.add_column("ms", justify="right", no_wrap=True)
    if reasons:
        table.add_column("next-best cut", overflow="fold", min_width=9)
        table.add_column("why it lost", overflow="fold", min_width=9)
    by_name = {each.name: each for each in report.tables}
    for layout in plan.tables:
        about = by_name[layout.name]
        table.add_row(
            layout.name,
            f"{layout.num_embeddings:,}",
            str(layout.embedding_dim),
            *([_mib(about)] if reasons else ()),
            about.cut.replace("_", "-"),
            ranks_text(layout),
            f"{about.ms:,.3f}",
            *((about.next_cut.replace("_", "-"), about.reason) if reasons else ()),
        )
    return table


def reasons_text(report: PlanReport) -> str:
    """Each table's MiB and why its next-best cut lost, a line for each: for what is too narrow for more columns."""
    lines = []
    for each in report.tables:
        other = f"not {each.next_cut.replace('_', '-')}, " if each.next_cut else ""
        lines.append(f"{each.name}: {_mib(each)} MiB, {other}{each.reason}")
    return "\n".join(lines)


def _mib(about: TableReport) -> str:
    return f"{about.bytes / 2**20:,.2f}"


def _caption(report: PlanReport, *, uneven: bool) -> list[str]:
    times, sizes = report.rank_ms, report.rank_bytes
    lines = [headline(report), f"figures: {report.profile} ({report.source})"]
    limit = "" if report.capacity == inf else f" of {'up to ' * uneven}{report.capacity / _GIB:,.2f}"
    if len(times) > 8:
        lines.append(f"ms per rank: {min(times):,.3f} to {max(times):,.3f}")
        lines.append(f"GiB per rank: {min(sizes) / _GIB:,.2f} to {max(sizes) / _GIB:,.2f}{limit}")
    else:
        lines.append("ms per rank: " + ", ".join(f"{rank}: {time:,.3f}" for rank, time in enumerate(times)))
        lines.append("GiB per rank: " + ", ".join(f"{r}: {size / _GIB:,.3f}" for r, size in enumerate(sizes)) + limit)
    slowest = max(range(len(times)), key=times.__getitem__)
    parts = zip(report.components, report.times[slowest], strict=True)
    lines.append(f"rank {slowest} is the slowest: " + ", ".join(f"{name} {ms:,.3f}" for name, ms in parts))
    if report.timed_out:
        lines.append("the time limit ended the search; more time may find a better plan or a higher bound")
    return lines

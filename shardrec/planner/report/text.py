"""A plan as a table for people (rich)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.table import Table

from shardrec.planner.report.content import content

if TYPE_CHECKING:
    from shardrec.layout.plan import ShardingPlan


def explain(plan: ShardingPlan, *, reasons: bool = True) -> Table:
    """A plan as a rich table for people: each table's shape, cut and ranks, then the load per rank.

    Of a plan that the planner made it also shows what each table costs, and how good the plan is proven to be.

    Args:
        plan: any plan.
        reasons: also show each table's MiB and why its next-best cut was not chosen, which takes 100 columns, and a
            line or more per table.

    Returns:
        The table. ``rich.print`` shows it.
    """
    shown = content(plan)
    table = Table(
        title=shown.title,
        caption="\n".join(shown.facts),
        caption_justify="left",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        min_width=60,  # as far as the terminal has them: the caption is as wide as the table
    )
    columns = [column for column in shown.columns if reasons or not column.is_detail]
    for column in columns:
        # Long cuts, such as "column-wise 16|16|16|16", are broken. A cut's name should not be.
        whole = column.is_number or (column.name == "cut" and all(len(cell) <= 16 for cell in column.cells))
        table.add_column(
            column.name,
            justify="right" if column.is_number else "left",
            no_wrap=whole,
            overflow="ellipsis" if column.is_number else "fold",
            min_width=9 if column.is_detail and not column.is_number else None,
        )
    for cells in zip(*(column.cells for column in columns), strict=True):
        table.add_row(*cells)
    return table


def reasons_text(plan: ShardingPlan) -> str:
    """Each table's MiB and why its next-best cut lost, a line per table: for terminals that are too narrow for more
    columns."""
    cells = {column.name: column.cells for column in content(plan).columns}
    rows = zip(*(cells[name] for name in ("table", "MiB", "next-best cut", "why it lost")), strict=True)
    return "\n".join(f"{name}: {size} MiB, {f'not {cut}, ' * (cut != '')}{why}" for name, size, cut, why in rows)

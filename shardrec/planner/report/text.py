"""A plan as a table for people (rich)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from os.path import commonprefix
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from shardrec.planner.report.content import Content, content

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, ConsoleRenderable

    from shardrec.layout.plan import ShardingPlan

_REASONS_WIDTH = 100
"""Columns from which on the table says why cuts lost. Below, lines after it do."""


def explain(plan: ShardingPlan, *, reasons: bool = True) -> ConsoleRenderable:
    """A plan as a rich table for people: each table's shape, cut and ranks, then the load per rank.

    Of a plan that the planner made it also shows what each table costs, and how good the plan is proven to be.

    Args:
        plan: any plan.
        reasons: also show each table's MiB and why its next-best cut was not chosen: in the table if the console has
            100 columns, else in a line per table after it.

    Returns:
        What ``rich.print`` shows.
    """
    return _Explanation(plan, reasons)


class _Explanation:
    """The report of a plan, laid out for the width of the console that prints it."""

    def __init__(self, plan: ShardingPlan, reasons: bool) -> None:
        self._content, self._reasons = content(plan), reasons
        names = [layout.name for layout in plan.tables]
        # Of the tables' collection, or of the module that holds all collections.
        self._path = commonprefix(names).rpartition(".")[0]  # noqa: RUF071  # names are no paths of files
        self._names = [name[len(self._path) :].removeprefix(".") for name in names]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Table | Text]:
        is_wide = options.max_width >= _REASONS_WIDTH
        yield self._table(details=self._reasons and is_wide)
        if self._reasons and not is_wide and any(column.is_detail for column in self._content.columns):
            yield Text(_reasons_text(self._content, self._names), overflow="fold")

    def _table(self, *, details: bool) -> Table:
        shown = self._content
        table = Table(
            title="\n".join([shown.title, *([f"tables of {self._path}"] if self._path else [])]),
            caption="\n".join(shown.facts),
            caption_justify="left",
            box=SIMPLE_HEAD,
            padding=(0, 1, 0, 0),
            min_width=60,  # as far as the terminal has them: the caption is as wide as the table
        )
        columns = [column for column in shown.columns if details or not column.is_detail]
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
        for name, (_, *cells) in zip(self._names, zip(*(column.cells for column in columns), strict=True), strict=True):
            table.add_row(name, *cells)
        return table


def _reasons_text(shown: Content, names: Sequence[str]) -> str:
    """Each table's MiB and why its next-best cut lost, a line per table."""
    cells = {column.name: column.cells for column in shown.columns}
    rows = zip(names, *(cells[name] for name in ("MiB", "next-best cut", "why it lost")), strict=True)
    lines = (f"{name}: {size} MiB, {f'not {cut}, ' * (cut != '')}{why}" for name, size, cut, why in rows)
    return "\n".join(["why other cuts lost:", *lines])

"""Where tables are printed to, and what is shown while a command works."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["LOG_WIDTH", "console", "working"]

LOG_WIDTH = 120
"""Columns of a log file."""


def console(width: int = LOG_WIDTH, *, stderr: bool = False) -> Console:
    """A console as wide as the terminal; in a file or a pipe, which rich takes to have 80 columns, as wide as asked.

    Args:
        width: columns, where there is no terminal and ``COLUMNS`` is not set.
        stderr: print to it instead of stdout.
    """
    from rich.console import Console

    found = Console(stderr=stderr)
    return found if found.is_terminal or os.environ.get("COLUMNS") else Console(width=width, stderr=stderr)


@contextmanager
def working(text: str, *, unit: str = "rows") -> Iterator[Callable[[int], None]]:
    """Shows a spinner, ``text`` and the time so far on stderr while the block runs; nothing where it is no terminal.

    Args:
        text: what is done.
        unit: of what is counted.

    Yields:
        A function that adds to the count, which is shown from the first call on.
    """
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    shown = console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    with Progress(*columns, console=shown, transient=True, disable=not shown.is_terminal) as progress:
        task = progress.add_task(text, total=None)

        def add(count: int) -> None:
            progress.advance(task, count)
            progress.update(task, description=f"{text}  {int(progress.tasks[0].completed):,} {unit}")

        yield add

"""Where tables and progress are printed to."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["LOG_WIDTH", "console"]

LOG_WIDTH = 120
"""Columns of a log file."""


def console(width: int = LOG_WIDTH, *, stderr: bool = False) -> Console:
    """A console as wide as the terminal; in a file or a pipe, which rich takes to have 80 columns, as wide as asked.

    Args:
        width: columns, where there is no terminal and ``COLUMNS`` is not set.
        stderr: print to it instead of stdout.
    """
    import os

    from rich.console import Console

    found = Console(stderr=stderr)
    return found if found.is_terminal or os.environ.get("COLUMNS") else Console(width=width, stderr=stderr)

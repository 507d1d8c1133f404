"""The last words of a command that did not get through."""

from __future__ import annotations

import os
import sys

from shardrec.errors import InputError, ShardrecError

__all__ = ["ended_by_error", "ended_by_user"]


def ended_by_user() -> None:
    """Say on stderr that the run was stopped."""
    if _speaks():
        print("\nshardrec: stopped", file=sys.stderr, flush=True)


def ended_by_error(error: Exception) -> None:
    """Show an error on stderr: in a panel on a terminal, as plain text elsewhere.

    Of ranks that a launcher such as torchrun started each shows its own error; one that all share is shown by rank 0.
    """
    if isinstance(error, InputError) and not _speaks():
        return
    text = str(error) or type(error).__name__
    if not isinstance(error, ShardrecError):
        text = f"unexpected {type(error).__name__}: {text}\nRun it again with --debug for the traceback"
    who = "shardrec" if "RANK" not in os.environ else f"shardrec, rank {os.environ['RANK']}"
    if not sys.stderr.isatty():
        print(f"{who}: error: {text}", file=sys.stderr, flush=True)
        return
    from rich.console import Console
    from rich.panel import Panel
    from rich.text import Text

    Console(stderr=True).print(Panel(Text(text), title=f"{who}: error", title_align="left", border_style="red"))


def _speaks() -> bool:
    return os.environ.get("RANK", "0") == "0"

"""The last words of a command that did not get through."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO, cast

from shardrec import InputError, ShardrecError, VersionError
from shardrec.launch import EXTRAS, check_extra
from shardrec.trainer.console import CheckedOutput, tolerate_characters
from shardrec.trainer.run import RunStopped

SAVED = 75
"""Exit code of a run that was told to end and has saved: the system's EX_TEMPFAIL, "try again"."""


def ended_after_saving(stopped: RunStopped) -> None:
    """Say on stderr that the run was stopped, and how to continue."""
    if _speaks():
        told = f"stopped after step {stopped.step:,}, which is saved. Continue with --out {stopped.folder} --resume"
        print(f"\nshardrec: {told}", file=sys.stderr, flush=True)


def ended_by_user(saved: str = "") -> None:
    """Say on stderr that the run was stopped, and what is saved of it."""
    if _speaks():
        print("\nshardrec: stopped" + f"; {saved}" * bool(saved), file=sys.stderr, flush=True)


@contextmanager
def writable_output() -> Iterator[None]:
    """Inside, what is printed reaches stdout, or the command ends with one message and exit code 1."""
    if sys.stdout is None:  # closed (``>&-``): a file that is opened would get its number, and what is printed
        unwritable = os.open(os.devnull, os.O_RDONLY)
        os.dup2(unwritable, 1)
        sys.stdout = os.fdopen(1, "w", closefd=False)
    stream = sys.stdout
    tolerate_characters(stream)
    sys.stdout = cast(TextIO, CheckedOutput(stream))
    try:
        yield
        sys.stdout.flush()
    finally:
        sys.stdout = stream


def ended_by_error(error: Exception) -> None:
    """Show an error on stderr: in a panel on a terminal, as plain text elsewhere.

    Of ranks that a launcher such as torchrun started each shows its own error. One that all share is shown by rank 0.
    """
    if isinstance(error, InputError) and not _speaks():
        return
    extra = next((name for name, modules in EXTRAS.items() if getattr(error, "name", None) in modules), None)
    if isinstance(error, ModuleNotFoundError) and extra is not None:
        try:
            check_extra(extra)
        except VersionError as missing:  # all that the extra lacks, and not only what was imported first
            error = missing
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

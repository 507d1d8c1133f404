"""Where tables are printed to, and what is shown while a command works."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import IO, TYPE_CHECKING, TextIO, cast

from shardrec import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

LOG_WIDTH = 120
"""Columns of a log file."""


def console(width: int = LOG_WIDTH, *, stderr: bool = False, lossy: bool = False) -> Console:
    """A console as wide as the terminal; in a file or a pipe, which rich takes to have 80 columns, as wide as asked.

    Args:
        width: columns, where there is no terminal and ``COLUMNS`` is not set.
        stderr: print to it instead of stdout.
        lossy: where stdout cannot be written to (a full disk, a reader that has gone), warn on stderr, once, and go on.
    """
    from rich.console import Console

    tolerate_characters(sys.stdout)
    file = cast("IO[str]", CheckedOutput(sys.stdout, lossy=True)) if lossy and sys.stdout is not None else None
    plain = Console(stderr=stderr, file=file)
    return plain if plain.is_terminal or os.environ.get("COLUMNS") else Console(width=width, stderr=stderr, file=file)


def tolerate_characters(stream: TextIO | None) -> None:
    """Let a stream write ``?`` for what its encoding lacks, such as ASCII a plus-minus sign."""
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="replace")


class CheckedOutput:
    """Stands in for stdout: where that cannot be written to (a full disk, a reader that has gone), says so once.

    Args:
        stream: for which it stands in.
        lossy: report it as a warning on stderr, and continue; else as a ConfigError.
    """

    def __init__(self, stream: TextIO, *, lossy: bool = False) -> None:
        self._stream = stream
        self._lossy = lossy
        self._fault = ""

    def write(self, text: str) -> int:
        """As a stream's."""
        self._try(self._stream.write, text)
        return len(text)

    def flush(self) -> None:
        """As a stream's."""
        self._try(self._stream.flush)

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)

    def _try(self, act: Callable[..., object], *arguments: str) -> None:
        try:
            if not self._fault:
                act(*arguments)
                return
        except (OSError, ConfigError) as error:
            # What is held back, and all that comes, goes nowhere, so that the interpreter can close the stream.
            with suppress(OSError, ValueError):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, self._stream.fileno())
                os.close(nowhere)
            self._fault = str(error)
            if isinstance(error, OSError):
                self._fault = f"standard output cannot be written to: {error.strerror}; send it elsewhere"
            if self._lossy:
                with suppress(OSError):
                    print(f"shardrec: warning: {self._fault}. The run goes on", file=sys.stderr, flush=True)
        if not self._lossy:
            raise ConfigError(self._fault)


@contextmanager
def working(text: str, *, unit: str = "rows") -> Iterator[Callable[[int], None]]:
    """Shows a spinner, ``text`` and the time so far on stderr while the block runs. Nothing where it is no terminal.

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

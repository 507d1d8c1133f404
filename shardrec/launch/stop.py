"""SIGTERM and Ctrl-C as a request to end after the current step."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Self

SAME_SIGNAL_S = 1.0
"""Seconds within which a second signal counts as the first: a terminal and a launcher both deliver one Ctrl-C."""


class RunStopped(KeyboardInterrupt):
    """Raised when a run that was asked to end has saved a checkpoint. ``--resume`` continues the run.

    Args:
        step: optimizer steps in the last checkpoint.
        folder: folder of the run.
    """

    def __init__(self, step: int, folder: str) -> None:
        super().__init__(step, folder)
        self.step = step
        self.folder = folder


@contextmanager
def handling(
    handler: Callable[[int, FrameType | None], object] | signal.Handlers, *numbers: signal.Signals
) -> Iterator[None]:
    """Install a signal handler for a while. Does nothing outside of the main thread, where Python allows none."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


class StopRequest:
    """A context in which the first SIGTERM or SIGINT is recorded and a second one raises KeyboardInterrupt.

    Does nothing outside of the main thread, where Python allows no signal handlers.

    Attributes:
        made: whether a signal was received.
    """

    def __init__(self) -> None:
        self.made = False
        self._made_at = 0.0
        self._handling = ExitStack()

    def __enter__(self) -> Self:
        # A launcher that handles Ctrl-C itself has its ranks ignore it.
        handled = [
            number for number in (signal.SIGTERM, signal.SIGINT) if signal.getsignal(number) is not signal.SIG_IGN
        ]
        self._handling.enter_context(handling(self._record, *handled))
        return self

    def __exit__(self, *unused: object) -> None:
        self._handling.close()

    def _record(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.made and now - self._made_at > SAME_SIGNAL_S:
            raise KeyboardInterrupt
        if not self.made:
            self.made, self._made_at = True, now

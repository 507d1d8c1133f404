"""SIGTERM and Ctrl-C as a request to end after the step that is under way."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any, Self

__all__ = ["SAME_SIGNAL_S", "RunStopped", "StopRequest", "handling"]

SAME_SIGNAL_S = 1.0
"""A signal so soon after the first is the same request: a terminal and a launcher both pass Ctrl-C on."""


class RunStopped(KeyboardInterrupt):
    """A run that was told to end has saved and ended; ``--resume`` continues it.

    Args:
        step: optimizer steps in its last checkpoint.
        folder: of the run.
    """

    def __init__(self, step: int, folder: str) -> None:
        super().__init__(step, folder)
        self.step = step
        self.folder = folder


@contextmanager
def handling(handler: Any, *numbers: signal.Signals) -> Iterator[None]:
    """Handle signals so; outside of the main thread, which alone may say, as they are handled."""
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
    """Notes SIGTERM and SIGINT while it is entered; a second signal raises KeyboardInterrupt.

    Outside of the main thread, which alone may handle signals, it does nothing.

    Attributes:
        made: a signal has come.
    """

    def __init__(self) -> None:
        self.made = False
        self._made_at = 0.0
        self._handling = ExitStack()

    def __enter__(self) -> Self:
        # A launcher that handles Ctrl-C itself has its ranks ignore it.
        heard = [one for one in (signal.SIGTERM, signal.SIGINT) if signal.getsignal(one) is not signal.SIG_IGN]
        self._handling.enter_context(handling(self._note, *heard))
        return self

    def __exit__(self, *unused: object) -> None:
        self._handling.close()

    def _note(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.made and now - self._made_at > SAME_SIGNAL_S:
            raise KeyboardInterrupt
        if not self.made:
            self.made, self._made_at = True, now

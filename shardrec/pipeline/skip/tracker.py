"""Where skips are between their stash and their pop.

::

    outside of a pipeline   one tracker per thread
    inside of a stage       one per micro-batch, with what other stages have stashed; the rest is sent to those that pop

A skippable asks :func:`current_skip_tracker`, so that its forward is the same in both.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from shardrec.pipeline.error import PipelineError
from shardrec.pipeline.skip.namespace import Namespace

__all__ = ["SkipKey", "SkipTracker", "changed_in_place", "current_skip_tracker", "use_skip_tracker"]

SkipKey = tuple[Namespace | None, str]
"""A skip's namespace and name."""


def changed_in_place(name: str) -> PipelineError:
    """The error of a skip whose memory was written to on its way."""
    return PipelineError(
        f"the tensor stashed as {name!r} was changed in place before it was popped, by which the skip would carry "
        f"other values: make the change out of place (inplace=False), or stash({name!r}, x.clone())"
    )


class SkipTracker:
    """Keeps skips from stash to pop, by (batch, namespace, name).

    Attributes:
        batch: number of the micro-batch whose forward runs; 0 outside of a pipeline.
    """

    def __init__(self) -> None:
        self.batch = 0
        # With how often a tensor had been changed in place; None where torch does not count.
        self._stashed: dict[tuple[int, Namespace | None, str], tuple[Any, int | None]] = {}

    def save(self, batch: int, namespace: Namespace | None, name: str, value: Any) -> None:
        """Keep a stashed value. One that a failed forward left under the same key is dropped."""
        counted = isinstance(value, Tensor) and not value.is_inference()
        self._stashed[batch, namespace, name] = value, value._version if counted else None

    def load(self, batch: int, namespace: Namespace | None, name: str) -> Any:
        """Give the value away: nothing here refers to it afterwards.

        Raises:
            KeyError: if it was not stashed.
            PipelineError: if it was changed in place since it was stashed.
        """
        value, version = self._stashed.pop((batch, namespace, name))
        if version is not None and value._version != version:
            raise changed_in_place(name)
        return value


class _Current(threading.local):
    def __init__(self) -> None:
        self.tracker = SkipTracker()


_current = _Current()


def current_skip_tracker() -> SkipTracker:
    """The tracker of the forward that runs on this thread."""
    return _current.tracker


@contextmanager
def use_skip_tracker(tracker: SkipTracker) -> Iterator[None]:
    """Make ``tracker`` the one that skippables on this thread ask."""
    before, _current.tracker = _current.tracker, tracker
    try:
        yield
    finally:
        _current.tracker = before

"""Where skips are between their stash and their pop.

::

    outside of a pipeline   SkipTracker, one per thread   a dict
    inside of a stage       its subclass StageSkips       sent to the stage that pops, received from that which stashes

A skippable asks :func:`current_skip_tracker`, so that its forward is the same in both.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from shardrec.pipeline.error import PipelineError
from shardrec.pipeline.skip.namespace import Namespace

__all__ = ["SkipKey", "SkipTracker", "Stashed", "changed_in_place", "current_skip_tracker", "use_skip_tracker"]

SkipKey = tuple[Namespace | None, str]
"""A skip's namespace and name."""


def changed_in_place(name: str) -> PipelineError:
    """The error of a skip whose memory was written to on its way."""
    return PipelineError(
        f"the tensor stashed as {name!r} was changed in place before it was popped, by which the skip would carry "
        f"other values: make the change out of place (inplace=False), or stash({name!r}, x.clone())"
    )


@dataclass(frozen=True, slots=True)
class Stashed:
    """A stashed value, and the version of its memory.

    Args:
        value: a tensor, an awaitable, None, or a nest of tensors.
        version: how often the tensor had been changed in place; None where torch does not count.
    """

    value: Any
    version: int | None

    @staticmethod
    def of(value: Any) -> Stashed:
        """Note the version that ``value`` has now."""
        counted = isinstance(value, Tensor) and not value.is_inference()
        return Stashed(value, value._version if counted else None)

    def unchanged(self, name: str) -> Any:
        """The value.

        Raises:
            PipelineError: if it was changed in place since.
        """
        if self.version is not None and self.value._version != self.version:
            raise changed_in_place(name)
        return self.value


class SkipTracker:
    """Keeps skips from stash to pop, by (batch, namespace, name).

    Attributes:
        batch: number of the micro-batch whose forward runs; 0 outside of a pipeline.
    """

    def __init__(self) -> None:
        self.batch = 0
        self._stashed: dict[tuple[int, Namespace | None, str], Stashed] = {}

    def save(self, batch: int, namespace: Namespace | None, name: str, value: Any) -> None:
        """Keep a stashed value. One that a failed forward left under the same key is dropped."""
        self._stashed[batch, namespace, name] = Stashed.of(value)

    def load(self, batch: int, namespace: Namespace | None, name: str) -> Any:
        """Give the value away: nothing here refers to it afterwards.

        Raises:
            KeyError: if it was not stashed.
            PipelineError: if it was changed in place since it was stashed.
        """
        return self._stashed.pop((batch, namespace, name)).unchanged(name)


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

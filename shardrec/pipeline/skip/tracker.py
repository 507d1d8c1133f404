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
from torch.utils._pytree import tree_leaves

from shardrec.errors import PipelineError
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
        # With how often its tensors had been changed in place.
        self._stashed: dict[tuple[int, Namespace | None, str], tuple[Any, list[int]]] = {}

    def save(self, batch: int, namespace: Namespace | None, name: str, value: Any) -> None:
        """Keep a stashed value. One that a failed forward left under the same key is dropped."""
        self._stashed[batch, namespace, name] = value, _versions(value)

    def load(self, batch: int, namespace: Namespace | None, name: str) -> Any:
        """Give the value away: nothing here refers to it afterwards.

        Raises:
            KeyError: if it was not stashed.
            PipelineError: if it was changed in place since it was stashed.
        """
        value, versions = self._stashed.pop((batch, namespace, name))
        if versions != _versions(value):
            raise changed_in_place(name)
        return value


def _versions(value: Any) -> list[int]:
    """How often each tensor of a nest was changed in place, where torch counts it."""
    tensors = (leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor))
    return [0 if tensor.is_inference() else tensor._version for tensor in tensors]


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

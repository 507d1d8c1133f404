"""Where skips are between their stash and their pop.

::

    outside of a pipeline   one tracker per thread
    inside of a stage       one per micro-batch, with tensors that other stages have stashed. The rest is sent to the
    stages that pop

A skippable asks :func:`current_skip_tracker`, so that its forward is the same in both.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch import Tensor
from torch.utils._pytree import tree_leaves

from shardrec.errors import PipelineError


@dataclass(frozen=True, slots=True)
class Namespace:
    """A scope of skip names, for :meth:`Skippable.isolate`.

    Unequal to every other namespace, but equal to its copies, also to those unpickled in another process.
    """

    _id: uuid.UUID = field(default_factory=uuid.uuid4, init=False)

    def __repr__(self) -> str:
        return f"<Namespace {self._id.hex[:8]}>"


SkipKey = tuple[Namespace | None, str]
"""A skip's namespace and name."""


def changed_in_place(name: str) -> PipelineError:
    """The error of a skip after its memory was written to on its way."""
    return PipelineError(
        f"the tensor stashed as {name!r} was changed in place before it was popped, by which the skip would carry "
        f"other values: make the change out of place (inplace=False), or stash({name!r}, x.clone())"
    )


class SkipTracker:
    """Keeps skips from stash to pop, by namespace and name."""

    def __init__(self) -> None:
        # With how often its tensors had been changed in place.
        self._stashed: dict[SkipKey, tuple[object, list[int]]] = {}

    def save(self, key: SkipKey, value: object) -> None:
        """Keep a stashed value. One that a failed forward left under the same key is dropped."""
        self._stashed[key] = value, versions_of(tree_leaves(value))

    def load(self, key: SkipKey) -> object:
        """Give the value away: nothing here refers to it afterwards.

        Raises:
            KeyError: if it was not stashed.
            PipelineError: if it was changed in place since it was stashed.
        """
        value, versions = self._stashed.pop(key)
        if versions != versions_of(tree_leaves(value)):
            raise changed_in_place(key[1])
        return value


def versions_of(leaves: Iterable[object]) -> list[int]:
    """How often each tensor was changed in place, where torch counts it. 0 for values that are not tensors."""
    return [leaf._version if isinstance(leaf, Tensor) and not leaf.is_inference() else 0 for leaf in leaves]


class _Current(threading.local):
    def __init__(self) -> None:
        self.tracker = SkipTracker()


_current = _Current()


def current_skip_tracker() -> SkipTracker:
    """The tracker of the forward that runs on this thread."""
    return _current.tracker


@contextmanager
def use_skip_tracker(tracker: SkipTracker) -> Iterator[None]:
    """Make ``tracker`` the tracker that skippables on this thread ask."""
    before, _current.tracker = _current.tracker, tracker
    try:
        yield
    finally:
        _current.tracker = before

"""Namespaces: the same skip name several times in one sequential."""

from __future__ import annotations

import uuid
from functools import total_ordering

__all__ = ["Namespace"]


@total_ordering
class Namespace:
    """A scope of skip names, for :meth:`Skippable.isolate`.

    Unequal to every other namespace, but equal to its copies, also to those unpickled in another process. Namespaces
    are ordered, ``None`` (the namespace of whatever is not isolated) before all of them, so that pairs of namespace and
    name can be sorted. The order means nothing.
    """

    __slots__ = ("_id",)

    def __init__(self) -> None:
        self._id = uuid.uuid4()

    def __repr__(self) -> str:
        return f"<Namespace {self._id.hex[:8]}>"

    def __hash__(self) -> int:
        return hash(self._id)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Namespace) and self._id == other._id

    def __lt__(self, other: object) -> bool:
        if other is None:
            return False
        return self._id < other._id if isinstance(other, Namespace) else NotImplemented

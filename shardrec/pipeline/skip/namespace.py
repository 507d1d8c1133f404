"""Namespaces: the same skip name several times in one sequential."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field
from functools import total_ordering

__all__ = ["Namespace"]


@total_ordering
@dataclass(frozen=True, slots=True)
class Namespace:
    """A scope of skip names, for :meth:`Skippable.isolate`.

    Unequal to every other namespace, but equal to its copies, also to those unpickled in another process. Namespaces
    are ordered, ``None`` (the namespace of whatever is not isolated) before all of them, so that pairs of namespace and
    name can be sorted. The order means nothing.
    """

    _id: uuid.UUID = field(default_factory=uuid.uuid4, init=False)

    def __repr__(self) -> str:
        return f"<Namespace {self._id.hex[:8]}>"

    def __lt__(self, other: object) -> bool:
        if other is None:
            return False
        return self._id < other._id if isinstance(other, Namespace) else NotImplemented

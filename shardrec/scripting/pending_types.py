"""Which parts of a value may be pending, inferred for all values of a program together.

A *shape* stands for a value, with a part for the contents of a list or dict and for each item of a tuple. Each shape
and each part is either plain or pending (an Await of it takes its place).

::

    List[KeyedTensor]          list ── element        List[Await[KeyedTensor]]: the element is pending
    Dict[str, JaggedTensor]    dict ── value          Await[Dict[str, JaggedTensor]]: the dict is pending

A value may become plain where it flows, because a wait can be inserted. The values that it *holds* may not, because the
list would have to be copied. So two rules, the second of them as in type inference by unification (Steensgaard, 1996):

- ``flow(a, b)``: b is pending if a is, unless b must be plain; then a wait stands between;
- the parts of a and b are one and the same.

The parts of a pending value are plain: only a wait gives access to them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from shardrec._torchscript import Type, await_type

NOTHING = "none"
"""The kind of None, which goes with values of every kind."""


class Shape:
    """One value, or one part of a value.

    Args:
        kind: shapes with parts have those in common with shapes of the same kind only.
        parts: what it holds: the element of a list, the value of a dict, the items of a tuple.
    """

    __slots__ = ("_into", "_is_pending", "_is_pinned", "_kind", "_parts", "_same_as")

    def __init__(self, kind: str, parts: Sequence[Shape] = ()) -> None:
        self._kind = kind
        self._parts = tuple(parts)
        self._same_as: Shape | None = None
        self._is_pinned = False
        self._is_pending = False
        self._into: list[Shape] = []

    @property
    def parts(self) -> tuple[Shape, ...]:
        """What it holds."""
        return self._root()._parts

    @property
    def is_pending(self) -> bool:
        """Whether an Await takes its place. Known after :func:`solve`."""
        root = self._root()
        return root._is_pending and not root._is_pinned

    @property
    def holds_pending(self) -> bool:
        """Whether any of its parts, at any depth, is pending. Known after :func:`solve`."""
        return any(part.is_pending or part.holds_pending for part in self.parts)

    def start(self) -> None:
        """Mark the value as pending at its origin; so what it holds is plain."""
        self._root()._is_pending = True
        self.pin_parts()

    def pin(self) -> None:
        """Require the value, and everything that it holds, to be plain."""
        self.pin_itself()
        self.pin_parts()

    def pin_itself(self) -> None:
        """Require the value to be plain, but not what it holds."""
        self._root()._is_pinned = True

    def pin_parts(self) -> None:
        """Require everything that it holds to be plain."""
        for part in self.parts:
            part.pin()

    def flow(self, into: Shape) -> None:
        """Another shape may be pending because this one is, and holds the same."""
        self.flow_root(into)
        self.share_parts(into)

    def flow_root(self, into: Shape) -> None:
        """Another shape may be pending because this one is."""
        self._root()._into.append(into)

    def share_parts(self, other: Shape) -> None:
        """What this and another shape hold is the same."""
        a, b = self._root(), other._root()
        if NOTHING in (a._kind, b._kind):
            return
        if a._kind == b._kind and len(a._parts) == len(b._parts):
            for mine, its in zip(a._parts, b._parts, strict=True):
                mine.unite(its)
        else:
            # Such as a list that is passed where any type is accepted: its values cannot be followed from there.
            self.pin_parts()
            other.pin_parts()

    def unite(self, other: Shape) -> None:
        """This and another shape are one."""
        a, b = self._root(), other._root()
        if a is b:
            return
        a.share_parts(b)
        a, b = a._root(), b._root()
        if a is b:
            return
        if a._kind == NOTHING:
            a, b = b, a
        b._same_as = a
        a._is_pinned |= b._is_pinned
        a._is_pending |= b._is_pending
        a._into += b._into

    def _root(self) -> Shape:
        shape = self
        while shape._same_as is not None:
            # Shortens the way for the next one.
            if shape._same_as._same_as is not None:
                shape._same_as = shape._same_as._same_as
            shape = shape._same_as
        return shape


def solve(shapes: Iterable[Shape]) -> None:
    """Propagate "pending" from its origins along the flow."""
    waiting = [shape._root() for shape in shapes if shape.is_pending]
    while waiting:
        for into in waiting.pop()._into:
            target = into._root()
            if not target._is_pending and not target._is_pinned:
                target._is_pending = True
                waiting.append(target)


def shape_of(kind: Type) -> Shape:
    """A fresh shape for a value of a type. ``Optional`` does not show: an Await or None is what may be in its place."""
    name = kind.kind()
    if name == "OptionalType":
        return shape_of(kind.getElementType())
    if name == "ListType":
        return Shape("list", [shape_of(kind.getElementType())])
    if name == "DictType":
        return Shape("dict", [shape_of(kind.getValueType())])
    if name == "TupleType":
        return Shape("tuple", [shape_of(item) for item in kind.elements()])
    if name == "NoneType":
        return Shape(NOTHING)
    shape = Shape(name)
    if name in ("AnyType", "UnionType", "AnyListType", "AnyTupleType"):
        shape.pin()
    return shape


def has_optional(kind: Type) -> bool:
    """Whether an Optional is in it, at any depth of lists, dicts and tuples."""
    return kind.kind() == "OptionalType" or any(
        has_optional(inner) for inner in kind.containedTypes() if kind.kind() in ("ListType", "DictType", "TupleType")
    )


def pending_type(kind: Type, shape: Shape) -> Type:
    """The type of a value, given its plain type and its pending parts.

    A named tuple with something pending in it becomes a tuple without names, which has the same items.
    """
    if kind.kind() == "OptionalType":
        return torch._C.OptionalType(pending_type(kind.getElementType(), shape))
    if shape.is_pending:
        return await_type(kind)
    if not shape.holds_pending:
        return kind
    if kind.kind() == "ListType":
        return torch._C.ListType(pending_type(kind.getElementType(), shape.parts[0]))
    if kind.kind() == "DictType":
        return torch._C.DictType(kind.getKeyType(), pending_type(kind.getValueType(), shape.parts[0]))
    assert kind.kind() == "TupleType", f"{kind} holds nothing"
    items = zip(kind.elements(), shape.parts, strict=True)
    return torch._C.TupleType([pending_type(item, part) for item, part in items])

"""TorchScript's types, as far as values in them may be pending."""

from __future__ import annotations

import torch

from shardrec._torchscript import Type, await_type
from shardrec.scripting.pending_types import NOTHING, Shape

__all__ = ["has_optional", "pending_type", "shape_of"]


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
    """The type of a value, given its plain type and what of it is pending.

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

"""Bytes for functions and values that go to the ranks and come back.

cloudpickle, which cannot pickle ``torch.ops`` or what is in it, although nearly every function that runs on a rank uses
some. Those go by their dotted name.
"""

from __future__ import annotations

import io
import pkgutil
from types import ModuleType
from typing import Any

import cloudpickle  # type: ignore[import-untyped]
from torch._ops import OpOverload, OpOverloadPacket

__all__ = ["pack"]


def pack(value: object) -> bytes:
    """Pickle `value`; ``pickle.loads`` undoes it. Tensors go as bytes, never as shared memory.

    Raises:
        TypeError, pickle.PicklingError, …: something in `value` cannot be pickled.
    """
    file = io.BytesIO()
    _Pickler(file).dump(value)
    return file.getvalue()


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no types
    def reducer_override(self, obj: Any) -> Any:
        name = _dotted_name(obj)
        if name is not None:
            return pkgutil.resolve_name, (name,)
        return super().reducer_override(obj)


def _dotted_name(obj: object) -> str | None:
    if isinstance(obj, OpOverloadPacket):
        return "torch.ops." + obj._qualified_op_name.replace("::", ".")
    if isinstance(obj, OpOverload):
        return f"{_dotted_name(obj.overloadpacket)}.{obj._overloadname}"
    # torch.ops, torch.ops.aten and torch.classes are modules of classes of their own.
    if isinstance(obj, ModuleType) and type(obj) is not ModuleType and obj.__name__.startswith("torch."):
        return obj.__name__
    return None

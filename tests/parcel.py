"""Bytes for functions and values that go to the ranks and come back.

cloudpickle, which cannot pickle ``torch.ops`` or what is in it, although nearly every function that runs on a rank uses
some. Those go by their dotted name.
"""

from __future__ import annotations

import io
import pkgutil
import sys
from collections.abc import Iterable
from functools import lru_cache
from types import CodeType, ModuleType
from typing import Any

import cloudpickle.cloudpickle  # type: ignore[import-untyped]
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


def _submodules_used(code: CodeType, dependencies: Iterable[object]) -> list[ModuleType]:
    """The imported modules inside of the packages that a function uses which its code can address: cloudpickle's own
    search, but that it does not go through all modules for each package of each function."""
    names = set(code.co_names)
    packages = {d.__name__ for d in dependencies if isinstance(d, ModuleType) and getattr(d, "__package__", None)}
    inside = [_modules_inside(package, len(sys.modules)) for package in packages]
    named = (pair for modules in inside for last in names for pair in modules.get(last, ()))
    return [sys.modules[name] for name, parts in named if parts <= names]


@lru_cache(1024)
def _modules_inside(package: str, modules: int) -> dict[str, list[tuple[str, frozenset[str]]]]:
    """Names of a package's imported modules, and their parts below the package, by the last part; ``modules`` are
    imported in all."""
    prefix = package + "."
    by_last: dict[str, list[tuple[str, frozenset[str]]]] = {}
    for name in sys.modules:
        if name.startswith(prefix):
            parts = name.removeprefix(prefix).split(".")
            by_last.setdefault(parts[-1], []).append((name, frozenset(parts)))
    return by_last


cloudpickle.cloudpickle._find_imported_submodules = _submodules_used

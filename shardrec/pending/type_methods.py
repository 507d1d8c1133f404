"""Methods that Python looks up on the type, not on the object: operators, conversions and protocols.

Each waits for the value and applies the same operation to it. Each has a line of its own, rather than being installed
in a loop, so that type checkers see them.
"""

from __future__ import annotations

import abc
import math
import operator
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, TypeVar

import numpy
import torch
from numpy.typing import DTypeLike, NDArray

R = TypeVar("R")

_Binary = Callable[[Any, Any], R]
_Method = Callable[["Operators", object], R]


def force(value: object) -> Any:
    """The value of a lazy awaitable. Anything else is returned unchanged."""
    return value.wait() if isinstance(value, Operators) else value


def force_nested(value: object) -> Any:
    """Apply :func:`force` inside tuples, lists, dicts and slices.

    A container without an awaitable is returned itself, not a copy: the callee may write to it.
    """
    if isinstance(value, Operators):
        return value.wait()
    if isinstance(value, (tuple, list)):
        items = [force_nested(item) for item in value]
        if all(map(operator.is_, items, value)):
            return value
        if hasattr(value, "_fields"):
            return type(value)(*items)
        return items if isinstance(value, list) else tuple(items)
    if isinstance(value, dict):
        forced = {key: force_nested(item) for key, item in value.items()}
        return value if all(map(operator.is_, forced.values(), value.values())) else forced
    if isinstance(value, slice):
        return slice(force(value.start), force(value.stop), force(value.step))
    return value


def _unary(function: Callable[[Any], R]) -> Callable[[Operators], R]:
    def method(self: Operators) -> R:
        return function(self.wait())

    return method


def _binary(function: _Binary[R]) -> _Method[R]:
    def method(self: Operators, other: object) -> R:
        return function(self.wait(), force(other))

    return method


def _three(function: _Binary[R], in_place: _Binary[R]) -> tuple[_Method[R], _Method[R], _Method[R]]:
    """``self + other``, ``other + self`` and ``self += other``. The last one rebinds the name to the plain result."""

    def reflected(self: Operators, other: object) -> R:
        return function(force(other), self.wait())

    return _binary(function), reflected, _binary(in_place)


def _can_index(value: object) -> bool:
    """Whether ``value`` is an array of integers or bools, of torch or numpy."""
    if isinstance(value, torch.Tensor):
        return not (value.is_floating_point() or value.is_complex())
    return getattr(getattr(value, "dtype", None), "kind", None) in ("b", "i", "u")


class Operators(abc.ABC):
    """Makes a class with a ``wait()`` act as that value in operators, conversions and protocols."""

    @abc.abstractmethod
    def wait(self) -> Any:
        """The value."""

    __add__, __radd__, __iadd__ = _three(operator.add, operator.iadd)
    __sub__, __rsub__, __isub__ = _three(operator.sub, operator.isub)
    __mul__, __rmul__, __imul__ = _three(operator.mul, operator.imul)
    __matmul__, __rmatmul__, __imatmul__ = _three(operator.matmul, operator.imatmul)
    __truediv__, __rtruediv__, __itruediv__ = _three(operator.truediv, operator.itruediv)
    __floordiv__, __rfloordiv__, __ifloordiv__ = _three(operator.floordiv, operator.ifloordiv)
    __mod__, __rmod__, __imod__ = _three(operator.mod, operator.imod)
    __lshift__, __rlshift__, __ilshift__ = _three(operator.lshift, operator.ilshift)
    __rshift__, __rrshift__, __irshift__ = _three(operator.rshift, operator.irshift)
    __and__, __rand__, __iand__ = _three(operator.and_, operator.iand)
    __or__, __ror__, __ior__ = _three(operator.or_, operator.ior)
    __xor__, __rxor__, __ixor__ = _three(operator.xor, operator.ixor)
    __divmod__, __rdivmod__, _ = _three(divmod, divmod)
    _, __rpow__, __ipow__ = _three(operator.pow, operator.ipow)

    def __pow__(self, exponent: object, modulus: object = None) -> Any:
        if modulus is None:
            return operator.pow(self.wait(), force(exponent))
        return pow(self.wait(), force(exponent), force(modulus))

    __lt__ = _binary(operator.lt)
    __le__ = _binary(operator.le)
    __gt__ = _binary(operator.gt)
    __ge__ = _binary(operator.ge)
    __eq__ = _binary(operator.eq)
    __ne__ = _binary(operator.ne)
    __hash__ = _unary(hash)

    __neg__ = _unary(operator.neg)
    __pos__ = _unary(operator.pos)
    __abs__ = _unary(operator.abs)
    __invert__ = _unary(operator.invert)
    __bool__ = _unary(bool)
    __int__ = _unary(int)
    __float__ = _unary(float)
    __complex__ = _unary(complex)
    __index__ = _unary(operator.index)
    __trunc__ = _unary(math.trunc)
    __floor__ = _unary(math.floor)
    __ceil__ = _unary(math.ceil)

    def __round__(self, digits: int | None = None) -> Any:
        return round(self.wait()) if digits is None else round(self.wait(), digits)

    def __len__(self) -> int:
        value = self.wait()
        if _can_index(value):
            # torch reads x[s], for a sequence s with a length, as x[tuple(s)]: with a length, x[lazy] would silently
            # give other elements than x[value].
            raise TypeError(
                f"len() of an awaited {type(value).__name__} of {value.dtype} is left out, since torch would then take"
                " x[lazy] for x[tuple(lazy)]: use lazy.shape[0] or len(shardrec.wait(lazy))"
            )
        return len(value)

    __iter__ = _unary(iter)
    __reversed__ = _unary(reversed)
    __next__ = _unary(next)
    __contains__ = _binary(operator.contains)
    __delitem__ = _binary(operator.delitem)

    def __getitem__(self, key: Any) -> Any:
        return self.wait()[force(key)]

    def __setitem__(self, key: object, item: object) -> None:
        self.wait()[force(key)] = force(item)

    def __call__(self, *args: object, **kwargs: object) -> Any:
        return self.wait()(*args, **kwargs)

    __str__ = _unary(str)
    __bytes__ = _unary(bytes)

    def __format__(self, spec: str) -> str:
        return format(self.wait(), spec)

    def __dir__(self) -> Iterator[str]:
        return iter({*super().__dir__(), *dir(self.wait())})

    def __enter__(self) -> Any:
        value = self.wait()
        try:
            enter = type(value).__enter__
        except AttributeError:
            name = type(value).__name__
            raise TypeError(f"{name!r} object does not support the context manager protocol") from None
        return enter(value)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        value = self.wait()
        leave: bool | None = type(value).__exit__(value, kind, error, trace)
        return leave

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> NDArray[numpy.generic]:
        """The value as a numpy array, for ``numpy.asarray`` and numpy's functions."""
        value = self.wait()
        if hasattr(value, "__array__"):
            # First without `copy`: many __array__ methods, torch's among them, lack such an argument.
            value = numpy.asarray(value)
        return numpy.asarray(value, dtype=dtype) if copy is None else numpy.array(value, dtype=dtype, copy=copy)

    # Above torch.Tensor's, so that `array + lazy` comes to __radd__ and equals `array + value`.
    __array_priority__ = 1001

"""TorchScript's pending value, ``Await[W]``, and conversions between it and ``LazyAwaitable``.

The functions are torch's under public names; they do the same in eager mode and in TorchScript.

[Note: whose function this is]
TorchScript compiles ``awaitable(fn, ...)`` and ``fork(fn, ...)`` as syntax, not as calls, since no operator schema has
a function as an argument. It recognizes torch's own function objects; so these two names *are* torch's objects, while
the other functions are mapped to TorchScript operators.

[Note: what torch's Await lacks in eager mode]
torch's ``_awaitable`` drops keywords and computes with the defaults; a function that failed runs again at each wait;
``Await`` forwards attributes of its value, and neither operators nor ``[...]``; and no instance is one of
``torch.jit._Await``. All four are added here, to torch's own objects, since an
``Await`` does not show whether torch or shardrec created it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

import torch

from shardrec._torchscript import compiled_nowait, compiles_to
from shardrec.pending.awaitable import Awaitable, Chained, LazyAwaitable, LazyNoWait, as_it_is
from shardrec.pending.once import Once

__all__ = ["Await", "as_await", "as_lazy", "awaitable", "awaitable_nowait", "awaitable_wait", "gather"]

W = TypeVar("W")

# torch's own objects, not wrappers: torch.jit recognizes its class in annotations and its function in calls by
# identity.
Await = torch._awaits._Await
awaitable: Callable[..., Await[Any]] = torch.jit._awaitable


_OPERATORS = (
    *("add", "radd", "sub", "rsub", "mul", "rmul", "matmul", "rmatmul", "truediv", "rtruediv", "floordiv", "rfloordiv"),
    *("mod", "rmod", "pow", "rpow", "and", "rand", "or", "ror", "xor", "rxor", "lt", "le", "gt", "ge"),
    *("neg", "pos", "abs", "invert", "len", "iter", "contains", "getitem", "setitem", "int", "float"),
)


def _forwarded(name: str) -> Callable[..., Any]:
    def method(self: Any, *args: Any) -> Any:
        return getattr(as_lazy(self), name)(*args)

    return method


class _Kept:
    """A function that is called once; later calls return the same value or raise the same error."""

    def __init__(self, function: Callable[..., Any], kwargs: Mapping[str, Any]) -> None:
        self.function = partial(function, **kwargs) if kwargs else function
        self._once: Once[Any] = Once()

    def __call__(self, *args: Any) -> Any:
        return self._once.resolve("Await", partial(self.function, *args))


def _binding(func: Any, *args: Any, **kwargs: Any) -> Any:
    # This code object replaces that of torch's function, so it sees torch's globals.
    from shardrec.pending.awaits import _Kept

    return torch._C._awaitable(_Kept(func, kwargs), *args)


# See [Note: what torch's Await lacks in eager mode].
awaitable.__code__ = _binding.__code__
type(Await).__instancecheck__ = lambda cls, instance: isinstance(instance, torch._C._Await)  # type: ignore[assignment, misc]
_fn = torch._C._Await.fn
torch._C._Await.fn = lambda self: getattr(_fn(self), "function", None) or _fn(self)  # type: ignore[method-assign]
for _name in _OPERATORS:
    setattr(torch._C._Await, f"__{_name}__", _forwarded(f"__{_name}__"))


def awaitable_wait(pending: Await[W]) -> W:
    """The value of an ``Await[W]``: runs its function, on this thread, unless it has run. Also inside TorchScript.

    Args:
        pending: an ``Await`` that ``awaitable``, ``awaitable_nowait`` or a scripted function returned.

    Returns:
        The value, of type ``W``: the same object at every call.
    """
    value: W = torch.jit._awaitable_wait(pending)
    return value


def awaitable_nowait(value: W) -> Await[W]:
    """An ``Await[W]`` of a value that exists already. Also inside TorchScript.

    Args:
        value: of any type that TorchScript has; in eager mode of any type at all.
    """
    pending: Await[W] = torch.jit._awaitable_nowait(value)
    return pending


compiles_to(awaitable_wait, "prim::awaitable_wait")
compiles_to(awaitable_nowait, "prim::awaitable_nowait")


def as_await(pending: Any) -> Any:
    """Convert a pending value to an ``Await``. Eager mode only.

    TorchScript cannot call back to Python, so it takes an ``Await`` that was created in eager mode only if the value
    exists already: give it ``as_await(shardrec.wait(lazy))``.

    Args:
        pending: a ``LazyAwaitable[W]`` or another ``Awaitable``, a ``torch.futures.Future[W]``, an ``Await[W]``, which
            is returned unchanged, or a plain value.

    Returns:
        ``Await[W]``: waits for ``pending`` at its own first use, and gives the same value.
    """
    if isinstance(pending, torch._C._Await):
        return pending
    if isinstance(pending, (Awaitable, torch._C.Future)):
        if not pending.done():
            return torch.jit._awaitable(pending.wait)
        pending = pending.wait()
    known = compiled_nowait(pending)
    return torch.jit._awaitable_nowait(pending) if known is None else known


def as_lazy(pending: Any) -> LazyAwaitable[Any]:
    """Convert a pending value to a ``LazyAwaitable``, which acts as its value. Eager mode only.

    Args:
        pending: an ``Await[W]``, such as a scripted module returns; a ``torch.futures.Future[W]``, of ``fork`` or an
            RPC; an ``Awaitable[W]``; a ``LazyAwaitable[W]``, which is returned unchanged; or a plain value.

    Returns:
        ``LazyAwaitable[W]``: waits for ``pending`` at its own first use, and gives the same value.
    """
    if isinstance(pending, LazyAwaitable):
        return pending
    if isinstance(pending, torch._C._Await):
        return _LazyAwait(partial(torch.jit._awaitable_wait, pending))
    if isinstance(pending, (Awaitable, torch._C.Future)):
        return Chained(as_it_is, pending)
    return LazyNoWait(pending)


def gather(*pending: Any) -> LazyAwaitable[list[Any]]:
    """Combine several pending values into one. Eager mode only.

    All of them have started already: collectives, forks and RPCs overlap during the wait for the first.

    Args:
        pending: each as :func:`as_lazy` takes it.

    Returns:
        ``LazyAwaitable`` of the list of their values, in the order given. Its first use waits for them in that order
        and raises the first error.
    """
    return Chained(lambda *values: list(values), *map(as_lazy, pending))


class _LazyAwait(Chained[W]):
    """A lazy awaitable of an ``Await``."""

    def _is_ready(self) -> bool:
        # Unknown: is_nowait() is true of every Await that was not created in Python.
        return False

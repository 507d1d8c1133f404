"""TorchScript's own pending value, ``Await[W]``, and the ways between it and ``LazyAwaitable``.

The functions are torch's under public names, and mean the same in eager mode and in code that TorchScript compiles.

[Note: whose function this is]
TorchScript compiles ``awaitable(fn, ...)`` and ``fork(fn, ...)`` as syntax, not as calls, since no schema describes a
function as an argument. It knows them by being torch's own function objects; so these two names *are* torch's objects,
while the others are functions that TorchScript looks up as operators.

[Note: what torch's Await lacks in eager mode]
torch's ``_awaitable`` drops keywords and computes with the defaults; a function that failed runs again at each wait;
``Await`` forwards attributes of its value, and neither operators nor ``[...]``; and no instance is one of
``torch.jit._Await``. All four are added here to torch's own objects, as what an ``Await`` is made by cannot be told
apart.
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

# Not copies: torch.jit must find its own class in annotations, and its own function in calls.
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
    """A function that runs once, and its value or error from then on."""

    def __init__(self, function: Callable[..., Any], kwargs: Mapping[str, Any]) -> None:
        self.function = partial(function, **kwargs) if kwargs else function
        self._once: Once[Any] = Once()

    def __call__(self, *args: Any) -> Any:
        return self._once.resolve("Await", partial(self.function, *args))


def _binding(func: Any, *args: Any, **kwargs: Any) -> Any:
    # Runs as torch's function, with torch's globals.
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
    """The value of an ``Await[W]``: runs its function, on this thread, unless that has been done.

    Args:
        pending: what ``awaitable`` or ``awaitable_nowait`` returned, or a scripted function.

    Returns:
        The value, of type ``W``: the same one at every call. Also inside TorchScript.
    """
    value: W = torch.jit._awaitable_wait(pending)
    return value


def awaitable_nowait(value: W) -> Await[W]:
    """An ``Await[W]`` of a value that is there already. Also inside TorchScript.

    Args:
        value: of any type that TorchScript has; in eager mode of any type at all.
    """
    pending: Await[W] = torch.jit._awaitable_nowait(value)
    return pending


compiles_to(awaitable_wait, "prim::awaitable_wait")
compiles_to(awaitable_nowait, "prim::awaitable_nowait")


def as_await(pending: Any) -> Any:
    """A pending value as an ``Await``. Eager mode only.

    Compiled code takes an ``Await`` that was made in eager mode only if its value is there already, since it cannot
    call back to Python: give it ``as_await(shardrec.wait(lazy))``.

    Args:
        pending: a ``LazyAwaitable[W]`` or another ``Awaitable``, a ``torch.futures.Future[W]``, an ``Await[W]``, which
            comes back as it is, or a value that is there.

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
    """A pending value as a ``LazyAwaitable``, which acts as its value. Eager mode only.

    Args:
        pending: an ``Await[W]``, such as a scripted module returns; a ``torch.futures.Future[W]``, of ``fork`` or an
            RPC; an ``Awaitable[W]``; a ``LazyAwaitable[W]``, which comes back as it is; or a value that is there.

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
    """Several pending values as one. Eager mode only.

    All of them are under way already: collectives, forks and RPCs overlap while the first is waited for.

    Args:
        pending: each as :func:`as_lazy` takes it.

    Returns:
        ``LazyAwaitable`` of the list of their values, in the order given. Its first use waits for them one after the
        other, and raises the first error that it meets.
    """
    return Chained(lambda *values: list(values), *map(as_lazy, pending))


class _LazyAwait(Chained[W]):
    """TorchScript's pending value, lazily awaited."""

    def _is_ready(self) -> bool:
        # It cannot be told: is_nowait() is true of whatever was not made in Python.
        return False

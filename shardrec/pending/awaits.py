"""TorchScript's pending values, ``Await[W]`` and ``Future[W]``, and the functions that take every kind: conversions and
``wait``.

The functions are torch's under public names. They do the same in eager mode and in TorchScript.

[Note: whose function this is]
TorchScript compiles ``awaitable(fn, ...)`` and ``fork(fn, ...)`` as syntax, not as calls, since no operator schema has
a function as an argument. It recognizes torch's own function objects; so these two names *are* torch's objects, while
the other functions are mapped to TorchScript operators.

[Note: what torch lacks in eager mode]
torch's ``_awaitable`` drops keywords and computes with the defaults; a function that failed runs again at each wait;
``Await`` forwards attributes of its value, and neither operators nor ``[...]``; and no instance is one of
``torch.jit._Await``. ``torch.jit.fork`` calls the function immediately and converts the result to a TorchScript value,
which fails for the ``LazyAwaitable`` that a sharded module returns. All of this is added here, to torch's own objects,
since neither an ``Await`` nor a ``Future`` shows whether torch or shardrec created it.

torch's two functions are left alone, and the functions that they call in ``torch._C`` are replaced. Functions of our
own under the public names do not do: TorchScript compares objects before anything else, and compiles neither a function
that is registered as the operator ``prim::awaitable`` or ``prim::fork``, nor one that a dispatch
(``boolean_dispatched``) leads to torch's ("function cannot be used as a value"). Functions of our own put into
``torch.jit`` would be recognized, and torch's would not be any more, where other code has imported them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Generic, Protocol, TypeVar, overload

import torch
from torch.futures import Future

from shardrec._torchscript import compiled_nowait, compiles_to
from shardrec.pending.awaitable import Awaitable, Chained, LazyAwaitable, LazyNoWait
from shardrec.pending.once import Once

W = TypeVar("W")


class _Delays(Protocol):
    def __call__(self, func: Callable[..., W], *args: object, **kwargs: object) -> Await[W]: ...


class _Forks(Protocol):
    def __call__(self, func: Callable[..., W], *args: object, **kwargs: object) -> Future[W]: ...


# torch's own objects, not wrappers: torch.jit recognizes its class in annotations and its functions in calls by
# identity.
Await = torch._awaits._Await
awaitable: _Delays = torch.jit._awaitable
fork: _Forks = torch.jit.fork

_OPERATORS = (
    *("add", "radd", "sub", "rsub", "mul", "rmul", "matmul", "rmatmul", "truediv", "rtruediv", "floordiv", "rfloordiv"),
    *("mod", "rmod", "pow", "rpow", "and", "rand", "or", "ror", "xor", "rxor", "lt", "le", "gt", "ge"),
    *("neg", "pos", "abs", "invert", "len", "iter", "contains", "getitem", "setitem", "int", "float"),
)


def _forwarded(name: str) -> Callable[..., object]:
    def method(self: object, *args: object) -> object:
        return getattr(as_lazy(self), name)(*args)

    return method


class _Kept(Generic[W]):
    """A function that is called once. Later calls return the same value or raise the same error."""

    def __init__(self, function: Callable[..., W], kwargs: Mapping[str, object]) -> None:
        self.function = partial(function, **kwargs) if kwargs else function
        self._once: Once[W] = Once()

    def __call__(self, *args: object) -> W:
        return self._once.resolve("Await", partial(self.function, *args))


_torchs_awaitable, _torchs_fork, _torchs_fn = torch._C._awaitable, torch._C.fork, torch._C._Await.fn


def _awaitable(func: Callable[..., object], *args: object, **kwargs: object) -> torch._C._Await:
    return _torchs_awaitable(_Kept(func, kwargs), *args)


def _fork(func: Callable[..., W], *args: object, **kwargs: object) -> torch._C.Future[W]:
    if torch._C._is_tracing():
        return _torchs_fork(func, *args, **kwargs)
    value = func(*args, **kwargs)
    if not isinstance(value, LazyAwaitable):
        return _torchs_fork(lambda: value)
    future: Future[W] = Future()
    future.set_result(value)
    return future


# See [Note: what torch lacks in eager mode].
torch._C._awaitable, torch._C.fork = _awaitable, _fork
type(Await).__instancecheck__ = lambda cls, instance: isinstance(instance, torch._C._Await)  # type: ignore[assignment, misc]
torch._C._Await.fn = lambda self: getattr(_torchs_fn(self), "function", None) or _torchs_fn(self)  # type: ignore[method-assign]
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


def join(future: Future[W]) -> W:
    """The value of a future, from ``fork``, an RPC or elsewhere. Also inside TorchScript.

    Blocks until the future is complete. ``shardrec.wait`` does the same for any pending value, and
    ``shardrec.pending.as_lazy(future)`` is a ``LazyAwaitable`` that joins at its first use.

    Raises:
        Exception: what the forked function raised.
    """
    return future.wait()


@overload
def wait(pending: Awaitable[W]) -> W: ...
@overload
def wait(pending: Future[W]) -> W: ...
@overload
def wait(pending: W) -> W: ...
def wait(pending: object) -> object:
    """Wait for a pending value and return it. Anything else is returned unchanged.

    In code that ``shardrec.script`` compiles it also takes all of these, and marks where to wait. In code that
    ``torch.jit.script`` compiles it takes an ``Await``. Use ``shardrec.pending.join`` for a ``Future`` there.

    Args:
        pending: an ``Awaitable`` or ``LazyAwaitable``, a ``Future`` (an RPC, ``shardrec.pending.fork``), the ``Await``
            that a scripted module returns, or a plain value. Containers are not searched.

    Returns:
        The value. Pending values inside it are not waited for.

    Raises:
        BaseException: the error of the wait.
    """
    # torch.futures.Future is a subclass of it. What torch.jit.fork returns is not.
    if isinstance(pending, (Awaitable, torch._C.Future)):
        return pending.wait()
    if isinstance(pending, torch._C._Await):
        return torch.jit._awaitable_wait(pending)
    return pending


# For wait in code that shardrec.script compiles see shardrec._torchscript.generic_wait.
compiles_to(awaitable_wait, "prim::awaitable_wait")
compiles_to(awaitable_nowait, "prim::awaitable_nowait")
compiles_to(wait, "prim::awaitable_wait")
compiles_to(join, "aten::wait")


def as_await(pending: object) -> Any:
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


def as_lazy(pending: object) -> LazyAwaitable[Any]:
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
        return Chained(lambda value: value, pending)
    return LazyNoWait(pending)


def gather(*pending: object) -> LazyAwaitable[list[Any]]:
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

"""Futures: values that are computed on another thread by TorchScript's fork, or set by the code that created them.

[Note: a lazy value in torch's fork]
In eager mode ``torch.jit.fork`` calls the function at once and converts the result to a TorchScript value, which fails
for the ``LazyAwaitable`` that a sharded module returns. The change made here to torch's own function (see [Note: whose
function this is] in awaits.py) keeps a ``LazyAwaitable`` as the future's value.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.futures import Future

from shardrec._torchscript import compiles_to
from shardrec.pending.awaitable import LazyAwaitable

__all__ = ["fork", "join"]

W = TypeVar("W")

fork: Callable[..., Future[Any]] = torch.jit.fork


def _forking(func: Any, *args: Any, **kwargs: Any) -> Any:
    # This code object replaces that of torch's function, so it sees torch's globals.
    from shardrec.pending.futures import _forked

    return torch._C.fork(func, *args, **kwargs) if torch._C._is_tracing() else _forked(func, args, kwargs)  # type: ignore[no-untyped-call,unused-ignore]


def _forked(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    value = func(*args, **kwargs)
    if not isinstance(value, LazyAwaitable):
        return torch._C.fork(lambda: value)
    future: Future[Any] = Future()
    future.set_result(value)
    return future


fork.__code__ = _forking.__code__


def join(future: Future[W]) -> W:
    """The value of a future, from ``fork``, an RPC or elsewhere. Also inside TorchScript.

    Blocks until the future is complete. ``shardrec.wait`` does the same for any pending value, and
    ``shardrec.pending.as_lazy(future)`` is a ``LazyAwaitable`` that joins at its first use.

    Raises:
        Exception: what the forked function raised.
    """
    return future.wait()


compiles_to(join, "aten::wait")

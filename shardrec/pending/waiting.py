"""``wait``: waits explicitly, for every kind of pending value."""

from __future__ import annotations

from typing import Any, TypeVar, overload

import torch
from torch.futures import Future

from shardrec._torchscript import compiles_to
from shardrec.pending.awaitable import Awaitable

__all__ = ["wait"]

W = TypeVar("W")


@overload
def wait(pending: Awaitable[W]) -> W: ...
@overload
def wait(pending: Future[W]) -> W: ...
@overload
def wait(pending: W) -> W: ...
def wait(pending: Any) -> Any:
    """Wait for a pending value and return it; anything else is returned unchanged.

    In code that ``shardrec.script`` compiles it takes all of these, too, and marks where to wait. In code that
    ``torch.jit.script`` compiles it takes an ``Await``; use ``shardrec.pending.join`` for a ``Future`` there.

    Args:
        pending: an ``Awaitable`` or ``LazyAwaitable``, a ``Future`` (an RPC, ``shardrec.pending.fork``), the ``Await``
            that a scripted module returns, or a plain value. Containers are not searched.

    Returns:
        The value; pending values inside it are not waited for.

    Raises:
        BaseException: the error of the wait.
    """
    # torch.futures.Future is a subclass of it; what torch.jit.fork returns is not.
    if isinstance(pending, (Awaitable, torch._C.Future)):
        return pending.wait()
    if isinstance(pending, torch._C._Await):
        return torch.jit._awaitable_wait(pending)
    return pending


# In code that torch.jit.script compiles; for shardrec.script's see shardrec._torchscript.generic_wait.
compiles_to(wait, "prim::awaitable_wait")

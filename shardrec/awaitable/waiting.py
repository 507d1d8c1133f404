"""``wait``: the explicit spelling, for every kind of pending value."""

from __future__ import annotations

from typing import Any, TypeVar, overload

import torch
from torch.futures import Future

from shardrec.awaitable.awaitable import Awaitable

__all__ = ["wait"]

W = TypeVar("W")


@overload
def wait(pending: Awaitable[W]) -> W: ...
@overload
def wait(pending: Future[W]) -> W: ...
@overload
def wait(pending: W) -> W: ...
def wait(pending: Any) -> Any:
    """The value behind a pending one; anything else is returned as it is.

    Args:
        pending: an ``Awaitable`` or ``LazyAwaitable``, a ``torch.futures.Future`` (an RPC, ``torch.jit.fork``), the
            ``Await`` that a scripted module returns, or a plain value. Containers are not searched.

    Returns:
        The value; not searched for further pending ones.

    Raises:
        BaseException: what the wait raised.
    """
    if isinstance(pending, (Awaitable, Future)):
        return pending.wait()
    if isinstance(pending, torch._C._Await):
        return torch.jit._awaitable_wait(pending)
    return pending

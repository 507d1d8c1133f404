"""Pending values: their computation has started, and their first use waits for it, exactly once.

::

    Awaitable            wait()
    └── LazyAwaitable    waits when it is first used as its value
        └── LazyNoWait   holds a value that exists already
    LazyGetItemMixin     lazy["feature"] is also lazy

    Await[W]             TorchScript's pending value, by awaitable() and awaitable_nowait(), for awaitable_wait()
    Future[W]            computed on another thread, by fork(), for join()
    LazyAwaitable.then(), gather()   from a function of the value; from several
    as_lazy(), as_await()   convert between them, and from a future; wait() takes all of them

A sharded module returns a ``LazyAwaitable[KeyedTensor]``, so the model's computation up to the first
use of an embedding overlaps with the collective that delivers it.
"""

from shardrec.errors import AwaitableError
from shardrec.pending.awaitable import (
    Awaitable,
    GetItemLazyAwaitable,
    LazyAwaitable,
    LazyGetItemMixin,
    LazyNoWait,
    NoWait,
)
from shardrec.pending.awaits import (
    Await,
    as_await,
    as_lazy,
    awaitable,
    awaitable_nowait,
    awaitable_wait,
    fork,
    gather,
    join,
    wait,
)

__all__ = [
    "Await",
    "Awaitable",
    "AwaitableError",
    "GetItemLazyAwaitable",
    "LazyAwaitable",
    "LazyGetItemMixin",
    "LazyNoWait",
    "NoWait",
    "as_await",
    "as_lazy",
    "awaitable",
    "awaitable_nowait",
    "awaitable_wait",
    "fork",
    "gather",
    "join",
    "wait",
]

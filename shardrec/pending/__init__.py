"""Values on their way: started now, waited for exactly once, at their first use.

::

    Awaitable            wait()
    └── LazyAwaitable    waits by itself when it is used as its value
        └── LazyNoWait   is there already
    LazyGetItemMixin     lazy["feature"] is also lazy

    Await[W]             TorchScript's pending value, by awaitable() and awaitable_nowait(), for awaitable_wait()
    Future[W]            computed on another thread, by fork(), for join()
    LazyAwaitable.from_future(), then(), gather()   of futures; of a function of the value; of several
    as_lazy(), as_await()   from each to the other; wait() takes all of them

A sharded module returns a ``LazyAwaitable[KeyedTensor]``, so that everything a model does before it touches an
embedding overlaps with the collective that brings it.
"""

from shardrec.pending.awaitable import Awaitable, LazyAwaitable, LazyNoWait, NoWait
from shardrec.pending.awaits import Await, as_await, as_lazy, awaitable, awaitable_nowait, awaitable_wait, gather
from shardrec.pending.error import AwaitableError
from shardrec.pending.futures import fork, join
from shardrec.pending.getitem import GetItemLazyAwaitable, LazyGetItemMixin
from shardrec.pending.waiting import wait

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

"""Values on their way: started now, waited for exactly once, at their first use.

::

    Awaitable            wait()
    └── LazyAwaitable    waits by itself when it is used as its value
        └── LazyNoWait   is there already
    LazyGetItemMixin     lazy["feature"] is lazy, too

A sharded module returns a ``LazyAwaitable[KeyedTensor]``, so that everything a model does before it touches an
embedding overlaps with the collective that brings it.
"""

from shardrec.awaitable.awaitable import Awaitable, NoWait
from shardrec.awaitable.error import AwaitableError
from shardrec.awaitable.getitem import GetItemLazyAwaitable, LazyGetItemMixin
from shardrec.awaitable.lazy import LazyAwaitable, LazyNoWait
from shardrec.awaitable.waiting import wait

__all__ = [
    "Awaitable",
    "AwaitableError",
    "GetItemLazyAwaitable",
    "LazyAwaitable",
    "LazyGetItemMixin",
    "LazyNoWait",
    "NoWait",
    "wait",
]

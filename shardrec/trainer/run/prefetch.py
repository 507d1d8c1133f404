"""Prepares batches ahead, on a separate thread, while the model computes.

::

    thread:  make b0 │ make b1 │ make b2 │ wait: depth reached │ make b3 …
    ahead:           [b0]      [b0 b1]   [b1 b2]
    loop:    wait    │ step 0             │ step 1 …
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Generic, Self, TypeVar

__all__ = ["Prefetcher"]

T = TypeVar("T")

_END: Any = object()


class Prefetcher(Generic[T]):
    """Iterates over ``source`` on a thread, up to ``depth`` items ahead; a context manager that ends the thread.

    An error of the source is raised by the ``next()`` that would have given the item, after all the items before it.

    Args:
        source: iterated on the thread only.
        depth: how many items may wait, at least 1.

    Attributes:
        waited: seconds that ``next()`` has waited for items that were not there yet.
    """

    def __init__(self, source: Iterator[T], depth: int = 4) -> None:
        self._source = source
        self._depth = depth
        self.waited = 0.0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="prefetch")
        self._ahead: deque[Future[T]] = deque()

    def __enter__(self) -> Self:
        for _ in range(self._depth + 1):  # those that may wait, and the one that is being made
            self._make_one()
        return self

    def __exit__(self, *error: object) -> None:
        """Stop the thread; it may finish the item it is making first."""
        self._thread.shutdown(cancel_futures=True)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> T:
        begin = time.perf_counter()
        item = self._ahead[0].result()
        self.waited += time.perf_counter() - begin
        if item is _END:
            raise StopIteration
        self._ahead.popleft()
        self._make_one()
        return item

    def _make_one(self) -> None:
        self._ahead.append(self._thread.submit(next, self._source, _END))

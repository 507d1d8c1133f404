"""Batches prepared ahead, on a thread of their own, while the model computes.

::

    thread:  make b0 │ make b1 │ make b2 │ wait: queue full │ make b3 …
    queue:           [b0]      [b0 b1]   [b1 b2]
    loop:    wait    │ step 0             │ step 1 …
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Generic, Self, TypeVar

__all__ = ["Prefetcher"]

T = TypeVar("T")

_POLL_S = 0.1


@dataclass(frozen=True, kw_only=True)
class _End:
    """The last thing in the queue: the source is used up, or failed."""

    error: BaseException | None


class Prefetcher(Generic[T]):
    """Iterates over ``source`` on a thread, up to ``depth`` items ahead; a context manager that ends the thread.

    An error of the source is raised by the ``next()`` that would have given the item, after all the items before it.

    Args:
        source: iterated on the thread only.
        depth: how many items may wait, at least 1.
    """

    def __init__(self, source: Iterator[T], depth: int = 4) -> None:
        self._source = source
        self._queue: queue.Queue[T | _End] = queue.Queue(maxsize=depth)
        self._stop = threading.Event()
        self._end: _End | None = None
        self._thread = threading.Thread(target=self._fill, name="prefetch", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop the thread; it may finish the item it is making first."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> T:
        if self._end is None:
            item = self._queue.get()
            if not isinstance(item, _End):
                return item
            self._end = item
        if self._end.error is not None:
            raise self._end.error
        raise StopIteration

    def _fill(self) -> None:
        error: BaseException | None = None
        try:
            for item in self._source:
                if not self._put(item):
                    return
        except BaseException as caught:  # the loop's thread is the one to raise it
            error = caught
        self._put(_End(error=error))

    def _put(self, item: T | _End) -> bool:
        while not self._stop.is_set():
            try:
                self._queue.put(item, timeout=_POLL_S)
            except queue.Full:
                continue
            return True
        return False

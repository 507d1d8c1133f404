"""Prepares batches ahead, on a separate thread, while the model computes. For elastic replicas, a share per step.

::

    thread:  make b0 │ make b1 │ make b2 │ wait: depth reached │ make b3 …
    ahead:           [b0]      [b0 b1]   [b1 b2]
    loop:    wait    │ step 0             │ step 1 …

The batches of a step are spread over the replicas that are there when it begins::

    step                 7         8         9        10        11
    rows of replica 0   first half           │ all ──────►│ first half
    rows of replica 1   second half ─ dies   │            │ joins: second half

A step trains on the same rows for any set of replicas, except the rows of a replica that dies in it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Generic, Self, TypeVar

from shardrec import ElasticModel
from shardrec.trainer.run.run import Run

T = TypeVar("T")

_END: Any = object()


class Prefetcher(Generic[T]):
    """Iterates over ``source`` on a thread, up to ``depth`` items ahead. A context manager that ends the thread.

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
        for _ in range(self._depth + 1):  # the waiting batches, and the batch that is being made
            self._make_one()
        return self

    def __exit__(self, *error: object) -> None:
        """Stop the thread. It may finish the item it is making first."""
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

    def _read_from(self, source: Iterator[T]) -> None:
        """Go on with another source, and without the items that are waiting."""
        self.__exit__()
        self._source, self._thread = source, ThreadPoolExecutor(1, thread_name_prefix="prefetch")
        self._ahead.clear()
        self.__enter__()

    def _make_one(self) -> None:
        self._ahead.append(self._thread.submit(next, self._source, _END))


class DealtParts(Prefetcher[T]):
    """This rank's batches of an epoch. They are read again whenever replicas have come or gone, or the progress has
    become another replica's. They end where it ends an epoch.

    Args:
        run: its progress has the next step.
        model: of the run.
        read: gives the batches from there on, for a place among a number of replicas.
    """

    def __init__(self, run: Run, model: ElasticModel, read: Callable[[int, int], Iterator[T]]) -> None:
        super().__init__(iter(()))
        self._run, self._model, self._read = run, model, read
        self._expected: tuple[int, ...] = ()

    def __next__(self) -> T:
        progress = self._run.progress
        if progress.epoch >= self._run.config.epochs or progress.epoch_steps >= self._run.source.steps:
            raise StopIteration
        self._model.begin()
        deal = self._model.place, self._model.replicas
        if self._expected != (*deal, progress.epoch, progress.epoch_steps):
            self._read_from(self._read(*deal))
        self._expected = (*deal, progress.epoch, progress.epoch_steps + 1)
        return super().__next__()

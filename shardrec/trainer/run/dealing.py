"""The batches of a run with elastic replicas: those of each step are spread over the replicas that are there then.

::

    step                 7         8         9        10        11
    rows of replica 0   first half           │ all ──────►│ first half
    rows of replica 1   second half ─ dies   │            │ joins: second half

What a step trains on is the same whatever replicas there are, but for the rows of one that dies in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Generic, Self, TypeVar

from shardrec import ElasticModel
from shardrec.trainer.run.prefetch import Prefetcher
from shardrec.trainer.run.run import Run

__all__ = ["DealtParts"]

T = TypeVar("T")


class DealtParts(Generic[T]):
    """An iterator over this rank's batches, in place of a :class:`Prefetcher`. They are read anew whenever replicas
    have come or gone, or the progress has become that of another replica; it ends where that ends an epoch.

    Args:
        run: whose progress says which step is next.
        model: of the run.
        read: gives the batches from there on, for a place among a number of replicas.
    """

    def __init__(self, run: Run, model: ElasticModel, read: Callable[[int, int], Iterator[T]]) -> None:
        self._run, self._model, self._read = run, model, read
        self._expected: tuple[int, ...] = ()
        self._batches = Prefetcher(iter(list[T]()))
        self._waited = 0.0

    @property
    def waited(self) -> float:
        """Seconds that ``next()`` has waited for batches that were not there yet."""
        return self._waited + self._batches.waited

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._batches.__exit__(*error)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> T:
        progress = self._run.progress
        if progress.epoch >= self._run.config.epochs or progress.epoch_steps >= self._run.source.steps:
            raise StopIteration
        self._model.begin()
        deal = self._model.place, self._model.replicas
        if self._expected != (*deal, progress.epoch, progress.epoch_steps):
            self._waited += self._batches.waited
            self._batches.__exit__()
            self._batches = Prefetcher(self._read(*deal)).__enter__()
        self._expected = (*deal, progress.epoch, progress.epoch_steps + 1)
        return next(self._batches)

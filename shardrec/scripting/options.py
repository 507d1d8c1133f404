"""What ``shardrec.script`` is asked for, as the twins of sharded modules see it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

__all__ = ["lookups_in_parallel", "parallel_lookups"]

_PARALLEL = ContextVar("parallel_lookups", default=False)


@contextmanager
def parallel_lookups(parallel: bool) -> Iterator[None]:
    """Twins that are made inside run their lookup groups as forks, or not."""
    token = _PARALLEL.set(parallel)
    try:
        yield
    finally:
        _PARALLEL.reset(token)


def lookups_in_parallel() -> bool:
    """What :func:`parallel_lookups` says."""
    return _PARALLEL.get()

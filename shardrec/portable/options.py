"""What ``shardrec.script`` is asked for, as the twins of sharded modules see it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

__all__ = ["is_portable", "lookups_in_parallel", "parallel_lookups", "portable_twins"]

_PARALLEL = ContextVar("parallel_lookups", default=False)
_PORTABLE = ContextVar("portable", default=True)


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


@contextmanager
def portable_twins(portable: bool) -> Iterator[None]:
    """Twins that are made inside run in any process, or in this one only."""
    token = _PORTABLE.set(portable)
    try:
        yield
    finally:
        _PORTABLE.reset(token)


def is_portable() -> bool:
    """What :func:`portable_twins` says."""
    return _PORTABLE.get()

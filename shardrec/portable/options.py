"""What ``shardrec.script`` is asked for, as the twins of sharded modules see it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

__all__ = ["TwinOptions", "twin_options", "twins_with"]


@dataclass(frozen=True, kw_only=True)
class TwinOptions:
    """How twins are made.

    Args:
        parallel_lookups: they run their lookup groups as forks.
        portable: they run in any process, not in this one only.
    """

    parallel_lookups: bool = False
    portable: bool = True


_OPTIONS = ContextVar("twin options", default=TwinOptions())  # noqa: B039 - it is frozen
twin_options = _OPTIONS.get


@contextmanager
def twins_with(options: TwinOptions) -> Iterator[None]:
    """Twins that are made inside are made so."""
    token = _OPTIONS.set(options)
    try:
        yield
    finally:
        _OPTIONS.reset(token)

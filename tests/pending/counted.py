"""Awaitables that tell how often they were waited for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from shardrec.pending import Awaitable, LazyAwaitable

W = TypeVar("W")


class Counted(LazyAwaitable[W], Generic[W]):
    """Gives ``value``, or what ``compute`` returns, and counts."""

    def __init__(self, value: W, compute: Callable[[], W] | None = None) -> None:
        super().__init__()
        self._value = value
        self._compute = compute
        self._waits = 0

    @property
    def waits(self) -> int:
        return self._waits

    def _wait_impl(self) -> W:
        self._waits += 1
        return self._value if self._compute is None else self._compute()


class CountedPlain(Awaitable[W], Generic[W]):
    """The same without the laziness."""

    def __init__(self, value: W) -> None:
        super().__init__()
        self._value = value
        self.waits = 0

    def _wait_impl(self) -> W:
        self.waits += 1
        return self._value


def failing(error: BaseException) -> Counted[object]:
    """Raises ``error`` when it is waited for."""

    def fail() -> object:
        raise error

    return Counted(None, fail)

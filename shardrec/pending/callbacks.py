"""The callbacks of an awaitable, which can come too late."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import SupportsIndex, TypeVar

from shardrec.pending.error import AwaitableError

__all__ = ["Callbacks"]

W = TypeVar("W")


class Callbacks(list[Callable[[W], W]]):
    """A list of callbacks that takes no more of them once they have been called.

    Attributes:
        closed: true from then on.

    Raises:
        AwaitableError: when one is put in too late to be called, about which a plain list would keep silent.
    """

    closed = False

    def append(self, callback: Callable[[W], W], /) -> None:
        self._check_open()
        super().append(callback)

    def extend(self, callbacks: Iterable[Callable[[W], W]], /) -> None:
        self._check_open()
        super().extend(callbacks)

    def insert(self, index: SupportsIndex, callback: Callable[[W], W], /) -> None:
        self._check_open()
        super().insert(index, callback)

    def _check_open(self) -> None:
        if self.closed:
            raise AwaitableError(
                "a callback was put into .callbacks after the value had been waited for, so it would never be called:"
                " use add_callback(), which applies it at once, or .then()"
            )

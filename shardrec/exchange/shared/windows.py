"""Memory that a rank owns and the other ranks of its host map.

A window is an anonymous file in memory (``memfd_create``): it lacks a name that could outlive the processes, and is
passed to other ranks as a descriptor over a socket. Pages are allocated when they are first written, and then kept.

[Note: memory in use]
A region is lent as a numpy array, which tensors made of it keep alive. When the last of them is freed, the region is
free again. So memory that is still in use, by the user or autograd, is never overwritten, and there is no explicit
release. The end of an array is noticed by a weak reference, which puts itself into a queue: no Python code runs where
and when the array is freed, which may be anywhere.
"""

from __future__ import annotations

import mmap
import os
import weakref
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Bytes = npt.NDArray[np.uint8]

_PAGE = 4096
_FIRST_BYTES = 32 << 20


class Region(NamedTuple):
    """Part of a window: number of the window, first byte, and the bytes themselves."""

    window: int
    offset: int
    bytes: Bytes


class InUse(weakref.ref[Bytes]):
    """A reference to memory in use, which is queued when nothing else refers to it any more.

    Attributes:
        place: of the memory; (window, first byte, end), or the token by which a peer knows it.
        may_be_sent: nothing is written to it after it was sent.
    """

    __slots__ = ("may_be_sent", "place")

    place: Any
    may_be_sent: bool


def as_tensor(memory: Bytes, dtype: torch.dtype) -> Tensor:
    """(n,) tensor over the memory, which it keeps alive."""
    if memory.size == 0:
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer(memory, dtype=dtype)


class Arena:
    """The windows of one rank, and their free regions.

    Args:
        announce: called with (number, size, descriptor) for each new window, before a region of it is lent.

    Attributes:
        lent: the regions in use, by address.
    """

    def __init__(self, announce: Callable[[int, int, int], None]) -> None:
        self._announce = announce
        self._maps: list[mmap.mmap] = []
        self._addresses: list[int] = []  # of the windows
        self.lent: dict[int, InUse] = {}
        self._free: list[tuple[int, int, int]] = []  # (window, first byte, end), ascending
        self._returned: deque[InUse] = deque()  # filled at any time and in any thread

    @property
    def total_bytes(self) -> int:
        """Size of all the windows."""
        return sum(len(window_map) for window_map in self._maps)

    @property
    def lent_bytes(self) -> int:
        """Bytes of the regions in use."""
        self._take_back()
        return self.total_bytes - sum(end - start for _, start, end in self._free)

    def lend(self, size: int, *, may_be_sent: bool = False) -> Region:
        """Lend a region of ``size`` bytes, at least one, which is in use until its last tensor is freed.

        Args:
            size: in bytes.
            may_be_sent: see :class:`InUse`.
        """
        self._take_back()
        pages = -(-size // _PAGE) * _PAGE
        for place, (_, start, end) in enumerate(self._free):  # noqa: B007 - the place is used
            if end - start >= pages:
                break
        else:
            place = self._new_window(pages)
        window, start, end = self._free[place]
        if end - start == pages:
            del self._free[place]
        else:
            self._free[place] = (window, start + pages, end)
        memory = np.frombuffer(self._maps[window], dtype=np.uint8, count=size, offset=start)
        in_use = InUse(memory, self._returned.append)
        in_use.place, in_use.may_be_sent = (window, start, start + pages), may_be_sent
        self.lent[self._addresses[window] + start] = in_use
        return Region(window, start, memory)

    def _take_back(self) -> None:
        while self._returned:
            window, start, end = self._returned.popleft().place
            del self.lent[self._addresses[window] + start]
            place = bisect_left(self._free, (window, start, end))
            if place < len(self._free) and self._free[place][:2] == (window, end):
                end = self._free.pop(place)[2]
            if place and self._free[place - 1][0] == window and self._free[place - 1][2] == start:
                start = self._free.pop(place - 1)[1]
            insort(self._free, (window, start, end))

    def _new_window(self, pages: int) -> int:
        size = max(_FIRST_BYTES, pages, self.total_bytes)
        number = len(self._maps)
        descriptor = os.memfd_create(f"shardrec-{number}", os.MFD_CLOEXEC)
        try:
            os.ftruncate(descriptor, size)
            self._maps.append(mmap.mmap(descriptor, size))
            self._addresses.append(np.frombuffer(self._maps[-1], dtype=np.uint8).ctypes.data)
            self._announce(number, size, descriptor)
        finally:
            os.close(descriptor)
        self._free.append((number, 0, size))
        return len(self._free) - 1


class PeerWindows:
    """The windows of another rank."""

    def __init__(self) -> None:
        self._maps: dict[int, mmap.mmap] = {}

    def add(self, number: int, size: int, descriptor: int) -> None:
        """Map a window. Closes the descriptor."""
        try:
            self._maps[number] = mmap.mmap(descriptor, size)
        finally:
            os.close(descriptor)

    def bytes(self, window: int, offset: int, size: int) -> Bytes:
        """Memory of a region."""
        return np.frombuffer(self._maps[window], dtype=np.uint8, count=size, offset=offset)

"""The flight record: the last collectives of this process, in memory that the other processes of its host can read.

It is a ring of a few entries in an anonymous memory file, which is anonymous and ends with the process. While the
process lives, even if it is stopped or stuck, another process of the same user can read it through ``/proc``. An entry
takes half a microsecond. The idea is from PyTorch's flight recorder, which only supports NCCL. (``BlocksInFlight``
in ``row_exchange.py`` is something else: rows being exchanged.)
"""

from __future__ import annotations

import mmap
import os
import struct
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from itertools import count
from time import monotonic

_ENTRY = struct.Struct("=Qddq32s")  # number + 1, begin, end (0: under way), bytes, name
_ENDED = struct.Struct("=d")
_ENDED_AT = 16
_ENTRIES = 16


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A collective of a rank.

    Args:
        number: counts the collectives of the process, from 0.
        what: its name, cut to 32 bytes.
        size: bytes received; 0 if unknown.
        began: seconds on the host's monotonic clock.
        ended: seconds on the same clock; 0 while it is under way.
    """

    number: int
    what: str
    size: int
    began: float
    ended: float

    def __str__(self) -> str:
        size = f" ({self.size} bytes)" if self.size else ""
        if not self.ended:
            return f"#{self.number} {self.what}{size}: under way for {monotonic() - self.began:.2f} s"
        return f"#{self.number} {self.what}{size}: done {monotonic() - self.ended:.2f} s ago"


class FlightRecord:
    """A ring of the last collectives.

    Attributes:
        descriptor: of the memory file. -1 without one (not Linux), where other processes cannot read it.
    """

    def __init__(self) -> None:
        self.descriptor = -1
        with suppress(OSError, AttributeError):
            self.descriptor = os.memfd_create("shardrec-flight-record", os.MFD_CLOEXEC)
            os.ftruncate(self.descriptor, _ENTRIES * _ENTRY.size)
        self._memory = mmap.mmap(self.descriptor, _ENTRIES * _ENTRY.size)
        self._numbers = count()

    def begin(self, what: str, size: int = 0) -> int:
        """A collective is issued. Returns its number for :meth:`end`."""
        number = next(self._numbers)
        place = number % _ENTRIES * _ENTRY.size
        _ENTRY.pack_into(self._memory, place, number + 1, monotonic(), 0.0, size, what.encode())
        return number

    def end(self, number: int) -> None:
        """Record the end of the collective that :meth:`begin` numbered."""
        place = number % _ENTRIES * _ENTRY.size
        if self._memory[place : place + 8] == (number + 1).to_bytes(8, "little"):
            _ENDED.pack_into(self._memory, place + _ENDED_AT, monotonic())

    def entries(self) -> list[Entry]:
        """The entries in the order in which they began."""
        return _entries(self._memory[:])

    @staticmethod
    def of_process(pid: int, descriptor: int) -> list[Entry]:
        """The entries of another process of this host. None if it cannot be read."""
        if descriptor < 0:
            return []
        try:
            with open(f"/proc/{pid}/fd/{descriptor}", "rb") as file:
                return _entries(file.read(_ENTRIES * _ENTRY.size))
        except OSError:
            return []


@cache
def flight_record() -> FlightRecord:
    """The flight record of this process. A forked child begins a new one."""
    return FlightRecord()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=flight_record.cache_clear)


def _entries(memory: bytes) -> list[Entry]:
    entries = []
    for number, began, ended, size, name in _ENTRY.iter_unpack(memory[: len(memory) // _ENTRY.size * _ENTRY.size]):
        if number:
            what = name.rstrip(b"\0").decode(errors="replace")
            entries.append(Entry(number=number - 1, what=what, size=size, began=began, ended=ended))
    return sorted(entries, key=lambda entry: entry.number)

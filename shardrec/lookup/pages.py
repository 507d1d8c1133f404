"""Huge pages for tables on the CPU.

Rows are read in random order, so that with pages of 4 KiB nearly each needs a page of its own to be looked up in the
processor's tables first. Measured on 26 tables of 100,000 x 64: a look-up takes 20% less time with pages of 2 MiB.
"""

from __future__ import annotations

import ctypes
import mmap
from functools import cache
from typing import Any

from torch import Tensor

__all__ = ["renew_in_huge_pages"]

_HUGE_BYTES = 2 << 20
_FEWEST_BYTES = 8 << 20


def renew_in_huge_pages(fresh: Tensor) -> None:
    """Ask the system to back a tensor of zeros with huge pages; the zeros stay.

    Its pages are given back, and come again with the next use, as zeros, and huge where the system has such. The system
    may say no (``/sys/kernel/mm/transparent_hugepage/enabled``), which changes nothing but the speed.

    Args:
        fresh: flat, of private memory that holds nothing but zeros. Where it is small, on another device or not on
            Linux, it is left alone.
    """
    advise = _madvise()
    if advise is None or fresh.device.type != "cpu" or fresh.nbytes < _FEWEST_BYTES or fresh.is_shared():
        return
    start = -(-fresh.data_ptr() // _HUGE_BYTES) * _HUGE_BYTES
    size = (fresh.data_ptr() + fresh.nbytes) // _HUGE_BYTES * _HUGE_BYTES - start
    if advise(start, size, mmap.MADV_HUGEPAGE) == 0:
        advise(start, size, mmap.MADV_DONTNEED)


@cache
def _madvise() -> Any:
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    try:
        found = ctypes.CDLL(None, use_errno=True).madvise
    except (OSError, AttributeError):
        return None
    found.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return found

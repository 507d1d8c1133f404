"""Large blocks of host memory kept by the process instead of given back to the system after each use.

A training step on the CPU takes and frees the same buffers of tens of megabytes again and again. glibc gets each from
the system and gives it back, so that every page of every step is a fault, which on these sizes costs more than the work
done on them. CUDA tensors have a caching allocator for the same reason. Here glibc's own settings (``mallopt``) do it:
large blocks come from the heap, and the heap is not trimmed.
"""

from __future__ import annotations

import ctypes
import os
from functools import cache

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3  # names of mallopt's parameters in malloc.h
_NEVER = 2**31 - 1
_PAD_BYTES = 64 << 20
_LARGE_BYTES = 1 << 30


@cache
def keep_large_blocks() -> bool:
    """Let this process keep freed memory for its next buffers. ``shardrec.shard`` calls it for tables on the CPU.

    It holds for the whole process, which then stays at its largest size. Blocks of a gigabyte and more (tables) are
    still given back. Nothing is changed where the environment sets one of glibc's ``MALLOC_`` variables or
    ``SHARDREC_KEEP_MEMORY=0``, or where the C library lacks ``mallopt``.

    Returns:
        Whether it was changed.
    """
    if os.environ.get("SHARDREC_KEEP_MEMORY") == "0" or any(name.startswith("MALLOC_") for name in os.environ):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    settings = ((_MMAP_THRESHOLD, _LARGE_BYTES), (_TRIM_THRESHOLD, _NEVER), (_TOP_PAD, _PAD_BYTES))
    return all(mallopt(name, value) == 1 for name, value in settings)

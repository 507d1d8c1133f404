"""One run in a folder: a lock that ends with its process, however that ends, and leaves no file."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["locked"]

_RETRY_S = 0.1


@contextmanager
def locked(folder: Path, seconds: float) -> Iterator[bool]:
    """Hold the lock of a folder; without effect if the file system has no locks.

    Args:
        folder: that exists.
        seconds: how long to wait for another process that holds it.

    Yields:
        Whether this process holds it.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    give_up = time.monotonic() + seconds
    try:
        while not (held := _lock(descriptor)) and time.monotonic() <= give_up:
            time.sleep(_RETRY_S)
        yield held
    finally:
        os.close(descriptor)


def _lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # there are no locks
        return True
    return True

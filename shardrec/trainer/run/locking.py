"""One run in a folder: a lock that ends with its process, however that ends, and leaves no file."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

__all__ = ["Kind", "locked"]

Kind = Literal["alone", "shared"]

_FLAGS: dict[Kind, int] = {"alone": fcntl.LOCK_EX, "shared": fcntl.LOCK_SH}
_RETRY_S = 0.1


@contextmanager
def locked(folder: Path, seconds: float, *kinds: Kind) -> Iterator[Kind | None]:
    """Hold the lock of a folder; without effect if the file system has no locks.

    Args:
        folder: that exists.
        seconds: how long to wait for other processes that hold it.
        kinds: to hold it alone, which is the default, or shared with others that do; the first of these that can be.

    Yields:
        How this process holds it; None if it does not.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    give_up = time.monotonic() + seconds
    try:
        while True:
            held = next((kind for kind in kinds or ("alone",) if _lock(descriptor, _FLAGS[kind])), None)
            if held is not None or time.monotonic() > give_up:
                break
            time.sleep(_RETRY_S)
        yield held
    finally:
        os.close(descriptor)


def _lock(descriptor: int, flags: int) -> bool:
    try:
        fcntl.flock(descriptor, flags | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # there are no locks
        return True
    return True

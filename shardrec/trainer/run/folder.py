"""A run's folder: one run at a time in it, by a lock that ends with the process, and files that are there whole."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Literal

from shardrec import ConfigError
from shardrec.files import naming, os_fault, replacing
from shardrec.launch import RankInfo, on_first_rank
from shardrec.trainer.run.config import TrainConfig

_Kind = Literal["alone", "shared"]

_FLAGS: dict[_Kind, int] = {"alone": fcntl.LOCK_EX, "shared": fcntl.LOCK_SH}
_RETRY_S = 0.1
_LOCK_S = 10.0
"""How long a run waits for one in its folder that is being ended."""


@contextmanager
def locked(folder: Path, seconds: float, *kinds: _Kind) -> Iterator[_Kind | None]:
    """Hold the lock of a folder; without effect if the file system lacks locks.

    Args:
        folder: that exists.
        seconds: how long to wait for other processes that hold it.
        kinds: to hold it alone, which is the default, or shared with others that do. The first of these that can be.

    Yields:
        How this process holds it. None if it does not.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    give_up = time.monotonic() + seconds
    try:
        while True:
            held_as = next((kind for kind in kinds or ("alone",) if _lock(descriptor, _FLAGS[kind])), None)
            if held_as is not None or time.monotonic() > give_up:
                break
            time.sleep(_RETRY_S)
        yield held_as
    finally:
        os.close(descriptor)


def _lock(descriptor: int, flags: int) -> bool:
    try:
        fcntl.flock(descriptor, flags | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # locks are not supported
        return True
    return True


def own_folder(config: TrainConfig, rank_info: RankInfo, lock: ExitStack) -> tuple[Path, bool]:
    """The folder of the results, made and locked on the first rank, so that no two runs write to it; and whether this
    process's ranks are the only ones in it, and not of a replica that joins others.

    Raises:
        ConfigError: on every rank, if it cannot be written to or another run has it.
    """
    kinds: tuple[_Kind, ...] = ("alone",) if config.ranks.replicas is None else ("alone", "shared")
    held_as = on_first_rank(lambda: lock_folder(config, lock, *kinds), rank_info, "start")
    return Path(str(config.output.out)), held_as == "alone"


def lock_folder(config: TrainConfig, lock: ExitStack, *kinds: _Kind) -> _Kind:
    """Make the folder, and hold its lock in another way than before."""
    folder = Path(str(config.output.out))
    # Another replica may be making the plan meanwhile, and this one's other ranks wait for the first.
    wait_s = _LOCK_S if config.ranks.replicas is None else config.ranks.timeout / 2
    lock.close()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        held_as = lock.enter_context(locked(folder, wait_s, *kinds))
    except OSError as error:
        raise ConfigError(f"out (--out) is {str(folder)!r}: {error.strerror}. Give a folder to write to") from error
    if held_as is None:
        raise ConfigError(
            f"out (--out) is {config.output.out!r}: another run writes to it. Wait for its end, or give another folder"
        )
    return held_as


@contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """Another path to write to, which then takes the name: a run that is killed leaves the old file or the new one."""
    try:
        with replacing(path, f"{path.stem}.partial{path.suffix}") as partial, naming(partial):
            yield partial
    except OSError as error:
        raise ConfigError(
            f"out (--out) is {str(path.parent)!r}: {os_fault(error)}. Give a folder to write to, or make room in it"
        ) from error

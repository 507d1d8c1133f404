"""The processes behind the ranks: start, end, and what cannot be asked of them."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.parcel import pack
from tests.rank_pool import MAX_RANKS, Pool
from tests.ranks import POOL
from tests.ranks import ranks as run_ranks


def _pid() -> int:
    return os.getpid()


@pytest.mark.parametrize(
    ("n", "options", "remedy"),
    [
        (0, {}, "take 1 to 4"),
        (MAX_RANKS + 1, {}, "take 1 to 4"),
        (4, {"hosts": 3}, "take a divisor of 4"),
        (2, {"hosts": 0}, "take a divisor of 2"),
        (2, {"expect_death": {2}}, "the ranks are 0 to 1"),
    ],
)
def test_impossible_worlds_are_refused(n: int, options: dict[str, Any], remedy: str) -> None:
    with pytest.raises(ValueError, match=remedy):
        run_ranks(n, _pid, **options)


def test_close_leaves_no_process() -> None:
    pool = Pool([])
    pids = [worker.pid for worker in pool._workers_for(3)]
    server = int(Path(f"/proc/{pids[0]}/stat").read_text().rpartition(")")[2].split()[1])
    assert pids == pool.pids()
    assert len({server, *pids}) == 4
    pool.close()
    assert not any(Path(f"/proc/{pid}").exists() for pid in [server, *pids])
    assert pool.pids() == []
    pool.close()  # twice is fine
    assert pool._workers_for(1)[0].pid not in pids, "a closed pool starts anew"
    pool.close()


def test_an_interrupt_ends_the_ranks() -> None:
    pool = Pool([])
    pids = [worker.pid for worker in pool._workers_for(2)]
    # A shell without job control starts what runs in the background with interrupts ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            pool.run(2, pack((time.sleep, (60,), {}, [])), hosts=1, timeout=60, grace=60, mortal=frozenset())
    finally:
        signal.signal(signal.SIGINT, before)
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    assert pool.pids() == []


def test_a_forked_copy_of_the_session_leaves_the_ranks_alone() -> None:
    before = run_ranks(1, _pid)
    child = os.fork()
    if child == 0:
        POOL.close()
        os._exit(0)
    os.waitpid(child, 0)
    assert run_ranks(1, _pid) == before

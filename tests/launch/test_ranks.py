"""How the ranks of an elastic launcher find each other in a store that earlier ones have used."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest
import torch

from shardrec.launch.ranks import RankInfo, _meeting


def names(store: object, world_size: int, seconds: float = 30.0) -> list[str]:
    """What each rank, a thread with a client of the store, takes for the ranks' name."""
    import torch.distributed as dist

    assert isinstance(store, dist.TCPStore)
    found = [""] * world_size

    def meet(rank: int) -> None:
        rank_info = RankInfo(rank=rank, world_size=world_size, device=torch.device("cpu"), threads=1)
        client = dist.TCPStore("127.0.0.1", store.port, is_master=False, timeout=timedelta(seconds=seconds))
        found[rank] = _meeting(client, rank_info, seconds)

    threads = [threading.Thread(target=meet, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


@pytest.fixture
def store() -> object:
    import torch.distributed as dist

    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def test_each_generation_has_a_name_of_its_own(store: object) -> None:
    """Also with fewer ranks, and after one of them has died while it asked."""
    first, again, fewer = names(store, 3), names(store, 3), names(store, 2)
    store.set("shardrec/rank/1", "of-a-rank-that-died")  # type: ignore[attr-defined]  # a TCPStore
    after = names(store, 2)
    for found in (first, again, fewer, after):
        assert len(set(found)) == 1
    assert len({first[0], again[0], fewer[0], after[0]}) == 4


def test_a_rank_that_does_not_come_is_named(store: object) -> None:
    rank_info = RankInfo(rank=0, world_size=3, device=torch.device("cpu"), threads=1)
    with pytest.raises(RuntimeError, match=r"ranks 1, 2 did not come within 0\.1 s"):
        _meeting(store, rank_info, 0.1)  # type: ignore[arg-type]  # a TCPStore

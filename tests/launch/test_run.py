"""A function on new ranks, which have joined a process group."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

from shardrec.errors import PeerError
from shardrec.launch.ranks import RankInfo, joined_run
from shardrec.launch.run import on_new_ranks
from tests.ranks import POOL


def summed(rank_info: RankInfo, scale: int) -> tuple[int, int, int, int]:
    total = torch.tensor([rank_info.rank + 1])
    dist.all_reduce(total)
    return int(total) * scale, rank_info.rank, rank_info.world_size, torch.get_num_threads()


def test_on_new_ranks() -> None:
    assert on_new_ranks(summed, 10, nproc=2, start=POOL.prepare().start) == (30, 0, 2, 1)


def fails_and_leaves_slowly(rank_info: RankInfo) -> None:
    if rank_info.rank == 1:
        destroy = dist.destroy_process_group
        dist.destroy_process_group = lambda: (destroy(), time.sleep(0.5))
        raise ValueError("rank 1 has had enough")
    dist.barrier()


def test_who_raised_first_is_told_and_not_whose_peer_went() -> None:
    with pytest.raises(PeerError, match="rank 1 failed with ValueError: rank 1 has had enough"):
        on_new_ranks(fails_and_leaves_slowly, nproc=2, start=POOL.prepare().start)


def test_one_rank_has_a_group_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here, as a launcher's."""
    variables = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with joined_run("cpu", 1, alone=True) as rank_info:
        assert summed(rank_info, 10) == (10, 0, 1, 1)
    assert not dist.is_initialized()

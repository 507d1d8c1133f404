"""A function on new ranks, which have joined a process group."""

from __future__ import annotations

import torch
import torch.distributed as dist

from shardrec.launch.ranks import Place
from shardrec.launch.run import on_new_ranks


def summed(place: Place, scale: int) -> tuple[int, int, int, int]:
    total = torch.tensor([place.rank + 1])
    dist.all_reduce(total)
    return int(total) * scale, place.rank, place.world_size, torch.get_num_threads()


def test_on_new_ranks() -> None:
    assert on_new_ranks(summed, 10, nproc=2) == (30, 0, 2, 1)
    assert on_new_ranks(summed, 10, nproc=1) == (10, 0, 1, 1), "one rank has a group, too"

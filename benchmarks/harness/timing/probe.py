"""What the machine can do, measured beside the steps: copies, random rows, and all-to-alls over the links."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import embedding_bag

from benchmarks.harness.timing.clock import time_steps
from shardrec.launch.ranks import RankInfo

__all__ = ["probe"]

_COPY_BYTES = {"cpu": 64 * 2**20, "cuda": 1024 * 2**20}
_LINK_BYTES = (2**20, 2**22, 2**24, 2**25)
_REPEATS = 7
_ROW = 64  # columns, 256 bytes
_ROWS_AT_ONCE = 256
_BAG = 64  # rows that are summed, so that next to nothing is written


def probe(options: Mapping[str, Any], rank_info: RankInfo) -> dict[str, float]:
    """Measure as one of the ranks, all of which are busy with the same.

    Args:
        options: none are read.
        rank_info: this rank, which is in a process group.

    Returns:
        Of the slowest rank, the same on all: ``memory``, bytes read and written per second by a copy of a block larger
        than any cache, by one thread; ``gather``, bytes per second of random rows of 256 bytes read from such a block;
        ``scatter``, bytes read and written per second where such rows are changed in place; ``link``, bytes that leave
        a rank per second in an all-to-all, at the size with which that is most (0 on one rank); ``latency``, seconds of
        an all-to-all of a few bytes.
    """
    own = {"memory": _memory(rank_info), **_random_rows(rank_info), "link": 0.0, "latency": 0.0}
    if rank_info.world_size > 1:
        own["link"] = max(size / _exchange_seconds(size, rank_info) for size in _LINK_BYTES)
        own["latency"] = _exchange_seconds(8 * rank_info.world_size, rank_info)
    found: list[Any] = [None] * rank_info.world_size
    dist.all_gather_object(found, own)
    worst = {"memory": min, "gather": min, "scatter": min, "link": min, "latency": max}
    return {name: take(one[name] for one in found) for name, take in worst.items()}


def _memory(rank_info: RankInfo) -> float:
    size = _COPY_BYTES[rank_info.device.type]
    source = torch.ones(size // 4, device=rank_info.device)
    target = torch.ones_like(source)
    return 2 * size / _seconds(lambda: target.copy_(source), rank_info)


def _random_rows(rank_info: RankInfo) -> dict[str, float]:
    """Distinct rows in random order: summed in bags, and changed in place."""
    count = _COPY_BYTES[rank_info.device.type] // (4 * _ROW)
    table = torch.ones(count, _ROW, device=rank_info.device)
    ids = torch.randperm(count, generator=torch.Generator().manual_seed(0))[: count // 4].to(rank_info.device)
    offsets = torch.arange(0, len(ids), _BAG, device=rank_info.device)
    size = 4 * _ROW * len(ids)
    with torch.no_grad():
        gather = _seconds(lambda: embedding_bag(ids, table, offsets, mode="sum"), rank_info)  # prefetches on the CPU
        return {"gather": size / gather, "scatter": 2 * size / _seconds(_scatter(table, ids), rank_info)}


def _scatter(table: Tensor, ids: Tensor) -> Callable[[], object]:
    """Changes each of the rows."""
    if table.is_cuda:
        change = torch.ones_like(table[:1]).expand(len(ids), -1)
        return lambda: table.index_add_(0, ids, change)
    # Rows as elements of 256 bytes, read and written back some at a time, while they are in a cache: an addition to
    # rows in random order by an operator of torch's takes twice as long and more.
    rows = table.numpy().view(np.dtype((np.void, 4 * _ROW)))[:, 0]
    parts = [part.numpy() for part in ids.split(_ROWS_AT_ONCE)]

    def change_rows() -> None:
        for part in parts:
            rows[part] = rows[part]

    return change_rows


def _exchange_seconds(off_rank: int, rank_info: RankInfo) -> float:
    """Time an all-to-all in which each rank sends ``off_rank`` bytes to others."""
    others = rank_info.world_size - 1
    each = max(1, off_rank // others // 4)
    send = torch.ones(each * rank_info.world_size, device=rank_info.device)
    receive = torch.ones_like(send)
    return _seconds(lambda: dist.all_to_all_single(receive, send), rank_info)


def _seconds(work: Callable[[], object], rank_info: RankInfo) -> float:
    """The median time, after two runs to warm up."""
    times = []
    for number in range(_REPEATS + 2):
        dist.barrier()
        took = time_steps(lambda _: work(), [None], rank_info.device)
        if number >= 2:
            times += took
    return median(times) / 1e3

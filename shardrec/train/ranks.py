"""This process as a rank: its number, device and threads, and the process group it is in for the length of a run."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from shardrec.errors import ConfigError, PeerError

__all__ = ["Place", "RankOptions", "joined", "same_everywhere"]

_TIMEOUT = timedelta(minutes=5)
"""How long a rank waits for the others in a collective. Ranks do the same work, so minutes mean that one is gone."""


class RankOptions(Protocol):
    """What a run's options say of its ranks."""

    @property
    def device(self) -> str:
        """``"cpu"`` or ``"cuda"``."""

    @property
    def threads(self) -> int | None:
        """Threads of each rank; None for an even share of the cores."""

    @property
    def seed(self) -> int:
        """Of torch's random numbers."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where this process is among the ranks of a run.

    Args:
        rank: 0 <= rank < world_size.
        world_size: number of ranks.
        device: where this rank computes.
        threads: threads that it computes with.
    """

    rank: int
    world_size: int
    device: torch.device
    threads: int

    @property
    def is_lead(self) -> bool:
        """Whether this rank reports and writes."""
        return self.rank == 0


@contextmanager
def joined(config: RankOptions) -> Iterator[Place]:
    """Be a rank: set threads and seed, and join the group that the launcher's variables describe (else be alone).

    A default group that is there already is used, and left as it is.

    Raises:
        ConfigError: if the device is not there.
        PeerError: if the other ranks do not come.
    """
    world_size = int(os.environ.get("WORLD_SIZE", 1)) if "RANK" in os.environ else 1
    rank = int(os.environ["RANK"]) if "RANK" in os.environ else 0
    local_rank = int(os.environ.get("LOCAL_RANK", rank))
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    device = _device(config.device, local_rank)
    threads_before = torch.get_num_threads()
    threads = config.threads or max(1, len(os.sched_getaffinity(0)) // local_world_size)
    torch.set_num_threads(threads)
    torch.manual_seed(config.seed)
    place = Place(rank=rank, world_size=world_size, device=device, threads=threads)
    joins = world_size > 1 and not dist.is_initialized()
    try:
        if joins:
            _join(place)
        yield place
        if joins:
            _leave_together(place)
    finally:
        if joins and dist.is_initialized():
            dist.destroy_process_group()
        torch.set_num_threads(threads_before)


def same_everywhere(value: str, place: Place) -> str:
    """Rank 0's value, on every rank."""
    if place.world_size == 1:
        return value
    values: list[object] = [value]
    dist.broadcast_object_list(values, src=0)
    return str(values[0])


def _device(kind: str, local_rank: int) -> torch.device:
    if kind == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError(
            "device (--device) is 'cuda' and torch sees no CUDA device here: give cpu, or install the CUDA builds"
        )
    count = torch.cuda.device_count()
    if local_rank >= count:
        raise ConfigError(
            f"there are more ranks than CUDA devices on this machine ({count}): start at most {count} (--nproc)"
        )
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def _join(place: Place) -> None:
    backend = "gloo" if place.device.type == "cpu" else "cpu:gloo,cuda:nccl"
    try:
        dist.init_process_group(backend, timeout=_TIMEOUT)
    except (RuntimeError, ValueError) as error:
        raise PeerError(
            f"rank {place.rank} of {place.world_size} could not join the others: {str(error).splitlines()[0]}. Check "
            "that all ranks were started, and that they can reach MASTER_ADDR"
        ) from error


def _leave_together(place: Place) -> None:
    """Wait in the launcher's store until every rank is done.

    A rank that leaves right after a collective closes connections that its peers may still read from; gloo then fails
    the collective on those peers although all of its data had been sent.
    """
    store = _get_default_store()
    store.set(f"shardrec/done/{place.rank}", "1")
    store.wait([f"shardrec/done/{rank}" for rank in range(place.world_size)], _TIMEOUT)

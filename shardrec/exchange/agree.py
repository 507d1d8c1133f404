"""Ranks agree or fail together outside of a step: all the ranks that a function is given call it.

::

    all_gather          the value per rank
    same_everywhere     the first rank's value
    over_ranks          the sum of numbers
    on_first_rank       what the first rank computes, or its error
    on_all_ranks        what each rank computes, or an error that names the ranks that failed
    on_threads          what may take longer than a rank may be silent

Each but the last makes one collective, or two for values of more than a kilobyte, and none on a single rank. Inside of
a step the headers of its exchanges carry faults, without another collective (:mod:`shardrec.exchange.headers`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_object_coll_device

from shardrec.errors import CheckpointError, ConfigError, PeerError, ShardrecError
from shardrec.exchange.headers import quoted
from shardrec.exchange.peers import peers
from shardrec.exchange.safe_pickle import gather
from shardrec.exchange.subgroups import subgroup
from shardrec.files import os_fault

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """Ranks that agree or fail together: all ranks, or a replica's ranks.

    Args:
        rank: this rank among them; 0 <= rank < world_size.
        world_size: number of ranks.
        device: device of this rank's tensors.
        group: the process group of several ranks. Default: the default group.
    """

    rank: int
    world_size: int
    device: torch.device
    group: dist.ProcessGroup | None = None

    @property
    def is_lead(self) -> bool:
        """Whether this rank is rank 0, which reports and writes."""
        return self.rank == 0


def ranks_of(group: dist.ProcessGroup | None, device: torch.device) -> Ranks:
    """The ranks of a process group; of None, this rank alone."""
    if group is None:
        return Ranks(rank=0, world_size=1, device=device)
    return Ranks(rank=dist.get_rank(group), world_size=dist.get_world_size(group), device=device, group=group)


def gloo_ranks(ranks: Ranks, what: str) -> Ranks:
    """The same ranks in a new group on the CPU. Its collectives are not matched with a step's and do not wait for a
    device.

    Raises:
        PeerError: if a rank does not come.
    """
    group = None
    if ranks.world_size > 1:
        whole = ranks.group or dist.group.WORLD
        assert whole is not None, "several ranks have a process group"
        group = subgroup(whole, range(ranks.world_size), ranks.device, what=what, backend="gloo")
    return ranks_of(group, torch.device("cpu"))


def all_gather(value: T, ranks: Ranks, what: str) -> list[T]:
    """Return the value per rank, on every rank.

    Args:
        value: of a type that :mod:`shardrec.exchange.safe_pickle` supports.
        ranks: that have a value.
        what: a noun for messages: the thing that the ranks wait for.

    Raises:
        PeerError: if another rank is gone or did not answer in time.
    """
    if ranks.world_size == 1:
        return [value]
    # NCCL gathers on the current device, which may be another rank's.
    is_nccl = _get_object_coll_device(ranks.group) == "cuda"
    on_device = torch.cuda.device(ranks.device) if is_nccl else nullcontext()
    with peers(ranks.group, what), on_device:
        return gather(value, ranks.group)


def same_everywhere(value: T, ranks: Ranks) -> T:
    """Return rank 0's value on every rank."""
    return all_gather(value, ranks, "start")[0]


def over_ranks(count: int, ranks: Ranks) -> int:
    """Return the sum of all ranks' counts."""
    return sum(all_gather(count, ranks, "count of rows"))


def on_first_rank(work: Callable[[], T], ranks: Ranks, what: str) -> T:
    """Return what ``work`` returns on rank 0, on every rank. Its error is raised on all of them.

    Args:
        work: is called on rank 0. Returns a type that :mod:`shardrec.exchange.safe_pickle` supports.
        ranks: that wait for it.
        what: a noun for messages: the thing that the others wait for.
    """
    outcome: Any = None
    cause: Exception | None = None
    if ranks.is_lead:
        try:
            outcome = work()
        except Exception as error:
            outcome, cause = error if isinstance(error, ShardrecError) else ShardrecError(quoted(error)), error
    outcome = all_gather(outcome, ranks, what)[0]
    if cause is not None:
        raise cause
    if isinstance(outcome, ShardrecError):
        raise outcome
    result: T = outcome
    return result


def on_all_ranks(work: Callable[[], T], ranks: Ranks, what: str, *, remedy: str) -> list[T]:
    """Return what ``work``, which reads or writes a checkpoint, returns on each rank; or fail on all ranks.

    Args:
        work: returns a type that :mod:`shardrec.exchange.safe_pickle` supports.
        ranks: that do it.
        what: a noun such as "save", for messages.
        remedy: the remedy for an error of the operating system.

    Raises:
        CheckpointError: on every rank, if ``work`` failed on any. A rank on which it raised another error than one of
            shardrec, of the operating system or for want of memory raises that error itself.
        ConfigError: on every rank, if all failures are ConfigErrors.
        PeerError: if another rank is gone or did not answer in time.
    """
    outcome: Any = None
    cause: Exception | None = None
    try:
        outcome = work()
    except PeerError:  # of a collective between these ranks, which the others raise, too
        raise
    except Exception as error:
        outcome, cause = _checkpoint_error(error, remedy), error
    outcomes = all_gather(outcome, ranks, what)
    failures = {rank: of_rank for rank, of_rank in enumerate(outcomes) if isinstance(of_rank, ShardrecError)}
    if cause is not None and not isinstance(cause, (ShardrecError, OSError, MemoryError)):
        raise cause
    if failures:
        raise _joined(failures, ranks.world_size) from cause
    return outcomes


def on_threads(work: Callable[[], T], ranks: Ranks, what: str, wait_s: float) -> Future[T]:
    """Do ``work`` on a thread per rank, and return when it is done on all of them. Raises none of its errors.

    Args:
        work: may take longer than a rank may be silent.
        ranks: that do it.
        what: a noun for messages: the thing that the ranks wait for.
        wait_s: seconds after which a rank says that it lives.
    """
    with ThreadPoolExecutor(1) as thread:
        done = thread.submit(work)
        while not all(all_gather(bool(wait([done], wait_s).done), ranks, what)):
            pass
    return done


def by_rank(texts: Sequence[str]) -> list[str]:
    """A line for each rank that has a text: ``"rank 1: ..."``."""
    return [f"rank {rank}: {text}" for rank, text in enumerate(texts) if text]


def _checkpoint_error(error: Exception, remedy: str) -> ShardrecError:
    """A rank's error, as it is sent to the others."""
    if isinstance(error, ShardrecError):
        return ConfigError(str(error)) if isinstance(error, ConfigError) else CheckpointError(str(error))
    return CheckpointError(f"{os_fault(error)}; {remedy}" if isinstance(error, OSError) else quoted(error))


def _joined(failures: Mapping[int, ShardrecError], ranks: int) -> ShardrecError:
    kind = ConfigError if all(isinstance(failure, ConfigError) for failure in failures.values()) else CheckpointError
    texts = {str(failure) for failure in failures.values()}
    if len(failures) == ranks and len(texts) == 1:
        return kind(texts.pop())
    lines = [f"rank {rank}: {failure}" for rank, failure in failures.items()]
    return kind(lines[0] if len(lines) == 1 else f"{len(lines)} ranks failed:\n  " + "\n  ".join(lines))

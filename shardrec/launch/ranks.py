"""This process as a rank: its number, device and threads, and its process group during a run."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _get_default_store

from shardrec.errors import ConfigError, PeerError
from shardrec.exchange.agree import Ranks
from shardrec.exchange.collectives import FunctionalCollectives
from shardrec.exchange.headers import Headers
from shardrec.exchange.peers import peers
from shardrec.launch.processes import LISTENER
from shardrec.launch.stop import RunStopped

_TIMEOUT_S = 300.0
"""Default seconds that a rank waits for the others, at the start and in a collective. Ranks do equal work, so a wait of
minutes means that a rank is gone."""

SHARE_DEVICES = "SHARDREC_SHARE_DEVICES"
"""An environment variable; with 1, more ranks than CUDA devices may be started, for tests."""

_ASK_S = 0.05
"""The interval in seconds at which rank 0 checks whether the others have joined."""


@dataclass(frozen=True, kw_only=True)
class RankInfo(Ranks):
    """This process's rank in a run, and its resources; to agree, it stands for all ranks of the run.

    Args:
        rank: 0 <= rank < world_size.
        world_size: number of ranks.
        device: device of this rank's tensors.
        group: default: the default group.
        threads: number of torch's threads.
        timeout: seconds that this rank waits for the others in a collective.

    Attributes:
        is_lead: whether this rank is rank 0, which reports and writes.
    """

    threads: int
    timeout: float = _TIMEOUT_S


@contextmanager
def joined_run(
    device: str, threads: int | None, *, seed: int = 0, timeout: float = _TIMEOUT_S, alone: bool = False
) -> Iterator[RankInfo]:
    """Set this process up as a rank, with threads, seed and process group, and tear the group down at the end.

    The launcher's environment variables describe the group; without them the process is the only rank. An existing
    default group is used and not changed.

    Args:
        device: ``"cpu"`` or ``"cuda"``.
        threads: torch's threads per rank. None for an even share of the cores.
        seed: seed of torch's random number generators.
        timeout: seconds that a rank waits for the others, at the start and in each collective.
        alone: also make a group of a single rank.

    Raises:
        ConfigError: if the device does not exist.
        PeerError: if the other ranks do not join in time.
    """
    world_size = int(os.environ.get("WORLD_SIZE", 1)) if "RANK" in os.environ else 1
    rank = int(os.environ["RANK"]) if "RANK" in os.environ else 0
    local_rank = int(os.environ.get("LOCAL_RANK", rank))
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    own_device = _device(device, local_rank)
    threads_before = torch.get_num_threads()
    threads = threads or max(1, len(os.sched_getaffinity(0)) // local_world_size)
    torch.set_num_threads(threads)
    torch.manual_seed(seed)
    rank_info = RankInfo(rank=rank, world_size=world_size, device=own_device, threads=threads, timeout=timeout)
    joins = (world_size > 1 or alone) and not dist.is_initialized()
    stopped: RunStopped | None = None
    try:
        if joins:
            _join(rank_info)
        try:
            yield rank_info
        except RunStopped as ended:  # at the same step on every rank
            stopped = ended
        if joins:
            _leave_together(rank_info)
        if stopped is not None:
            raise stopped
    except Exception as error:
        error.raised_at = time.time()  # type: ignore[attr-defined]  # the other ranks fail later, when this group ends
        raise
    finally:
        if joins and dist.is_initialized():
            dist.destroy_process_group()
        torch.set_num_threads(threads_before)


def meet(rank_info: RankInfo, what: str) -> None:
    """A barrier that waits at least 300 s, however short the time-out of collectives is.

    Ranks may do different amounts of work before a barrier. A short time-out, meant for collectives, must not end that.

    Args:
        rank_info: this rank.
        what: name of the barrier, a noun, for messages. Unique in a run.

    Raises:
        PeerError: if a rank does not reach the barrier in time.
    """
    if rank_info.world_size > 1:
        _come(what, rank_info, max(rank_info.timeout, _TIMEOUT_S))


def check_exchange(group: dist.ProcessGroup, device: torch.device) -> list[str]:
    """Send a header, a payload (1,000 int32) and pooled rows (1,000 float32) of the only rank of a group to itself.

    Args:
        group: of one rank.
        device: of the tensors.

    Returns:
        The names, among ``"header"``, ``"payload"`` and ``"output"``, of messages that came back changed.
    """
    collectives = FunctionalCollectives(group)
    headers = Headers(collectives, device)
    headers.columns += 5
    header = torch.arange(headers.columns, device=device).unsqueeze(0)
    faults = [] if torch.equal(headers.exchange(header), header) else ["header"]
    sent: list[tuple[str, Tensor]] = [("payload", torch.arange(1000, dtype=torch.int32, device=device))]
    sent += [("output", torch.rand(1000, device=device))]
    for what, values in sent:
        (received,) = collectives.send([[values[:300], values[300:]]], [values.numel()], what).wait()
        faults += [] if torch.equal(received, values) else [what]
    return faults


def _device(kind: str, local_rank: int) -> torch.device:
    if kind == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError(
            "device (--device) is 'cuda' and torch sees no CUDA device here: give cpu, or install the CUDA builds"
        )
    count = torch.cuda.device_count()
    if local_rank >= count:
        if os.environ.get(SHARE_DEVICES) != "1":
            raise ConfigError(
                f"there are more ranks than CUDA devices on this machine ({count}): start at most {count} (--nproc), "
                f"or let ranks share a device, which is slow, with {SHARE_DEVICES}=1"
            )
        # NCCL takes one rank of a host for a device: each appears to be on a host of its own.
        os.environ.setdefault("NCCL_HOSTID", f"shardrec-{local_rank}")
    torch.cuda.set_device(local_rank % count)
    return torch.device("cuda", local_rank % count)


def _join(rank_info: RankInfo) -> None:
    shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    backend = "gloo" if rank_info.device.type == "cpu" else "cpu:gloo,cuda:nccl"
    # Imports take seconds, and not equally long on every rank.
    patience = max(rank_info.timeout, _TIMEOUT_S)
    try:
        store = _store(rank_info, patience)
        timeout = timedelta(seconds=rank_info.timeout)
        dist.init_process_group(
            backend, store=store, rank=rank_info.rank, world_size=rank_info.world_size, timeout=timeout
        )
    except (RuntimeError, ValueError) as error:
        raise PeerError(
            f"rank {rank_info.rank} of {rank_info.world_size} could not join the others: {str(error).splitlines()[0]}. "
            "Check that all ranks were started, and that they can reach MASTER_ADDR"
            + ". Where hosts come and go, set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for torchrun"
            * shared
        ) from error


def _store(rank_info: RankInfo, seconds: float) -> dist.Store:
    """The store of the ranks: the store of an elastic launcher's agent, or a store that rank 0 serves."""
    if "RANK" not in os.environ:
        return dist.HashStore()
    timeout = timedelta(seconds=seconds)
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        store = dist.TCPStore(address, port, is_master=False, timeout=timeout)
        return dist.PrefixStore(_meeting(store, rank_info, seconds), store)
    listener = int(os.environ[LISTENER]) if LISTENER in os.environ else None
    return dist.TCPStore(
        address,
        port,
        rank_info.world_size,
        rank_info.is_lead,
        timeout,
        multi_tenant=listener is None,
        master_listen_fd=listener,
    )


def _meeting(store: dist.Store, rank_info: RankInfo, seconds: float) -> str:
    """A key prefix in the agent's store that is shared by these ranks and was not used before.

    The agent's store outlives its ranks: without a new prefix, ranks would read addresses that earlier ranks left. The
    agent's count of restarts cannot serve, since it does not change when hosts join or leave. So each rank posts a
    random token, and rank 0 answers each token with the prefix that it chose. Answers to tokens of earlier ranks are
    not read.
    """
    token = uuid.uuid4().hex
    if not rank_info.is_lead:
        store.set(f"shardrec/rank/{rank_info.rank}", token)
        name = store.get(f"shardrec/told/{token}").decode()
        store.set(f"{name}/came/{rank_info.rank}", "")
        return name
    name = f"shardrec/{token}"
    missing = set(range(1, rank_info.world_size))
    give_up = time.monotonic() + seconds
    while missing:
        if time.monotonic() > give_up:
            raise RuntimeError(f"ranks {', '.join(map(str, sorted(missing)))} did not come within {seconds:g} s")
        for rank in missing:
            if store.check([f"shardrec/rank/{rank}"]):
                store.set(f"shardrec/told/{store.get(f'shardrec/rank/{rank}').decode()}", name)
        time.sleep(_ASK_S)
        missing = {rank for rank in missing if not store.check([f"{name}/came/{rank}"])}
    return name


def _leave_together(rank_info: RankInfo) -> None:
    """Wait until every rank is done. Rank 0, which may serve the store, is the last to leave.

    A rank that leaves right after a collective closes connections that its peers may still read from. Gloo then fails
    the collective on those peers although all of its data had been sent.
    """
    _come("end of the run", rank_info, rank_info.timeout)
    _come("departure of the ranks", rank_info, rank_info.timeout if rank_info.is_lead else 0.0)


def _come(what: str, rank_info: RankInfo, seconds: float) -> None:
    """Record in the store that this rank has reached the barrier ``what``. Wait for all ranks if ``seconds`` > 0."""
    store = _get_default_store()
    store.set(f"shardrec/{what}/{rank_info.rank}", "")
    if seconds:
        with peers(None, what):
            store.wait([f"shardrec/{what}/{rank}" for rank in range(rank_info.world_size)], timedelta(seconds=seconds))

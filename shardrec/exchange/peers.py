"""Find the ranks of a process group that are gone, stopped or late, and make the error that names them.

A backend only reports that a connection broke or that a time limit expired. So each rank stores its process id in the
default group's store when it makes its first collectives, and when a collective fails, the ranks look for the cause:

::

    ranks of this host     /proc: has the process ended, is it stopped; what are its last collectives (flight_record.py)
    ranks of other hosts   a report in the store, which every rank that fails writes: what it waited for, its last
                           collectives, and which ranks of its host have ended or are stopped

A step without a failure has no overhead besides the entries in the flight record.

[Note: the device waits]
The device waits for NCCL's collectives, and the host waits for the device where it reads a value: no error can
be raised there, and at the group's time limit NCCL's own watchdog ends the process. So a thread looks once a second
whether all ranks of the group run (for ranks of other hosts: whether a rank has reported a failure). If one is gone
while the last collective is still not done, or shortly before the time limit, it aborts the communicators. The host
then returns from its wait, with values that mean nothing: :func:`raise_aborted` follows it.
"""

from __future__ import annotations

import json
import os
import re
import socket
import threading
import weakref
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import torch
import torch.distributed as dist

from shardrec.errors import PeerError
from shardrec.exchange.flight_record import FlightRecord, flight_record

_LOOK_S = 2.0
"""How long to look for a rank that has ended or is stopped, after a failure."""
_STORE_S = 0.3
"""How long the store may take to answer where this host alone tells who is gone."""
_POLL_S = 0.02
_WATCH_S = 1.0
_SHARE_OF_LIMIT = 0.9
"""Of a group's time limit, after which the communicators are aborted, before NCCL's watchdog ends the process."""
_MAX_SHOWN = 8
_SHOWN_ENTRIES = 4
_ENDED, _STOPPED, _RUNS = "has ended", "is stopped by a signal", "runs"
_GLOO_OR_NCCL = re.compile(
    r"\bgloo/|\bNCCL (error|communicator)|\bnccl\w*Error\b|collective operation timeout", re.ASCII
)


# ---------------------------------------------------------------------------------------------------- the public part


@contextmanager
def peers(group: dist.ProcessGroup | None, what: str) -> Iterator[None]:
    """Turn a collective's failure inside the block into a :class:`shardrec.PeerError`. Other exceptions propagate.

    It does not make the other ranks fail: a rank that raises between collectives has to tell them, or end.

    Args:
        group: its ranks take part. Default: the default group. On one rank the block just runs.
        what: the name of the operation, a noun such as "save". The flight record gets an entry with this name.

    Raises:
        PeerError: a collective inside failed or took too long.
    """
    group = group or (dist.group.WORLD if dist.is_available() and dist.is_initialized() else None)
    if group is None or dist.get_world_size(group) == 1:
        yield
        return
    introduce()
    number, begin = flight_record().begin(what), monotonic()
    try:
        yield
    except Exception as error:
        if isinstance(error, PeerError) or not failed_in_a_collective(error):
            raise
        raise peer_error(group, what, error, waited_s=monotonic() - begin) from error
    flight_record().end(number)


def failed_in_a_collective(error: BaseException) -> bool:
    """Whether a backend (gloo, NCCL) or a store raised the error, and not the code around it."""
    if isinstance(error, (dist.DistBackendError, dist.DistNetworkError, dist.DistStoreError)):
        return True
    return isinstance(error, RuntimeError) and _GLOO_OR_NCCL.search(str(error)) is not None


def peer_error(
    group: dist.ProcessGroup,
    what: str,
    cause: BaseException | str,
    suspects: Collection[int] = (),
    *,
    waited_s: float | None = None,
) -> PeerError:
    """The error of a failed collective, which names the ranks that are gone. Finding them takes up to two seconds.

    Args:
        group: of the collective.
        what: the operation that failed, a noun.
        cause: the backend's error, or a sentence.
        suspects: ranks of ``group`` that this one waited for, if that is known.
        waited_s: how long it waited, if that is known.
    """
    global_ranks = _global_ranks(group)
    me = dist.get_rank()
    look = _Look(group.group_name, what, me, [rank for rank in global_ranks if rank != me])
    look.run()
    silent = look.silent()
    suspected = [rank for rank in map(global_ranks.__getitem__, suspects) if rank in silent]
    named = tuple(look.culprits() or suspected or silent)
    return PeerError(
        f"rank {me} of {dist.get_world_size()}{_reason(look, named, waited_s)} ({_first_line(cause)}). "
        "Look for the first error among the other ranks' messages, and start all the ranks "
        f"again\n{_flights(look, named)}",
        ranks=named,
        waited_for=what,
    )


# ------------------------------------------------------------------------------------------------------- who is where


@dataclass(frozen=True, kw_only=True)
class _RankProcess:
    """A rank's host, process, start time of the process (in clock ticks, because ids are reused), and flight record."""

    host: str
    pid: int
    began: str
    record: int

    @property
    def is_here(self) -> bool:
        return self.host == _process_host()

    def state(self) -> str:
        state, began = _process(self.pid)
        if state in ("", "Z", "X") or began != self.began:
            return _ENDED
        # "t": a debugger holds it, or for a moment a sampling profiler.
        return _STOPPED if state == "T" else _RUNS


_RANK_PROCESSES: dict[int, _RankProcess] = {}  # by global rank, of the default group in _STORE
_STORE: list[Any] = []  # a weak reference


def introduce() -> None:
    """Store this rank's host and process in the default group's store, once. Does nothing without a default group."""
    store = _default_store()
    if store is None or (_STORE and _STORE[0]() is store):
        return
    process = _RankProcess(
        host=_process_host(), pid=os.getpid(), began=_process(os.getpid())[1], record=flight_record().descriptor
    )
    # A store that is gone shows in the first collective, which has a limit.
    with suppress(RuntimeError):
        store.set(_key(dist.get_rank()), json.dumps(asdict(process)))
    _RANK_PROCESSES.clear()
    _WATCHES.clear()
    _STORE[:] = [weakref.ref(store)]


def meet(group: dist.ProcessGroup) -> None:
    """Read the other ranks' hosts and processes while the store is available. Every rank has been introduced.

    Args:
        group: its ranks have made a collective with each other.
    """
    store = _default_store()
    if store is not None:
        with suppress(RuntimeError):
            _ask(store, _global_ranks(group))


def _ask(store: dist.Store, ranks: Sequence[int]) -> None:
    """Ask the store for the hosts and processes of ranks that are not known yet."""
    unknown = [rank for rank in ranks if rank not in _RANK_PROCESSES]
    if unknown and not store.check([_key(rank) for rank in unknown]):
        unknown = [rank for rank in unknown if store.check([_key(rank)])]
    if unknown:
        texts = store.multi_get([_key(rank) for rank in unknown])
        for rank, text in zip(unknown, texts, strict=True):
            _RANK_PROCESSES[rank] = _RankProcess(**json.loads(text))


def _default_store() -> dist.Store | None:
    if not (dist.is_available() and dist.is_initialized()):
        return None
    store: dist.Store = dist.distributed_c10d._get_default_store()
    return store


def _key(rank: int) -> str:
    return f"shardrec/{rank}"


def _report_key(group_name: str, rank: int) -> str:
    return f"shardrec/{group_name}/{rank}"


def _global_ranks(group: dist.ProcessGroup) -> list[int]:
    return list(dist.get_process_group_ranks(group))


@cache
def _process_host() -> str:
    """A text that is equal for processes that see each other's ids. Unique to this process without ``/proc``."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        space = os.stat("/proc/self/ns/pid")
    except OSError:
        return f"{socket.gethostname()} {os.getpid()}"
    return f"{boot} {space.st_dev}:{space.st_ino}"


def _process(pid: int) -> tuple[str, str]:
    """State letter and start time of a process. Empty if it does not run."""
    try:
        words = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return "", ""
    return words[0], words[19]


# ------------------------------------------------------------------------------------------------- after a failure


@dataclass(kw_only=True)
class _FailureReport:
    """The report of a rank that failed: what it waited for, its last collectives, the states of ranks of its host."""

    what: str
    flight: list[str]
    sees: dict[str, str]


@dataclass
class _Look:
    """Looks for the ranks that caused a failure, on a separate thread, because the store of a stopped process never
    answers.
    """

    group_name: str
    what: str
    me: int
    others: list[int]
    states: dict[int, str] = field(default_factory=dict)
    reports: dict[int, _FailureReport] = field(default_factory=dict)
    asked: bool = False

    def run(self) -> None:
        """Look for a rank that has ended or is stopped, until all ranks have reported a failure, or for two seconds."""
        over = threading.Event()
        asking = threading.Thread(
            target=self._ask_around, args=(_default_store(), over), name="shardrec-peers", daemon=True
        )
        asking.start()
        begin = monotonic()
        while (seconds := monotonic() - begin) < _LOOK_S:
            for rank, process in dict(_RANK_PROCESSES).items():
                if rank in self.others and process.is_here:
                    self.states[rank] = process.state()
            # A rank that reported a failure before it ended is not a culprit.
            if self.culprits() and (self.asked or seconds > _STORE_S):
                break
            if not self.silent():
                break
            sleep(_POLL_S)
        over.set()
        # One last exchange of reports, so that the others learn what is seen here.
        asking.join(_STORE_S)

    def culprits(self) -> list[int]:
        """The ranks that have ended or are stopped without a report."""
        return [rank for rank in self.silent() if self.states.get(rank) in (_ENDED, _STOPPED)]

    def silent(self) -> list[int]:
        """The ranks without a report."""
        return [rank for rank in self.others if rank not in self.reports]

    def _ask_around(self, store: dist.Store, over: threading.Event) -> None:
        # A separate connection, so that no other user of the store waits behind a question without an answer.
        with suppress(Exception):
            store = store.clone()  # type: ignore[attr-defined]  # unknown to the stubs
            told: dict[str, str] | None = None
            while True:
                last = over.is_set()
                _ask(store, self.others)
                sees = {str(rank): state for rank, state in dict(self.states).items() if state != _RUNS}
                if sees != told:
                    report = _FailureReport(what=self.what, flight=_own_flight(), sees=sees)
                    store.set(_report_key(self.group_name, self.me), json.dumps(asdict(report)))
                    told = sees
                for rank in self.others:
                    # Repeatedly, because a rank may see others end after its own report.
                    if rank in self.reports or store.check([_report_key(self.group_name, rank)]):
                        report = _FailureReport(**json.loads(store.get(_report_key(self.group_name, rank))))
                        self.reports[rank] = report
                        self.states.update({int(other): state for other, state in report.sees.items()})
                self.asked = True
                if last:
                    return
                over.wait(_POLL_S)


# ------------------------------------------------------------------------------------------------ the device's waits


class _DeviceWatch:
    """Of a group: how often the device has waited for it, since when for the last time, and an event after that."""

    def __init__(self) -> None:
        self.waits, self.since, self.event, self.aborted = 0, monotonic(), torch.cuda.Event(), False

    def run(self, name: str, ranks: list[int], backend: Any) -> None:
        """Look at the ranks. CUDA is asked only for a reason, for a graph may be captured meanwhile."""
        store, waits, stuck = _default_store(), -1, False
        with suppress(Exception):
            limit = _SHARE_OF_LIMIT * backend.options._timeout.total_seconds()
            store = store and store.clone()  # type: ignore[attr-defined]  # unknown to the stubs
            while _WATCHES.get(name) is self and not self.aborted:
                sleep(_WATCH_S)
                late = monotonic() - self.since > limit
                if self.waits != waits:
                    waits, stuck = self.waits, False
                elif (late or _is_one_gone(store, name, ranks)) and not self.event.query():
                    # What a rank has sent before it ended may still be on its way.
                    self.aborted, stuck = late or stuck, True
            if self.aborted:
                _abort()


_WATCHES: dict[str, _DeviceWatch] = {}  # by the names of groups of the default group in _STORE


def watch_device(group: dist.ProcessGroup) -> None:
    """Call this once the current CUDA stream waits for a collective of ``group``. See [Note: the device waits]."""
    name = group.group_name
    if name not in _WATCHES:
        watch = _WATCHES[name] = _DeviceWatch()
        arguments = name, _global_ranks(group), group._get_backend(torch.device("cuda"))
        threading.Thread(target=watch.run, args=arguments, daemon=True).start()
    watch = _WATCHES[name]
    watch.event.record()
    watch.waits, watch.since = watch.waits + 1, monotonic()


def raise_aborted(group: dist.ProcessGroup, what: str) -> None:
    """Raise PeerError for ``what``, a noun, if the communicators were aborted, before values of the device are used."""
    if any(watch.aborted for watch in _WATCHES.values()):
        raise peer_error(group, what, "NCCL's communicators were aborted")


def _abort() -> None:
    """Abort the communicators of all groups. torch's own function would also forget the groups."""
    groups = [group for group in dist.distributed_c10d._world.pg_map if torch.device("cuda") in group._device_types]
    backends: list[Any] = [group._get_backend(torch.device("cuda")) for group in groups]
    nccl = [backend for backend in backends if hasattr(backend, "_group_start")]
    if nccl:
        nccl[0]._group_start()  # so that no abort waits for another communicator's
    for backend in backends:
        backend.abort()
    if nccl:
        nccl[0]._group_end()


def _is_one_gone(store: dist.Store | None, group_name: str, ranks: list[int]) -> bool:
    """Whether a rank of this host has ended, or one of another host or the store has failed."""
    processes = [_RANK_PROCESSES[rank] for rank in ranks if rank in _RANK_PROCESSES]
    if any(process.is_here and process.state() == _ENDED for process in processes):
        return True
    if store is None or (len(processes) == len(ranks) and all(process.is_here for process in processes)):
        return False
    try:
        _ask(store, ranks)
        return any(store.check([_report_key(group_name, rank)]) for rank in ranks)
    except RuntimeError:
        return True


def _own_flight() -> list[str]:
    return [str(entry) for entry in flight_record().entries()[-_SHOWN_ENTRIES:]]


def _reason(look: _Look, named: Sequence[int], waited_s: float | None) -> str:
    """What happened to the collective, as the predicate of a sentence about this rank."""
    if not named:
        return f": the {look.what} failed, because each rank waits for another: they issued different collectives"
    gone, late = [], []
    for rank in named[:_MAX_SHOWN]:
        state, rank_process = look.states.get(rank, ""), _RANK_PROCESSES.get(rank)
        process = f"process {rank_process.pid}" if rank_process else "process"
        if state in (_ENDED, _STOPPED):
            gone.append(f"rank {rank}'s {process} {state}")
        else:
            late.append(f"rank {rank}" + (f" (its {process} runs)" if state else ""))
    more = f"; and {len(named) - _MAX_SHOWN} more" if len(named) > _MAX_SHOWN else ""
    if gone:
        gone += [f"{rank} did not come" for rank in late]
        return f": the {look.what} failed, because {'; '.join(gone)}{more}"
    seconds = "" if waited_s is None else f" {waited_s:.3g} s"
    return f" waited{seconds} for {'; '.join(late)}{more} to take part in the {look.what}"


def _first_line(cause: BaseException | str) -> str:
    """Without the place in gloo's source."""
    lines = re.sub(r"^\[\S+:\d+\] ", "", str(cause)).splitlines()
    return lines[0] if lines else type(cause).__name__


def _flights(look: _Look, named: Collection[int]) -> str:
    """The last collectives of this rank, of those that are named, and of some others."""
    lines = []
    for rank in [look.me, *named, *(rank for rank in look.others if rank not in named)][:_MAX_SHOWN]:
        process = _RANK_PROCESSES.get(rank)
        entries: list[str] = []
        if rank == look.me:
            entries = _own_flight()
        elif rank in look.reports:
            entries = look.reports[rank].flight
        elif process is not None and process.is_here:
            entries = [str(entry) for entry in FlightRecord.of_process(process.pid, process.record)[-_SHOWN_ENTRIES:]]
        lines.append(f"\n  rank {rank}: {'; '.join(entries) or 'unknown'}")
    return f"Last collectives:{''.join(lines)}"

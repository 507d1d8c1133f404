"""Processes that are kept from one multi-rank test to the next; `tests.ranks` is what tests use.

They are forked from a `RankTemplate`, which has imported torch, fbgemm, torchrec and shardrec, or is a fork of pytest's
process, which has. A rank that hung or died is started again for the next call, as is one that raised unless all ranks
have replied and it has left its group: otherwise the state of its connections is unknown.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import logging
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING
from unittest import mock

from benchmarks.harness.template import RankTemplate
from tests.worker import GO, HOST, JOINED, LEFT, RELEASE, Call, Reply, quiet_environment, serve

if TYPE_CHECKING:
    from torch.distributed import TCPStore

__all__ = ["MAX_RANKS", "Died", "Hung", "Outcome", "Pool"]

MAX_RANKS = 4

_LINGER_S = 0.5
_JOIN_S = 120.0  # a rank's first collective waits for imports and, on a busy machine, for a processor
_NEVER = float("inf")
_GLOO_MARGIN_S = 30.0  # gloo's own limit comes after the pool's, whose report has the stacks
_STOP_S = 10.0
_STACK_S = 1.0

_PRELOADED = (
    "torch.distributed",
    "torch.distributed.optim",
    "torch.profiler",
    "fbgemm_gpu",
    "torchrec",
    "numpy",
    "pytest",
    "_pytest.assertion.rewrite",
)
# Seconds of importing, which a rank's first torch.compile or torch.export would do.
_PRELOADED_IF_IMPORTED = ("torch._inductor.compile_fx",)


@dataclass(frozen=True, kw_only=True)
class Died:
    """The process ended inside the call.

    Args:
        code: its exit code, or minus the number of the signal that ended it.
        trace: Python stacks at a fatal signal; empty after an ordinary exit.
    """

    code: int
    trace: str


@dataclass(frozen=True, kw_only=True)
class Hung:
    """The process was killed because it had not replied in time.

    Args:
        seconds: how long it ran.
        trace: Python stack of each of its threads at that moment.
    """

    seconds: float
    trace: str


Outcome = Reply | Died | Hung


@dataclass
class RankProcess:
    """One rank's process, seen from the test's side.

    Attributes:
        process: started by the pool; has ended once its exit code is known.
        channel: carries calls and replies, see `tests.worker`.
        log: its stdout and stderr since the call began.
        stack: what faulthandler wrote since then.
    """

    process: BaseProcess
    channel: Connection
    log: Path
    stack: Path

    @property
    def pid(self) -> int:
        """Its process id."""
        assert self.process.pid is not None, "it was started"
        return self.process.pid

    def is_idle(self) -> bool:
        """False if the process ended since its last call: nothing else makes an idle channel readable."""
        return not self.channel.poll(0)

    def stacks(self) -> str:
        """Ask for the stack of every thread, also while the process is busy in C++."""
        os.kill(self.pid, signal.SIGUSR1)
        give_up = time.monotonic() + _STACK_S
        text = self.stack.read_text(errors="replace")
        while time.monotonic() < give_up:
            time.sleep(0.02)
            text, earlier = self.stack.read_text(errors="replace"), text
            if text and text == earlier:
                break
        return text

    def ended(self) -> int:
        """Exit code of a process that closed its channel; minus the signal's number if a signal ended it."""
        self.process.join(_STOP_S)
        return self.end()

    def end(self) -> int:
        """Kill the process if it has not ended by itself; its exit code."""
        self.process.kill()
        self.process.join()
        assert self.process.exitcode is not None, "it has ended"
        return self.process.exitcode

    def close(self) -> None:
        """End it, and close this side."""
        self.channel.close()
        self.ended()


class Pool:
    """At most `MAX_RANKS` rank processes, started when first needed and kept until `close`.

    Not thread-safe: one call at a time.

    Args:
        preloaded: modules that the ranks have from the start; None for what most tests need.
    """

    def __init__(self, preloaded: Sequence[str] | None = None) -> None:
        self._preloaded = preloaded
        self._template: RankTemplate | None = None
        self._store: TCPStore | None = None
        self._workers: dict[int, RankProcess] = {}
        self._numbers, self._started = itertools.count(), itertools.count()
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-", ignore_cleanup_errors=True)
        self._owner = os.getpid()
        atexit.register(self.close)

    def prepare(self) -> RankTemplate:
        """Start importing in the background, for a call that is to come."""
        if self._template is None:
            modules = _usual() if self._preloaded is None else self._preloaded
            self._template = RankTemplate(modules, {**os.environ, **quiet_environment()})
        self._template.prepare()
        return self._template

    def fork(self) -> None:
        """As `prepare`, but with what this process has imported.

        Not if it has threads other than a pytest worker's two and pyarrow's allocator's, which survives a fork.
        """
        threads = [path.read_text() for path in Path("/proc/self/task").glob("*/comm")]
        if len(threads) - threads.count("jemalloc_bg_thd\n") > 2:
            self.prepare()
            return
        resource_tracker.ensure_running()
        with mock.patch("multiprocessing.util.spawnv_passfds", _fork_to_run):
            self.prepare()

    def pids(self) -> list[int]:
        """Process ids of the ranks, in order of rank."""
        return [self._workers[rank].pid for rank in sorted(self._workers)]

    def run(
        self, n: int, payload: bytes, *, hosts: int, timeout: float, grace: float, mortal: frozenset[int]
    ) -> tuple[list[Outcome], list[str]]:
        """Run one call on ranks 0 to n-1.

        Args:
            n: world size, 1 <= n <= `MAX_RANKS`.
            payload: see `tests.worker.Call`.
            hosts: see `tests.worker.Call`.
            timeout: seconds after which a rank counts as hung, from the moment that all have joined the group.
            grace: the same, from the moment that a rank has failed.
            mortal: ranks whose death is not a failure.

        Returns:
            Each rank's outcome, and each rank's output on stdout and stderr.
        """
        number = next(self._numbers)
        try:
            workers = self._workers_for(n)
            for rank, worker in enumerate(workers):
                os.truncate(worker.log, 0)
                os.truncate(worker.stack, 0)
                call = Call(
                    number=number,
                    rank=rank,
                    n=n,
                    hosts=hosts,
                    timeout_s=timeout + _GLOO_MARGIN_S,
                    payload=payload,
                )
                _send(worker, pickle.dumps(call))
            outcomes = _Round(workers, timeout=timeout, grace=grace, mortal=mortal).collect()
        except BaseException:  # also an interrupt or a test's time limit: the ranks are in the middle of something
            self.close()
            raise
        outputs = [worker.log.read_text(errors="replace") for worker in workers]
        for rank, worker in enumerate(workers):
            if worker.process.exitcode is not None:
                self._workers.pop(rank).close()
        return outcomes, outputs

    def close(self) -> None:
        """End all processes and wait for their end. A later `run` starts anew."""
        if os.getpid() != self._owner:
            return  # a fork of the process that owns the ranks
        for worker in self._workers.values():
            worker.end()
            worker.close()
        self._workers.clear()
        if self._template is not None:
            self._template.close()
        self._template = self._store = None

    def _workers_for(self, n: int) -> list[RankProcess]:
        if self._store is None:
            from torch.distributed import TCPStore

            self._store = TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
        for rank in range(n):
            worker = self._workers.get(rank)
            if worker is not None and not worker.is_idle():
                self._workers.pop(rank).close()
                worker = None
            if worker is None:
                self._workers[rank] = self._new_worker(self._store.port)
        return [self._workers[rank] for rank in range(n)]

    def _new_worker(self, port: int) -> RankProcess:
        mine, theirs = multiprocessing.Pipe()
        log, stack = (Path(self._folder.name) / f"{next(self._started)}.{what}" for what in ("log", "stack"))
        log.touch()
        stack.touch()
        with theirs:
            process = self.prepare().start(serve, port, theirs, str(log), str(stack))
        return RankProcess(process=process, channel=mine, log=log, stack=stack)


def _fork_to_run(path: bytes, args: Sequence[str], passfds: Sequence[int]) -> int:
    """What `multiprocessing.util.spawnv_passfds` does, in a fork of this process instead of another Python.

    Of pytest, which has replaced them, the fork has no output, handlers of logs or open files.
    """
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):  # of the thread that reads from pytest
        process = os.fork()
    if process != 0:
        return process
    try:
        sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1, closefd=False) for number in (1, 2))
        logging.root.handlers.clear()
        nothing = os.open(os.devnull, os.O_RDWR)
        for number in map(int, os.listdir("/proc/self/fd")):
            if number > 2 and number not in passfds:
                with contextlib.suppress(OSError):  # that which listed the folder
                    os.fstat(number)
                    os.dup2(nothing, number)  # not closed: another file would have the number, and its owner close it
        exec(args[-1], {"__name__": "__main__"})
    except SystemExit:
        pass
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


def _usual() -> list[str]:
    """What most tests need: of shardrec, what the tests collected so far have imported."""
    own = sorted(name for name in sys.modules if name.partition(".")[0] == "shardrec")
    return [*_PRELOADED, *(name for name in _PRELOADED_IF_IMPORTED if name in sys.modules), *own]


class _Round:
    """The wait for the replies to one call, until each rank's outcome is known and each finished rank is let go.

    ::

        a rank fails ──linger──► ranks that have replied are let go: peers that wait for them fail
              └───────grace────► ranks that still have not replied count as hung

    The linger lets ranks that fail together each say why: the first to leave closes connections that the others may
    still be using. Ranks that wait for a rank which has failed are freed by its leaving.
    """

    def __init__(self, workers: Sequence[RankProcess], *, timeout: float, grace: float, mortal: frozenset[int]) -> None:
        self._workers = workers
        self._timeout = timeout
        self._grace = grace
        self._mortal = mortal
        self._outcomes: dict[int, Outcome] = {}
        self._joined: set[int] = set()
        self._held: set[int] = set()
        self._started = time.monotonic()
        self._deadline = self._started + max(timeout, _JOIN_S)
        self._failing = False
        self._let_go_at = _NEVER

    def collect(self) -> list[Outcome]:
        """One outcome for each rank, in order. Every worker is idle or has an exit code afterwards."""
        while len(self._outcomes) < len(self._workers):
            ranks = {w.channel: rank for rank, w in enumerate(self._workers) if rank not in self._outcomes}
            wake = min(self._deadline, self._let_go_at)
            for channel in wait(list(ranks), max(0.0, wake - time.monotonic())):
                assert isinstance(channel, Connection), "only connections are waited for"
                self._receive(ranks[channel])
            if len(self._joined | self._outcomes.keys()) == len(self._workers):
                self._go()
            now = time.monotonic()
            if now >= self._let_go_at:
                self._let_go()
            if now >= self._deadline:
                self._give_up()
        self._let_go()
        return [self._outcomes[rank] for rank in range(len(self._workers))]

    def _receive(self, rank: int) -> None:
        worker = self._workers[rank]
        try:
            message = worker.channel.recv_bytes()
        except (EOFError, ConnectionResetError):
            self._outcomes[rank] = Died(code=worker.ended(), trace=worker.stack.read_text(errors="replace"))
            failed = rank not in self._mortal
        else:
            if message == JOINED:
                self._joined.add(rank)
                return
            reply: Reply = pickle.loads(message)
            self._outcomes[rank] = reply
            self._held.add(rank)
            failed = not reply.returned
        now = time.monotonic()
        if failed and not self._failing:
            self._failing = True
            self._deadline = min(self._deadline, now + self._grace)
        if self._failing:
            self._let_go_at = min(self._let_go_at, now + _LINGER_S)

    def _go(self) -> None:
        self._started = time.monotonic()
        if not self._failing:
            self._deadline = self._started + self._timeout
        for rank in self._joined:
            _send(self._workers[rank], GO)
        self._joined.clear()

    def _let_go(self) -> None:
        all_replied = len(self._held) == len(self._workers)
        raised = []
        for rank in self._held:
            outcome = self._outcomes[rank]
            if all_replied or (isinstance(outcome, Reply) and outcome.returned):
                _send(self._workers[rank], RELEASE)
            else:
                # Its group may have operations under way that block a clean end until gloo's own time limit.
                self._workers[rank].end()
            if all_replied and isinstance(outcome, Reply) and not outcome.returned:
                raised.append(self._workers[rank])
        for worker in raised:
            try:
                has_left = worker.channel.poll(_STOP_S) and worker.channel.recv_bytes() == LEFT
            except (EOFError, ConnectionResetError):
                has_left = False
            if not has_left:
                worker.end()
        self._held.clear()
        self._let_go_at = _NEVER

    def _give_up(self) -> None:
        hung = [rank for rank in range(len(self._workers)) if rank not in self._outcomes]
        seconds = time.monotonic() - self._started
        for rank in hung:  # all stacks first: the end of one rank wakes its peers
            self._outcomes[rank] = Hung(seconds=seconds, trace=self._workers[rank].stacks())
        for rank in hung:
            self._workers[rank].end()


def _send(worker: RankProcess, message: bytes) -> None:
    # If it has died, that shows when its channel is read, or at the next call.
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        worker.channel.send_bytes(message)

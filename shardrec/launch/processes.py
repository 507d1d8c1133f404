"""Rank processes of this host: started together, watched, and ended together.

::

    launcher                                   a socket on the loopback address, inherited by rank 0 for the store
      ├─ rank 0 ── run(options) ──► returns ──► ("returned", result) ─┐
      └─ rank 1 ── run(options) ──► fails ────► ("failed", failure) ──┴─► a pipe each
                                                   └─ the others are ended; the first cause is raised, once

The ranks end when their launcher ends, even if it is killed. They are connected only by pipes and sockets without
names, so a kill at any time leaves no process, no file and no open port. The launcher imports no torch.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType
from typing import Any, Generic, TypeVar, cast

from shardrec import errors
from shardrec.errors import ConfigError, InputError, PeerError, ShardrecError
from shardrec.launch.quiet import environment_for_torch
from shardrec.launch.stop import SAME_SIGNAL_S, RunStopped, handling

T = TypeVar("T")

Start = Callable[..., BaseProcess]
"""Starts a process as :func:`spawn` does."""

LISTENER = "SHARDREC_STORE_FD"
"""Environment variable of rank 0: the file descriptor of the listening socket for the store's server."""

_HOST = "127.0.0.1"
_PR_SET_PDEATHSIG = 1
_GRACE_S = 5.0
"""Seconds after the first failure in which the other ranks may report theirs."""

_POLL_S = 0.5

_SIGNAL, _STOPPED, _EXIT = "ended by a signal", "stopped", "exit code"

_IMPORTED_AGAIN = 77
"""Exit code of a new rank if its import of the program tries to start ranks."""


@dataclass(frozen=True, kw_only=True)
class RankFailure:
    """The failure of a rank.

    Args:
        rank: the rank that failed.
        kind: name of the exception's class, or how the process ended if no exception was reported.
        message: the exception's message, the signal's name or the exit code.
        time: seconds since the epoch at which the failure was raised.
        trace: the traceback, if there is one.
    """

    rank: int
    kind: str
    message: str
    time: float
    trace: str = ""


def spawn(target: Callable[..., None], *args: object, name: str) -> BaseProcess:
    """Start a new Python process that calls ``target(*args)``. ``target`` is a module's function."""
    process = multiprocessing.get_context("spawn").Process(target=target, args=args, name=name)
    process.start()
    return process


def spawn_alone(target: Callable[..., None], *args: object, name: str) -> BaseProcess:
    """:func:`spawn`, of a process that does not import this program, which then needs no ``if __name__ ==`` guard.

    Args:
        target: a function of another module than the program, as are those that ``args`` hold.
    """
    program = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        return spawn(target, *args, name=name)
    finally:
        sys.modules["__main__"] = program


class RankProcesses(Generic[T]):
    """The ranks of one attempt at a run.

    Args:
        run: the function that each rank calls. Must be picklable, as a module's function is.
        options: the argument of ``run``. Must be picklable.
        nproc: number of ranks to start.
        timeout: seconds for which a rank may be stopped (SIGSTOP) before it counts as dead and is killed.
        debug: keep the ranks' tracebacks and torch's warnings.
        limit: seconds after which ranks that still run are killed.
        start: starts the process of a rank.
    """

    def __init__(
        self,
        run: Callable[[dict[str, Any]], T],
        options: dict[str, Any],
        *,
        nproc: int,
        timeout: float,
        debug: bool,
        limit: float = float("inf"),
        start: Start = spawn,
    ) -> None:
        self._work = (run, options)
        self._timeout = timeout
        self._debug = debug
        self._limit = limit
        self._start_process = start
        self._processes: list[BaseProcess] = []
        self._pipes: list[Connection] = []
        self._stopped_s = [0.0] * nproc
        self._signalled_at: float | None = None
        self._failures: list[RankFailure] = []
        self._said: dict[str, Any] = {}

    def result(self) -> T:
        """Start the ranks and wait until all have ended.

        Returns:
            What ``run`` returned on rank 0.

        Raises:
            ShardrecError: the first error of any rank that is not about another rank.
            RunStopped: the ranks were asked to end (SIGTERM or Ctrl-C here) and saved a checkpoint first.
            KeyboardInterrupt: the ranks were asked to end and ended without a checkpoint.
        """
        if getattr(multiprocessing.current_process(), "_inheriting", False):
            raise SystemExit(_IMPORTED_AGAIN)  # this process is a rank that still imports the program
        try:
            with handling(self._pass_on, signal.SIGINT, signal.SIGTERM):
                self._start()
                self._watch()
        finally:
            self._end_all()
        if self._failures:
            cause = first_cause(self._failures, self._debug)
            told_to_end = self._signalled_at is not None or "saved" in self._said
            if not (told_to_end and isinstance(cause, PeerError)):
                raise cause
        if "saved" in self._said:
            raise RunStopped(*self._said["saved"])
        if self._failures:
            raise KeyboardInterrupt
        return cast(T, self._said.get("returned"))

    def _start(self) -> None:
        nproc = len(self._stopped_s)
        # New processes inherit that SIGINT is ignored: only the launcher handles Ctrl-C, and passes it on.
        with (
            socket.create_server((_HOST, 0), backlog=nproc) as listener,
            environment_for_torch(quiet=not self._debug),
            handling(signal.SIG_IGN, signal.SIGINT),
        ):
            for rank in range(nproc):
                receiver, sender = multiprocessing.Pipe(duplex=False)
                birth = (rank, nproc, listener.getsockname()[1], listener if rank == 0 else None)
                with sender:
                    process = self._start_process(_rank_main, *birth, sender, *self._work, name=f"rank {rank}")
                    self._processes.append(process)
                self._pipes.append(receiver)
        if self._signalled_at is not None:  # the signal came before all ranks had been started
            self._ask_to_end()

    def _pass_on(self, number: int, frame: object) -> None:
        """Ask the ranks to end at the first signal. Kill them at a second one that is not an echo of the first."""
        now = time.monotonic()
        again = self._signalled_at is not None and now - self._signalled_at > SAME_SIGNAL_S
        self._signalled_at = self._signalled_at or now
        self._ask_to_end(again)

    def _ask_to_end(self, now: bool = False) -> None:
        for process in self._processes:
            if process.is_alive():
                process.kill() if now else process.terminate()

    def _watch(self) -> None:
        """Wait until every rank has ended, or until the grace period after the first failure is over."""
        running = set(range(len(self._processes)))
        now = time.monotonic()
        deadline = now + self._limit
        while running and now < deadline:
            pipes = [self._pipes[rank] for rank in running if not self._pipes[rank].closed]
            wait([*(self._processes[rank].sentinel for rank in running), *pipes], _POLL_S)
            before, now = now, time.monotonic()
            for rank in sorted(running):
                # Ctrl-Z also stops the launcher. The time in which the launcher itself was stopped does not count.
                if self._is_over(rank, min(now - before, 2 * _POLL_S)):
                    running.discard(rank)
            if self._failures:
                # When a rank was killed or stopped, the other ranks cannot add to the cause.
                is_known = any(failure.kind in (_SIGNAL, _STOPPED) for failure in self._failures)
                deadline = min(deadline, now if is_known else now + _GRACE_S)
        if running and not self._failures:
            what = f"ranks {', '.join(map(str, sorted(running)))} still ran after {self._limit:g} s, and were ended"
            self._failures.append(
                RankFailure(rank=min(running), kind=PeerError.__name__, message=what, time=time.time())
            )

    def _is_over(self, rank: int, seconds: float) -> bool:
        """Whether a rank has ended or has been stopped for too long. Reads its messages first."""
        code = self._processes[rank].exitcode
        self._read(rank)
        if code is not None:
            if code and all(failure.rank != rank for failure in self._failures):
                kind, what = (_SIGNAL, signal.Signals(-code).name) if code < 0 else (_EXIT, str(code))
                self._failures.append(RankFailure(rank=rank, kind=kind, message=what, time=time.time()))
            return True
        self._stopped_s[rank] = self._stopped_s[rank] + seconds if _is_stopped(self._processes[rank].pid) else 0.0
        if not self._stopped_s[rank] or (self._stopped_s[rank] < self._timeout and not self._failures):
            return False
        self._failures.append(RankFailure(rank=rank, kind=_STOPPED, message=f"{self._timeout:g}", time=time.time()))
        return True

    def _read(self, rank: int) -> None:
        pipe = self._pipes[rank]
        try:
            while not pipe.closed and pipe.poll():
                kind, value = pipe.recv()
                if kind == "failed":
                    self._failures.append(value)
                else:
                    self._said.setdefault(kind, value)
        except (EOFError, OSError):
            pipe.close()

    def _end_all(self) -> None:
        for process in self._processes:
            process.kill()
        for process, pipe in zip(self._processes, self._pipes, strict=True):
            process.join()
            process.close()
            pipe.close()


def _is_stopped(pid: int | None) -> bool:
    """Whether a process was stopped by a signal."""
    try:
        # pid (name) state ...; the name may hold anything.
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] == b"T"
    except (OSError, IndexError):
        return False


# ------------------------------------------------------------------------------------------------- rank processes


def end_with_launcher() -> None:
    """Have the system kill this rank when its launcher ends, even if the rank is stopped at that time."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    launcher = multiprocessing.parent_process()
    if launcher is None or wait([launcher.sentinel], 0):  # the launcher had ended before prctl was called
        os.kill(os.getpid(), signal.SIGKILL)


def _rank_main(
    rank: int,
    nproc: int,
    port: int,
    listener: socket.socket | None,
    said: Connection,
    run: Callable[[dict[str, Any]], object],
    options: dict[str, Any],
) -> None:
    """The main function of a rank process: call ``run``, then report its result or its failure to the launcher.

    Rank 0 gets the listening socket of the store.
    """
    end_with_launcher()
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_ADDR": _HOST, "MASTER_PORT": str(port)}
    os.environ |= {"WORLD_SIZE": str(nproc), "LOCAL_WORLD_SIZE": str(nproc)}
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if listener is not None:
        os.environ[LISTENER] = str(listener.detach())
        # Rank 0 restores the terminal before it ends. The other ranks may end immediately, even inside a collective.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        result = run(options)
        if rank == 0:
            said.send(("returned", result))
    except RunStopped as stopped:
        said.send(("saved", stopped.args))
    except KeyboardInterrupt:
        raise SystemExit(1) from None
    except Exception as error:
        trace = "".join(traceback.format_exception(error))
        raised_at = getattr(error, "raised_at", time.time())
        failure = RankFailure(rank=rank, kind=type(error).__name__, message=str(error), time=raised_at, trace=trace)
        said.send(("failed", failure))
        raise SystemExit(1) from None


# ------------------------------------------------------------------------------------------------ cause of failure


def first_cause(failures: Sequence[RankFailure], debug: bool = False) -> ShardrecError:
    """The cause of a failed run: the first error of any rank that is not about another rank.

    Args:
        failures: one per rank that failed; not empty.
        debug: add the rank's traceback.
    """
    # A rank that was killed from outside reports nothing; then the other ranks' errors are all about that rank.
    causes = [failure for failure in failures if failure.kind not in (_SIGNAL, _STOPPED, _EXIT, PeerError.__name__)]
    silent = [failure for kind in (_SIGNAL, _STOPPED) for failure in failures if failure.kind == kind]
    told = causes or silent[:1] or [failure for failure in failures if failure.kind == PeerError.__name__] or failures
    # An InputError is raised on every rank. Any other class of error says more.
    failure = min(told, key=lambda failure: (failure.kind == InputError.__name__, failure.time, failure.rank))
    trace = f"\n\n{failure.trace}" if debug else ""
    if failure.kind == _SIGNAL:
        memory = ". The system ends the largest process when memory runs out: use smaller tables or batches"
        text = f"rank {failure.rank} was ended by {failure.message}{memory * (failure.message == 'SIGKILL')}"
        return PeerError(text, ranks=(failure.rank,))
    if failure.kind == _STOPPED:
        return PeerError(
            f"rank {failure.rank} was stopped, by SIGSTOP or Ctrl-Z, while the others waited for it (at most "
            f"{failure.message} s): continue it earlier, or allow more time (--timeout)"
        )
    if failure.kind == _EXIT and failure.message == str(_IMPORTED_AGAIN):
        return ConfigError(
            "each new rank imports the program again, and this program starts ranks when it is imported: put what it "
            'does into a function main(), and end it with the lines\n\nif __name__ == "__main__":\n    main()'
        )
    if failure.kind == _EXIT:
        has_file = os.path.exists(getattr(sys.modules["__main__"], "__file__", None) or "")
        typed = ". Ranks cannot import a program that is typed, piped or a notebook: put what they run into a file"
        what = f"rank {failure.rank} ended with exit code {failure.message} and said nothing: run it with --debug"
        return PeerError(what + typed * (not has_file))
    if failure.kind in errors.__all__:
        kind: type[ShardrecError] = getattr(errors, failure.kind)
        return kind(failure.message + trace)
    told_by = f"rank {failure.rank} failed with {failure.kind}: {failure.message}"
    return PeerError(told_by + (trace or "\nRun it with --debug for the traceback"))

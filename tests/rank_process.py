"""This side of the processes that `tests.worker` is the far side of: the zygote, and the ranks that it forks."""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO

from tests.worker import FORK, MESSAGE, READY, REAP

__all__ = ["RankProcess", "Zygote", "content", "quiet_environment"]

_ROOT = Path(__file__).resolve().parents[1]
_PRELOADED = ("torch.distributed", "torch.profiler", "fbgemm_gpu", "torchrec", "numpy", "_pytest.assertion.rewrite")
# Seconds of importing, which a rank's first torch.compile or torch.export would do.
_PRELOADED_IF_IMPORTED = ("torch._inductor.compile_fx",)
_START_S = 120.0
_STOP_S = 10.0
_STACK_S = 1.0


def quiet_environment() -> dict[str, str]:
    """Variables for one-threaded ranks that talk over the loopback interface and do not chat on stderr."""
    names = [name for _, name in socket.if_nameindex()]
    loopback = next((name for name in ("lo", "lo0") if name in names), None)
    interfaces = {} if loopback is None else {"GLOO_SOCKET_IFNAME": loopback, "TP_SOCKET_IFNAME": loopback}
    return {
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "TORCHINDUCTOR_COMPILE_THREADS": "1",  # otherwise every rank that compiles starts a pool of its own
        "KINETO_LOG_LEVEL": "99",
        **interfaces,
    }


@dataclass
class RankProcess:
    """One rank's process, seen from the test's side.

    Attributes:
        pid: its process id; not used again before the process is reaped.
        channel: carries calls and replies, see `tests.worker`.
        log: its stdout and stderr since the call began.
        stack: what faulthandler wrote since then.
        code: its exit code, once it has been reaped.
    """

    pid: int
    channel: Connection
    log: IO[bytes]
    stack: IO[bytes]
    code: int | None = None

    def is_idle(self) -> bool:
        """False if the process ended since its last call: nothing else makes an idle channel readable."""
        return not self.channel.poll(0)

    def forget_output(self) -> None:
        """Empty the files before the next call."""
        self.log.truncate(0)
        self.stack.truncate(0)

    def stacks(self) -> str:
        """Ask for the stack of every thread, also while the process is busy in C++."""
        os.kill(self.pid, signal.SIGUSR1)
        give_up = time.monotonic() + _STACK_S
        text = content(self.stack)
        while time.monotonic() < give_up:
            time.sleep(0.02)
            text, earlier = content(self.stack), text
            if text and text == earlier:
                break
        return text

    def close(self) -> None:
        """Close this side; an idle rank then ends by itself."""
        self.channel.close()
        self.log.close()
        self.stack.close()


def content(file: IO[bytes]) -> str:
    """All that a rank has written to one of its files."""
    size = os.fstat(file.fileno()).st_size
    return os.pread(file.fileno(), size, 0).decode(errors="replace")


def _preloaded() -> list[str]:
    """The modules that the ranks have from the start.

    Of shardrec, those which the tests collected so far have imported; only these, so that a module which cannot be
    imported fails the tests of that module and no others.
    """
    own = sorted(name for name in sys.modules if name.partition(".")[0] == "shardrec")
    return [*_PRELOADED, *(name for name in _PRELOADED_IF_IMPORTED if name in sys.modules), *own]


def _scratch_file() -> IO[bytes]:
    """A nameless file that a rank appends to, wherever this process truncates it."""
    file = tempfile.TemporaryFile()  # noqa: SIM115  # the worker closes it
    flags = fcntl.fcntl(file.fileno(), fcntl.F_GETFL)
    fcntl.fcntl(file.fileno(), fcntl.F_SETFL, flags | os.O_APPEND)
    return file


class Zygote:
    """The process that ranks are forked from, and that reaps them.

    Args:
        preloaded: modules that the ranks have from the start; None for what most tests need.
    """

    def __init__(self, preloaded: Sequence[str] | None = None) -> None:
        mine, theirs = socket.socketpair()
        self._control = mine
        self._ready = False
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  # close() does
        modules = _preloaded() if preloaded is None else list(preloaded)
        # _exit because nothing of what it imported has to be torn down, which would take half a second.
        command = f"import os, tests.worker; tests.worker.serve({theirs.fileno()}, {modules}); os._exit(0)"
        path = [str(_ROOT), *(entry or os.getcwd() for entry in sys.path)]
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", command],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                env={**os.environ, **quiet_environment(), "PYTHONPATH": os.pathsep.join(path)},
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C is for pytest, which then closes the pool
            )

    def fork(self, port: int) -> RankProcess:
        """A new rank, which uses the store at `port`."""
        mine, theirs = socket.socketpair()
        log, stack = _scratch_file(), _scratch_file()
        with theirs:
            pid = self._ask(FORK, port, [theirs.fileno(), log.fileno(), stack.fileno()])
        return RankProcess(pid=pid, channel=Connection(mine.detach()), log=log, stack=stack)

    def end(self, worker: RankProcess) -> int:
        """Kill the process if it has not ended by itself; its exit code."""
        if worker.code is None:
            os.kill(worker.pid, signal.SIGKILL)
            worker.code = self._ask(REAP, worker.pid, [])
        return worker.code

    def ended(self, worker: RankProcess) -> int:
        """Exit code of a process that closed its channel."""
        if worker.code is None:
            worker.code = self._ask(REAP, worker.pid, [])
        return worker.code

    def close(self) -> None:
        """End it and every rank that it forked; returns when they are gone."""
        self._control.close()
        if not self._ready:
            self._process.kill()
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()

    def _ask(self, kind: bytes, number: int, fds: Sequence[int]) -> int:
        if not self._ready:
            self._control.settimeout(_START_S)
            self._receive(READY)
            self._ready = True
        socket.send_fds(self._control, [MESSAGE.pack(kind, number)], fds)
        return self._receive(kind)

    def _receive(self, kind: bytes) -> int:
        try:
            message = self._control.recv(MESSAGE.size, socket.MSG_WAITALL)
        except TimeoutError:
            message = b""
        if len(message) < MESSAGE.size:
            raise RuntimeError(
                f"the process that forks the test ranks failed ({self._state()}); look for an import that fails in its "
                f"output:\n{content(self._log)}"
            )
        answered, answer = MESSAGE.unpack(message)
        assert answered == kind, f"the zygote answered {answered!r} to {kind!r}"
        return int(answer)

    def _state(self) -> str:
        try:
            return f"exit code {self._process.wait(_STACK_S)}"
        except subprocess.TimeoutExpired:
            return f"no answer within {_START_S:.0f} s"

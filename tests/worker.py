"""The far side of the rank pool: the loop that each rank runs.

::

    pytest              rank
      │── Call ──────────►│  join a fresh gloo group
      │◄───────── JOINED ─│
      │── GO ────────────►│  run the function
      │◄────────── Reply ─│
      │── RELEASE ───────►│  leave the group
      │◄─────────── LEFT ─│  if the function raised
      ▼                   ▼

GO comes when every rank has joined: a rank that dies at once would otherwise fail the rendezvous of its peers. RELEASE
comes when every rank has replied: a rank keeps its connections while a peer may still use them, and a collective that
not all ranks join shows up as a hang with a stack. A rank whose function raised may have operations under way, for
which its group waits: it ends instead if it has not left within `_LEAVE_S`.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import os
import pickle
import random
import signal
import socket
import sys
import threading
import traceback
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

from shardrec.launch.processes import end_with_launcher

__all__ = [
    "GO",
    "HOST",
    "JOINED",
    "LEFT",
    "RELEASE",
    "SEED",
    "Call",
    "Reply",
    "launch_environment",
    "quiet_environment",
    "seed_torch",
    "serve",
]

HOST = "127.0.0.1"
SEED = 20
"""Seed of torch, numpy and random at the start of every test, and of every rank at the start of every call."""

JOINED, GO, RELEASE, LEFT = b"joined", b"go", b"release", b"left"

_MAX_CLOSING = 8
_LEAVE_S = 0.5


@dataclass(frozen=True, kw_only=True)
class Call:
    """One function to run as one rank.

    Args:
        number: counts the calls of a session; keeps the rendezvous keys of two calls apart.
        rank: this rank, 0 <= rank < n.
        n: world size.
        hosts: hosts that the world is spread over; divides n.
        timeout_s: how long a collective may wait, in seconds.
        payload: packed ``(fn, args, kwargs, warning filters)``.
    """

    number: int
    rank: int
    n: int
    hosts: int
    timeout_s: float
    payload: bytes


@dataclass(frozen=True, kw_only=True)
class Reply:
    """What a call came to.

    Args:
        returned: False if the function raised.
        payload: packed value or exception; empty if the exception cannot be pickled.
        summary: ``Type: message`` of the exception.
        trace: its traceback as text, from the called function on.
    """

    returned: bool
    payload: bytes
    summary: str = ""
    trace: str = ""


def launch_environment(call: Call, port: int) -> dict[str, str]:
    """The variables that torchrun would set for this rank, for `call.hosts` hosts with equally many ranks each.

    ``env://`` rendezvous (which `torch.distributed.rpc` makes) works too: like torchrun's agent, the store at
    ``MASTER_PORT`` lives as long as the pool, and the restart count keeps the calls' keys apart.
    """
    local_world_size = call.n // call.hosts
    return {
        "RANK": str(call.rank),
        "WORLD_SIZE": str(call.n),
        "LOCAL_RANK": str(call.rank % local_world_size),
        "LOCAL_WORLD_SIZE": str(local_world_size),
        "GROUP_RANK": str(call.rank // local_world_size),
        "GROUP_WORLD_SIZE": str(call.hosts),
        "MASTER_ADDR": HOST,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": str(True),
        "TORCHELASTIC_RESTART_COUNT": str(call.number),
    }


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


def seed_torch(seed: int) -> None:
    """As ``torch.manual_seed``, which formats the stack for each kind of device that is not in use: milliseconds."""
    import torch

    (torch.manual_seed if torch.backends.cuda.is_built() else torch.default_generator.manual_seed)(seed)


def serve(port: int, channel: Connection, log: str, stack: str) -> None:
    """Run calls until the channel closes, then end the process without its clean-up.

    Args:
        port: of the pool's store.
        channel: carries calls and replies.
        log: file that takes stdout and stderr; whatever is there stays, and the pool truncates it.
        stack: the same for faulthandler: fatal signals, and every thread's stack on SIGUSR1.
    """
    code = 1
    try:
        end_with_launcher()
        os.setsid()  # Ctrl-C is for pytest, which then closes the pool
        log_fd, stack_fd = (os.open(path, os.O_WRONLY | os.O_APPEND) for path in (log, stack))
        os.dup2(log_fd, 1)
        os.dup2(log_fd, 2)
        faulthandler.enable(stack_fd)
        faulthandler.register(signal.SIGUSR1, stack_fd, all_threads=True)
        _Rank(port).run(channel)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


class _Rank:
    """State of a rank process between its calls: the store's connection, and groups on their way out."""

    def __init__(self, port: int) -> None:
        from torch.distributed import TCPStore

        self._port = port
        self._store = TCPStore(HOST, port, is_master=False, wait_for_workers=False)
        self._closing: list[threading.Thread] = []
        self._environment = dict(os.environ)
        self._folder = os.getcwd()

    def run(self, channel: Connection) -> None:
        while True:
            try:
                call: Call = pickle.loads(channel.recv_bytes())
                reply = self._reply(call, channel)
                sys.stdout.flush()
                sys.stderr.flush()
                channel.send_bytes(pickle.dumps(reply))
                channel.recv_bytes()  # RELEASE
            except EOFError:
                return
            self._leave()
            if not reply.returned:
                for thread in self._closing:
                    thread.join(_LEAVE_S)
                if any(thread.is_alive() for thread in self._closing):
                    return
                channel.send_bytes(LEFT)

    def _reply(self, call: Call, channel: Connection) -> Reply:
        from tests.parcel import pack

        try:
            self._reset(call)
            self._join(call)
            channel.send_bytes(JOINED)
            channel.recv_bytes()  # GO
            fn, args, kwargs, filters = pickle.loads(call.payload)
            with _filtered(filters):
                value = fn(*args, **kwargs)
            return Reply(returned=True, payload=pack(value))
        except BaseException as error:  # also SystemExit: only os._exit and signals may end a rank
            return _raised(error)

    def _reset(self, call: Call) -> None:
        """Undo what an earlier call may have changed for the whole process."""
        import numpy
        import torch

        os.environ.clear()
        os.environ.update(self._environment, **launch_environment(call, self._port))
        os.chdir(self._folder)
        # The first DistributedModelParallel of a process makes a collective: new ranks would wait for older ones.
        if "torchrec.distributed.collective_utils" in sys.modules:
            sys.modules["torchrec.distributed.collective_utils"]._INITIALIZED = False  # type: ignore[attr-defined]
        torch.set_num_threads(1)
        torch.set_grad_enabled(True)
        torch.set_default_dtype(torch.float32)
        seed_torch(SEED)
        numpy.random.seed(SEED)
        random.seed(SEED)

    def _join(self, call: Call) -> None:
        import torch.distributed as dist

        dist.init_process_group(
            "gloo",
            store=dist.PrefixStore(f"call{call.number}", self._store),
            rank=call.rank,
            world_size=call.n,
            timeout=timedelta(seconds=call.timeout_s),
        )

    def _leave(self) -> None:
        """Destroy every group, the slow part on a thread.

        gloo's destructor of a group sleeps 10 to 20 ms for its polling thread, without the GIL. The names and the
        registered groups go at once; the last reference goes on a thread while the next call begins.
        """
        import torch.distributed as dist

        # Models in reference cycles keep groups alive. What is left stays (a compiler's modules, above all): the next
        # collection need not look at it, which would take a tenth of a second per call.
        gc.collect()
        gc.freeze()
        if not dist.is_initialized():
            return
        groups = list(dist.distributed_c10d._world.pg_map)
        dist.destroy_process_group()
        if "torch.distributed.tensor" in sys.modules:  # keeps meshes by their ranks, with the names of these groups
            from torch.distributed.tensor.debug import _clear_sharding_prop_cache

            _clear_sharding_prop_cache()
        self._closing = [thread for thread in self._closing if thread.is_alive()]
        if len(self._closing) >= _MAX_CLOSING:
            self._closing.pop(0).join()
        thread = threading.Thread(target=groups.clear, name="close-groups", daemon=True)
        self._closing.append(thread)
        thread.start()


@contextlib.contextmanager
def _filtered(filters: Sequence[Any]) -> Iterator[None]:
    """Warning filters of the test that makes the call."""
    with warnings.catch_warnings():
        warnings.resetwarnings()
        warnings.filters[:] = filters  # type: ignore[index]  # declared as a Sequence, is a list
        yield


def _raised(error: BaseException) -> Reply:
    from tests.parcel import pack

    frames = error.__traceback__.tb_next if error.__traceback__ else None
    trace = "".join(traceback.format_exception(type(error), error, frames))
    summary = "".join(traceback.format_exception_only(error)).strip()
    try:
        payload = pack(error)
    except Exception:  # anything may go wrong in a foreign __reduce__; the summary still arrives
        payload = b""
    return Reply(returned=False, payload=payload, summary=summary, trace=trace)

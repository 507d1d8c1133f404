"""The RPC world of a job with servers: how processes join it, and join a new one after a process was lost.

RPC agents only know the processes at their start, and a broken connection is not restored. So a process that is
restarted begins a new *generation*: all the others leave their agent and join the new one, through a store that
outlives them. Servers keep their tables.

::

    store    <generation>/<name>    has joined it; a second time: the first one is dead, and the generation over
             <generation>/over      leave it
             end                    the job is done

[Note: no open port] TensorPipe parses data from any sender: an HTTP request ends the process, and an RPC message runs
code in it. All the connections of a generation are made at its start, so agents listen only then. On one host they
listen on an abstract Unix socket, never on a port, and connections that another user made meanwhile are closed.

[Note: no init_rpc] ``init_rpc`` numbers the agents of a process, and the meetings of agents with the same names, and
expects equal numbers on all processes. A restarted process begins at 0. Tried instead: setting torch's counters back,
which changes private state that other code may use; and a backend of our own (``backend_registry.register_backend``),
which takes a store without the number, but after which torch refuses a plain ``init_rpc``, because its
``rpc.BackendType`` stays as before. So the agent is made and started here, as ``init_rpc`` does it. All that
torch agrees on besides is the devices of tensors, and messages have theirs on the CPU.
"""

from __future__ import annotations

import os
import socket
import stat
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from time import monotonic

import torch.distributed as dist
from torch.distributed import autograd, rpc
from torch.futures import Future, wait_all

from shardrec.errors import ConfigError, PeerError

_LOOK_S, _START_S = 0.5, 20.0


def _here() -> None:
    """Called on another process: it is connected, and runs."""


def _sockets() -> Iterator[socket.socket]:
    """The sockets of this process, as copies."""
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            if not stat.S_ISSOCK(os.stat(f"/proc/self/fd/{descriptor}").st_mode):
                continue
            copy = socket.socket(fileno=os.dup(int(descriptor)))
        except OSError:  # it was closed meanwhile
            continue
        with copy:
            yield copy


def _listening() -> set[object]:
    """The addresses at which this process listens."""
    return {sock.getsockname() for sock in _sockets() if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)}


def _close_doors(doors: set[object]) -> None:
    """Stop listening at these addresses, and close connections of other users to them. See [Note: no open port]."""
    for sock in _sockets():
        if sock.getsockname() in doors and sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            sock.shutdown(socket.SHUT_RDWR)
    for sock in _sockets():
        if sock.family == socket.AF_UNIX and sock.getsockname() in doors:
            _, user, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
            if user != os.getuid():
                sock.shutdown(socket.SHUT_RDWR)


class RpcWorld:
    """The trainers and servers of one job, from the view of one process.

    RPC runs whatever function a message names, and unpickles what it is given: it trusts every connected process.
    Agents listen only until all are connected: on one host on a Unix socket, for processes of this user. Between hosts
    on a TCP port of ``interface``, which must be on a network that no other user reaches.

    Args:
        store: a store that all processes share and that outlives each of them, such as a ``FileStore``.
        trainers: number of trainers, ``trainer0`` and on.
        servers: names of the servers. A number stands for ``server0``, ``server1`` and so on.
        name: of this process.
        timeout_s: seconds that the other processes may take to join.
        interface: network interface that RPC listens on. ``"lo"`` for processes of one host, which need none.
        threads: of the RPC agent.

    Raises:
        ConfigError: if the job lacks a process of this name.
    """

    def __init__(
        self,
        store: dist.Store,
        *,
        trainers: int,
        servers: int | str | list[str],
        name: str,
        timeout_s: float = 300.0,
        interface: str = "lo",
        threads: int = 8,
    ) -> None:
        if isinstance(servers, int):
            servers = [f"server{number}" for number in range(servers)]
        self.servers = [servers] if isinstance(servers, str) else list(servers)
        self.names = [f"trainer{number}" for number in range(trainers)] + self.servers
        if name not in self.names or len(set(self.names)) < len(self.names):
            raise ConfigError(f"this process is {name!r}, and the job has {', '.join(self.names)}. Each name once")
        self.name = name
        self._store = store
        self._timeout_s = timeout_s
        self._threads = threads
        self._generation = 0
        self._trainers = self.names[:trainers]
        os.environ.setdefault("TP_SOCKET_IFNAME", interface)

    def join(self) -> None:
        """Join the RPC world. Blocks until all processes have joined.

        Raises:
            PeerError: if some processes did not join in time, or the job has ended.
        """
        if not self._join():
            raise PeerError("the job has ended. Start another one with a store of its own", waited_for="start")

    def leave(self) -> None:
        """End this process's agent. Calls in progress fail on the other processes."""
        with suppress(RuntimeError):  # it does not exist
            rpc.shutdown(graceful=False)

    def rejoin(self) -> None:
        """After a process was lost: leave, have all others leave, and join again.

        Raises:
            PeerError: if some processes did not join in time.
        """
        self._end_generation()
        self.leave()
        self.join()

    def end(self) -> None:
        """The job is done: servers stop."""
        self._store.set("shardrec/end", "1")
        self._end_generation()

    def serve(self) -> None:
        """Serve calls, in one generation after the other, until a trainer ends the job.

        A generation also ends when all of its trainers are gone: new ones may be started in their place.

        Raises:
            PeerError: if the other processes did not join in time.
        """
        while self._join():
            self._wait_until_over()
            self.leave()

    @contextmanager
    def joined(self) -> Iterator[None]:
        """Joined inside the block."""
        self.join()
        try:
            yield
        finally:
            self.leave()

    def _join(self) -> bool:
        """Join a generation that all others join. False if the job has ended."""
        end = monotonic() + self._timeout_s
        while not self._has("shardrec/end"):
            while self._is_over():
                self._generation += 1
            fault = self._meet(end) or self._start_agent()
            if not fault:
                return True
            self._end_generation()
            if monotonic() > end and not self._has("shardrec/end"):
                raise PeerError(fault, waited_for="start")
        return False

    def _meet(self, end: float) -> str:
        """Come to the generation and wait for the others, until it is over or ``end``. Who is missing, or ""."""
        is_first = self._store.add(self._key(self.name), 1) == 1
        while is_first and monotonic() < end and not self._is_over() and not self._has("shardrec/end"):
            if self._wait([self._key(name) for name in self.names], _LOOK_S):
                return ""
        missing = [name for name in self.names if not self._has(self._key(name))] or [self.name]
        return (
            f"{', '.join(missing)} did not come within {self._timeout_s:g} s. Start every process of the job, with the "
            "same store"
        )

    def _start_agent(self) -> str:
        """Start this process's agent and connect it with the others. Why it could not, or ""."""
        options = rpc.TensorPipeRpcBackendOptions(
            num_worker_threads=self._threads,
            rpc_timeout=_START_S,
            # With "uv" each agent has a TCP port. The channel that is left out would have 16 more.
            _transports=["shm"] if os.environ["TP_SOCKET_IFNAME"] == "lo" else ["shm", "uv"],
            _channels=["cma", "basic"],
        )
        rank, size = self.names.index(self.name), len(self.names)
        store = dist.PrefixStore(f"shardrec/{self._generation}/agent", self._store)
        store.set_timeout(timedelta(seconds=_START_S))
        before = _listening()
        try:
            autograd._init(rank)
            rpc._set_profiler_node_id(rank)
            rpc.api._init_rpc_states(rpc.TensorPipeAgent(store, self.name, rank, size, options, {}, []))
            wait_all([rpc.rpc_async(name, _here) for name in self.names])  # also with itself: it may call itself
            store.set(f"connected/{self.name}", "1")
            store.wait([f"connected/{name}" for name in self.names])
        except RuntimeError as error:  # one died on the way
            self.leave()
            return f"the processes could not connect within {self._timeout_s:g} s ({error}). Start the job again"
        _close_doors(_listening() - before)
        return ""

    def _wait_until_over(self) -> None:
        """Until the generation is over. If no trainer is left, say so to all."""
        answered: Future[None] = Future()
        answered.set_result(None)
        calls = dict.fromkeys(self._trainers, answered)
        while calls and not self._wait([self._key("over")], _LOOK_S):
            for name in [name for name, call in calls.items() if call.done()]:
                try:
                    calls[name].wait()
                    calls[name] = rpc.rpc_async(name, _here, timeout=self._timeout_s)
                except RuntimeError:  # it has ended, or is stopped
                    del calls[name]
        self._end_generation()

    def _key(self, what: str) -> str:
        return f"shardrec/{self._generation}/{what}"

    def _has(self, key: str) -> bool:
        return bool(self._store.check([key]))

    def _is_over(self) -> bool:
        return self._has(self._key("over"))

    def _end_generation(self) -> None:
        self._store.set(self._key("over"), "1")

    def _wait(self, keys: list[str], seconds: float) -> bool:
        try:
            self._store.wait(keys, timedelta(seconds=seconds))
        except dist.DistNetworkError as error:
            raise PeerError(f"the store that the job shares is gone ({error}). Start the job again") from error
        except RuntimeError:  # a FileStore's time-out lacks a class of its own
            return False
        return True

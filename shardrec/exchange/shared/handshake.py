"""Finds the ranks that share a host, and connects them."""

from __future__ import annotations

import contextlib
import os
import secrets
import selectors
import socket
import struct
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from time import monotonic
from typing import Any

import torch.distributed as dist

from shardrec.exchange.peers import peers
from shardrec.exchange.safe_pickle import gather
from shardrec.exchange.shared.channel import Channel

_BACKLOG = 512
_HELLO = struct.Struct("=i16s")
_CREDENTIALS = struct.Struct("3i")
_CONNECT_S = 30.0
_BUFFER_BYTES = 1 << 18


def host_identity() -> str:
    """A text that is equal for processes that can share memory and sockets; "" if that is impossible (or not Linux)."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        network = os.stat("/proc/self/ns/net")
        os.close(os.memfd_create("shardrec-probe"))
    except (OSError, AttributeError):
        return ""
    return f"{boot} {network.st_dev}:{network.st_ino} {os.getuid()}"


def connect(
    group: dist.ProcessGroup,
    timeout_s: Callable[[], float],
    *,
    identity: Callable[[], str] = host_identity,
) -> Channel | None:
    """Connect the ranks on each host. Every rank of ``group`` calls this.

    Args:
        group: with a backend for the CPU.
        timeout_s: returns the time limit of the channel's waits in seconds.
        identity: a text that is equal on the ranks of one host; "" for a rank that wants no connection.

    Returns:
        The channel to this host's other ranks. None on every rank if some rank could not connect, or if no host has two
        ranks.
    """
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    secret = secrets.token_bytes(16)
    listener, address = _listen()
    try:
        addresses: list[tuple[str, str, bytes]] = _gather((identity() if listener else "", address, secret), group)
        hosts = [host for host, _, _ in addresses]
        if not all(hosts) or len(set(hosts)) == world_size:
            return None
        peers = [other for other in range(world_size) if hosts[other] == hosts[rank] and other != rank]
        assert listener is not None, "a rank without a socket lacks an identity"
        sockets, fault = _meet(rank, peers, addresses, listener)
        faults: list[str] = _gather(fault, group)
    finally:
        if listener is not None:
            listener.close()
    if any(faults):
        for connection in sockets.values():
            connection.close()
        warnings.warn(
            "the ranks of this host could not connect to share memory, and exchange through the process group, which "
            f"is slower: {'; '.join(filter(None, faults))}. Start the ranks again, or shard with transport='group'",
            RuntimeWarning,
            stacklevel=2,
        )
        return None
    return Channel(group, sockets, timeout_s)


def _listen() -> tuple[socket.socket | None, str]:
    # An abstract address: it is gone with the process.
    address = f"\0shardrec-{secrets.token_hex(8)}"
    try:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listener.bind(address)
        listener.listen(_BACKLOG)
        listener.settimeout(_CONNECT_S)
    except OSError:
        return None, ""
    return listener, address


def _meet(
    rank: int, peers: Sequence[int], addresses: Sequence[tuple[str, str, bytes]], listener: socket.socket
) -> tuple[dict[int, socket.socket], str]:
    """A socket per peer, and the faults."""
    sockets: dict[int, socket.socket] = {}
    try:
        for peer in peers:
            if peer < rank:
                connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                sockets[peer] = connection
                connection.settimeout(_CONNECT_S)
                connection.connect(addresses[peer][1])
                connection.send(_HELLO.pack(rank, addresses[peer][2]))
        _accept(sockets, {peer for peer in peers if peer > rank}, listener, addresses[rank][2])
        for connection in sockets.values():
            with contextlib.suppress(OSError):
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
    except OSError as error:
        return sockets, f"rank {rank}: {error}"
    return sockets, ""


def _accept(sockets: dict[int, socket.socket], peers: set[int], listener: socket.socket, secret: bytes) -> None:
    """Accept the peers' connections. Any process of the host may connect; if it sends nothing, others do not wait."""
    end = monotonic() + _CONNECT_S
    with contextlib.ExitStack() as strangers, selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        while missing := peers - sockets.keys():
            ready = selector.select(end - monotonic())
            if not ready and monotonic() >= end:
                raise TimeoutError(f"rank(s) {sorted(missing)} did not connect within {_CONNECT_S:g} s")
            for key, _ in ready:
                if key.fileobj is listener:
                    connection, _ = listener.accept()
                    connection.setblocking(False)
                    strangers.callback(connection.close)
                    selector.register(connection, selectors.EVENT_READ)
                    continue
                assert isinstance(key.fileobj, socket.socket), "only sockets are registered"
                selector.unregister(key.fileobj)
                peer = _hello(key.fileobj, secret)
                if peer in missing and peer not in sockets:
                    sockets[peer] = key.fileobj.dup()
                    sockets[peer].settimeout(_CONNECT_S)


def _hello(stranger: socket.socket, secret: bytes) -> int | None:
    """The rank at the other end of a connection after its message has arrived, if it has this user id and the
    secret."""
    credentials = stranger.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    try:
        peer, told = _HELLO.unpack(stranger.recv(_HELLO.size).ljust(_HELLO.size))
    except OSError:
        return None
    known = _CREDENTIALS.unpack(credentials)[1] == os.getuid() and secrets.compare_digest(told, secret)
    return int(peer) if known else None


def _gather(value: Any, group: dist.ProcessGroup) -> list[Any]:
    with peers(group, "start of shared memory"):
        return gather(value, group)

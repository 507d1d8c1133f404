"""Which ranks share a host, and their connections."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist

from shardrec.exchange.peers import peers
from shardrec.exchange.shared.channel import Channel

T = TypeVar("T")

__all__ = ["connect", "host_identity"]

_BACKLOG = 512
_HELLO = struct.Struct("=i16s")
_CREDENTIALS = struct.Struct("3i")
_CONNECT_S = 30.0
_BUFFER_BYTES = 1 << 18


def host_identity() -> str:
    """Equal for processes that can share memory and sockets; "" where that cannot be (or is not Linux)."""
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
    """Connect the ranks of each host; every rank of ``group`` calls this.

    Args:
        group: with a backend for the CPU.
        timeout_s: gives the limit of the channel's waits.
        identity: what ranks of one host have in common; "" for a rank that wants no connection.

    Returns:
        The channel to this host's other ranks; None on every rank if it could not be made on some, or if no host has
        two of them.
    """
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    secret = secrets.token_bytes(16)
    listener, address = _listen()
    try:
        found: list[tuple[str, str, bytes]] = _gather((identity() if listener else "", address, secret), group)
        hosts = [host for host, _, _ in found]
        if not all(hosts) or len(set(hosts)) == world_size:
            return None
        peers = [other for other in range(world_size) if hosts[other] == hosts[rank] and other != rank]
        assert listener is not None, "a rank without a socket has no identity"
        sockets, fault = _meet(rank, peers, found, listener)
        faults: list[str] = _gather(fault, group)
    finally:
        if listener is not None:
            listener.close()
    if any(faults):
        for one in sockets.values():
            one.close()
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
    rank: int, peers: Sequence[int], found: Sequence[tuple[str, str, bytes]], listener: socket.socket
) -> tuple[dict[int, socket.socket], str]:
    """A socket per peer, and what went wrong."""
    sockets: dict[int, socket.socket] = {}
    try:
        for peer in peers:
            if peer < rank:
                one = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                one.settimeout(_CONNECT_S)
                one.connect(found[peer][1])
                one.send(_HELLO.pack(rank, found[peer][2]))
                sockets[peer] = one
        while len(sockets) < len(peers):
            one, _ = listener.accept()
            one.settimeout(_CONNECT_S)
            owner = _CREDENTIALS.unpack(one.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))[1]
            peer, secret = _HELLO.unpack(one.recv(_HELLO.size).ljust(_HELLO.size))
            if owner == os.getuid() and secret == found[rank][2] and peer in peers and peer not in sockets:
                sockets[peer] = one
            else:
                one.close()
        for one in sockets.values():
            with contextlib.suppress(OSError):
                one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
    except OSError as error:
        return sockets, f"rank {rank}: {error}"
    return sockets, ""


def _gather(value: T, group: dist.ProcessGroup) -> list[T]:
    found: list[T | None] = [None] * dist.get_world_size(group)
    with peers(group, "start of the exchange through shared memory"):
        dist.all_gather_object(found, value, group=group)
    return [one for one in found if one is not None]

"""Small messages between the ranks of a host, over Unix sockets.

A message says what a rank has written to its windows, and for which exchange. Unlike flags in shared memory, a socket
orders memory accesses on every processor, waits without spinning and with a time limit, and reports the end of a rank
that dies immediately.
"""

from __future__ import annotations

import contextlib
import marshal
import os
import select
import socket
from array import array
from collections import deque
from collections.abc import Callable, Mapping
from threading import RLock
from typing import Any, NoReturn
from weakref import WeakSet

import torch.distributed as dist

from shardrec.errors import PeerError
from shardrec.exchange.peers import peer_error
from shardrec.exchange.shared.windows import Bytes, InUse, PeerWindows

Key = tuple[int, int]
"""Number of an exchange, and which of its messages: 0 forward, then 1, 2, ... for its ways back."""

Message = tuple[Any, ...]
"""Plain data, as :mod:`marshal` takes it."""

_WINDOW = -1  # instead of an exchange's number: a new window, with its descriptor
_FAULT = -2  # instead of an exchange's number: what happened to a rank, and how many exchanges it had begun
_WENT_ON = (
    "has begun its next forward without the backward that other ranks are in: its loss reaches no output of the "
    "sharded model, or it did not call backward. Give every rank's loss a part of the model's output, such as "
    "output.sum() * 0"
)
_MAX_BYTES = 1 << 16
_DESCRIPTOR_BYTES = socket.CMSG_LEN(array("i").itemsize)  # of a message with a window
_MAX_RELEASED = 4096
_MAX_FAULT = 4000


_OPEN: WeakSet[Channel] = WeakSet()


def _close_in_child() -> None:
    """Close the sockets in a forked child (a data loader's worker), because their copies would hide this rank's end."""
    for channel in list(_OPEN):
        channel.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)


class Channel:
    """Connections to the other ranks of this host.

    Args:
        group: of the ranks.
        sockets: per other rank of the host, a connected SEQPACKET socket.
        timeout_s: returns the time limit for a message in seconds.

    Attributes:
        peers: the other ranks of the host, ascending.
        lock: held by whoever sends or receives.
        windows: per peer, the windows that it has announced.
    """

    def __init__(
        self, group: dist.ProcessGroup, sockets: Mapping[int, socket.socket], timeout_s: Callable[[], float]
    ) -> None:
        self.peers = sorted(sockets)
        self.lock = RLock()
        self._group = group
        self._failure: PeerError | None = None
        self._sockets = dict(sockets)
        self._timeout_s = timeout_s
        self._inbox: dict[int, dict[Key, Message]] = {peer: {} for peer in sockets}
        self._forgotten: dict[int, dict[Key, Callable[[Message], list[int]]]] = {peer: {} for peer in sockets}
        self.windows = {peer: PeerWindows() for peer in sockets}
        self._reported: dict[int, tuple[int, int, str]] = {}  # by peer: exchanges begun, global rank, its fault
        self._begun, self._peer_begun = 0, dict.fromkeys(sockets, 0)  # numbers of exchanges
        self._released: dict[int, deque[InUse | int]] = {
            peer: deque() for peer in sockets
        }  # at any time, by any thread
        self._borrowed: dict[int, InUse] = {}  # by identity
        self._pollers = {peer: select.poll() for peer in sockets}
        for peer, connection in sockets.items():
            connection.settimeout(None)
            self._pollers[peer].register(connection, select.POLLIN)
        self._returned: dict[int, list[int]] = {peer: [] for peer in sockets}
        _OPEN.add(self)

    def release(self, peer: int, token: int) -> None:
        """Tell ``peer``, with the next message, that a region it lent is free again."""
        self._released[peer].append(token)

    def release_after(self, peer: int, token: int, memory: Bytes) -> None:
        """:meth:`release` when nothing refers to a region's memory any more."""
        borrowed = InUse(memory, self._released[peer].append)
        borrowed.place = token
        self._borrowed[id(borrowed)] = borrowed

    def returned(self, peer: int) -> list[int]:
        """The tokens that ``peer`` has released since the last call."""
        numbers, self._returned[peer] = self._returned[peer], []
        return numbers

    def announce(self, number: int, size: int, descriptor: int) -> None:
        """Send a new window to all peers."""
        data = marshal.dumps((_WINDOW, 0, (), number, size))
        for peer, connection in self._sockets.items():
            try:
                socket.send_fds(connection, [data], [descriptor])
            except OSError as error:
                self._fail(peer, "window", error)

    def send(self, peer: int, key: Key, what: str, message: Message) -> None:
        """Send a message.

        Raises:
            PeerError: if ``peer`` is gone.
        """
        self._begun = max(self._begun, key[0] + 1)
        waiting, released = self._released[peer], list[int]()
        while waiting and len(released) < _MAX_RELEASED:
            region = waiting.popleft()
            if isinstance(region, InUse):
                del self._borrowed[id(region)]
                region = region.place
            released.append(region)
        data = marshal.dumps((*key, released, what, *message))
        try:
            connection = self._sockets[peer]
            try:
                connection.send(data, socket.MSG_DONTWAIT)
            except BlockingIOError:
                self._wait(peer, select.POLLOUT)
                connection.send(data)
        except (OSError, KeyError) as error:
            self._fail(peer, what, error)

    def report_failure(self, begun: int, fault: str, rank: int | None = None) -> None:
        """Tell the peers that are left that this rank does not continue the first ``begun`` exchanges.

        Args:
            begun: number of exchanges.
            fault: why, as a predicate.
            rank: that is at fault, in the default group. Default: this rank.
        """
        data = marshal.dumps((_FAULT, 0, (), begun, dist.get_rank() if rank is None else rank, fault[:_MAX_FAULT]))
        for connection in self._sockets.values():
            with contextlib.suppress(OSError):
                connection.send(data)

    def raise_reported_failure(self, begun: int, what: str) -> None:
        """Raise the failure that a peer has reported that had begun at least ``begun`` exchanges, without waiting.

        Raises:
            PeerError: naming the rank and its fault.
        """
        for peer, connection in self._sockets.items():
            # A peer that has ended may have sent the message that this rank waits for.
            while self._pollers[peer].poll(0) and connection.recv(1, socket.MSG_PEEK):
                self._take(peer, what)
            self._raise_reported_failure(peer, begun, what)

    def _raise_reported_failure(self, peer: int, begun: int, what: str) -> None:
        reported, rank, fault = self._reported.get(peer, (-1, 0, ""))
        if reported >= begun:
            # This rank does not continue them either. Others may wait for it before they hear of the fault.
            self.report_failure(reported, fault, rank)
            raise PeerError(
                f"rank {dist.get_rank()} of {dist.get_world_size()}: the {what} failed, because rank {rank} {fault}. "
                "Fix the cause and restart all ranks",
                ranks=(rank,),
                waited_for=what,
            )

    def receive(self, peer: int, key: Key, what: str) -> Message:
        """Wait for a message.

        Raises:
            PeerError: if ``peer`` is gone, does not answer in time, is at another exchange, has told that it does not
                continue, or has begun a further exchange instead of a way back.
        """
        inbox = self._inbox[peer]
        while key not in inbox:
            if key[1] and self._peer_begun[peer] > self._begun:
                # It would have sent its part first: ranks make the same exchanges in the same order.
                self._reported[peer] = self._peer_begun[peer], dist.get_global_rank(self._group, peer), _WENT_ON
            if self._reported:
                self._raise_reported_failure(peer, key[0] + 1, f"{what} exchange")
            self._take(peer, what)
        sent, *body = inbox.pop(key)
        if sent != what:
            self.close()
            raise PeerError(
                f"rank {self._group.rank()} of {self._group.size()}: waits for the {what} exchange and rank {peer} "
                f"made the {sent} exchange. The ranks issued different collectives: every rank must call the same "
                "modules in the same order",
                waited_for=f"{what} exchange",
            )
        return tuple(body)

    def _take(self, peer: int, what: str) -> None:
        """Wait for the next message of a peer, whatever it is."""
        try:
            connection = self._sockets[peer]
            try:
                data, descriptors, _, _ = connection.recvmsg(_MAX_BYTES, _DESCRIPTOR_BYTES, socket.MSG_DONTWAIT)
            except BlockingIOError:
                self._wait(peer, select.POLLIN)
                data, descriptors, _, _ = connection.recvmsg(_MAX_BYTES, _DESCRIPTOR_BYTES)
        except (OSError, KeyError) as error:
            self._fail(peer, what, error)
        if not data:
            self._fail(peer, what, None)
        number, way, released, *message = marshal.loads(data)
        if number == _WINDOW:
            index, size = message
            self.windows[peer].add(index, size, array("i", descriptors[0][2])[0])
        elif number == _FAULT:
            begun, rank, fault = message
            self._reported[peer] = begun, rank, fault
        else:
            self._returned[peer].extend(released)
            self._peer_begun[peer] = max(self._peer_begun[peer], number + 1)
            self._inbox[peer][number, way] = tuple(message)
            if (number, way) in self._forgotten[peer]:
                self.forget(peer, (number, way), self._forgotten[peer].pop((number, way)))

    def _wait(self, peer: int, event: int) -> None:
        """Wait until a peer's socket can be read or written.

        Raises:
            TimeoutError: after the time limit.
        """
        poller = self._pollers[peer]
        poller.modify(self._sockets[peer], event)
        try:
            if not poller.poll(1000 * self._timeout_s()):
                raise TimeoutError
        finally:
            poller.modify(self._sockets[peer], select.POLLIN)

    def forget(self, peer: int, key: Key, tokens: Callable[[Message], list[int]]) -> None:
        """Do not wait for a message: release its regions, now or when it arrives.

        Args:
            peer: who sends it.
            key: of the message.
            tokens: gives the tokens in it.
        """
        message = self._inbox[peer].pop(key, None)
        if message is None:
            self._forgotten[peer][key] = tokens
            return
        for token in tokens(message[1:]):
            self.release(peer, token)

    def close(self) -> None:
        """End the connections. The other ranks of the host notice immediately."""
        for connection in self._sockets.values():
            with contextlib.suppress(OSError):
                connection.close()
        self._sockets = {}

    def _fail(self, peer: int, what: str, error: Exception | None) -> NoReturn:
        if self._failure is not None:
            first = str(self._failure)
            raise PeerError(f"the {what} exchange cannot be made after a failure: {first}", self._failure.ranks, what)
        cause: Exception | str = error or "it has closed its connection"
        if isinstance(error, TimeoutError):
            cause = f"the process group's timeout of {self._timeout_s():g} s is over"
        # The ranks that wait for this one learn of it now, and not when its process ends.
        self.close()
        self._failure = peer_error(self._group, f"{what} exchange", cause, [peer])
        raise self._failure from error

    def __del__(self) -> None:
        self.close()

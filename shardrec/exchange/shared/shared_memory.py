"""The exchanges of a step between ranks of one host, through their windows.

::

    send        each part is written once into a window of its sender, and read there by its receiver: there is no
                further copy, and parts that a rank keeps are not moved. Parts that were written into allocated
                memory of a window are not copied at all
    way back    each rank lends the memory for the gradient of its sent rows. The others write their parts directly
                into it, so that it is complete and contiguous when the last of them says so

Small parts travel in the message itself, and headers with the ids that they announce. Ranks on other hosts are reached
by the process group's all-to-all, in the same call.

[Note: no rank waits to send]
A sender takes a free region of its windows, and adds a window if none is free. A region is returned when no tensor of
the receiver refers to it any more. Memory is bounded by the live regions: about one forward's parts and their
gradients.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from itertools import accumulate, chain
from operator import attrgetter
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from shardrec.errors import PeerError
from shardrec.exchange.collectives import Collectives, FunctionalCollectives, Later, Pending, StreamSizes, joined
from shardrec.exchange.flight_record import flight_record
from shardrec.exchange.shared.channel import Channel, Message
from shardrec.exchange.shared.windows import Arena, Bytes, Region, as_tensor

_INLINE_BYTES = 4096
_NBYTES = attrgetter("nbytes")
_NO_WORDS = torch.empty(0, dtype=torch.int32)


class SharedCollectives(Collectives):
    """All-to-alls through shared memory between ranks that share a host.

    Attributes:
        group_name: of the process group.
        arena: this rank's windows.
    """

    def __init__(self, base: FunctionalCollectives, channel: Channel) -> None:
        self.rank = base.rank
        self.world_size = base.world_size
        self.group_name = base.group_name
        self.base = base
        self.channel = channel
        self.arena = Arena(channel.announce)
        self.peers = channel.peers
        near = {self.rank, *channel.peers}
        self.far = [rank for rank in range(self.world_size) if rank not in near]
        self._number = 0
        self._token = 0
        self._lent: dict[int, list[Bytes | Tensor]] = {}  # by token, once for each peer that has not released it
        self.dropped: deque[int] = deque()  # numbers of exchanges that were not waited for. Filled by finalizers

    def send(
        self, parts: Sequence[Sequence[Tensor]], receive: Sequence[int], what: str, streams: StreamSizes | None = None
    ) -> _SharedPending:
        if torch.autograd.profiler._is_profiler_enabled:
            with _counted():
                return self._send(parts, receive, what, streams)
        return self._send(parts, receive, what, streams)

    def _send(
        self, parts: Sequence[Sequence[Tensor]], receive: Sequence[int], what: str, streams: StreamSizes | None
    ) -> _SharedPending:
        recorded = flight_record().begin(what, sum(receive) * parts[self.rank][0].element_size())
        with self.channel.lock:
            number = self._next_number()
            way_back = None if streams is None else _SharedWayBack(self, number, streams)
            for peer in self.peers:
                offers = () if way_back is None else way_back.offer(peer)
                self.channel.send(peer, (number, 0), what, (self._outgoing(parts[peer]), offers))
            far = self.send_far(dict(enumerate(parts)), receive, what) if self.far else None
        return _SharedPending(self, number, joined(parts[self.rank]), receive, what, far, way_back, recorded)

    def _next_number(self) -> int:
        """Of an exchange that begins, after letting go of those that were never waited for."""
        while self.dropped:
            number = self.dropped.popleft()
            for peer in self.peers:
                self.channel.forget(peer, (number, 0), _tokens)
        self._number += 1
        return self._number - 1

    def header_with_ids(
        self, rows: Sequence[list[int]], columns: int, parts: Sequence[Sequence[Tensor]]
    ) -> tuple[list[list[int]], Callable[[Sequence[int]], Pending]]:
        """As :meth:`Collectives.header_with_ids`; here a rank need not know a size before it receives, so that header
        and payload are one message."""
        if self.far:
            return super().header_with_ids(rows, columns, parts)
        if torch.autograd.profiler._is_profiler_enabled:
            with _counted():
                return self._header_with_ids(rows, parts)
        return self._header_with_ids(rows, parts)

    def _header_with_ids(
        self, rows: Sequence[list[int]], parts: Sequence[Sequence[Tensor]]
    ) -> tuple[list[list[int]], Callable[[Sequence[int]], Pending]]:
        recorded = flight_record().begin("header", 8 * len(rows) * len(rows[0]))
        received, words = list(rows), list[Tensor]()
        with self.channel.lock:
            number = self._next_number()
            for peer in self.peers:
                outgoing = self._outgoing(parts[peer]) if parts[peer] else b""
                self.channel.send(peer, (number, 0), "header", (rows[peer], outgoing))
            for rank in range(self.world_size):
                if rank == self.rank:
                    words.append(joined(parts[rank]) if parts[rank] else _NO_WORDS)
                else:
                    received[rank], outgoing = self.channel.receive(rank, (number, 0), "header")
                    words.append(self.arrived(rank, outgoing, torch.int32))
        flight_record().end(recorded)
        return received, partial(self._words, words)

    def _words(self, words: list[Tensor], receive: Sequence[int]) -> Pending:
        """The payload, which has come with the header."""
        for rank, (came, size) in enumerate(zip(words, receive, strict=True)):
            if came.numel() != size:
                self.refuse(rank, came.nbytes, 4 * size, "payload")
        return Later(lambda: words)

    def header(self, rows: Tensor) -> Tensor:
        if self.far:
            return super().header(rows)
        columns = rows.size(1)
        received, _ = self.header_with_ids(rows.tolist(), columns, [()] * self.world_size)
        return torch.tensor([row + [0] * (columns - len(row)) for row in received])

    def report_failure(self, fault: str) -> None:
        with self.channel.lock:
            self.channel.report_failure(self._number, fault)

    def raise_reported_failure(self, what: str) -> None:
        with self.channel.lock:
            self.channel.raise_reported_failure(self._number, what)

    def allocate(self, numel: int, device: torch.device) -> Tensor:
        if not numel or device.type != "cpu":
            return super().allocate(numel, device)
        with self.channel.lock:
            return as_tensor(self._region(4 * numel, may_be_sent=True).bytes, torch.float32)

    def lend(self, size: int, borrowers: int) -> tuple[int, Region]:
        """Lend a region of the windows, kept until ``borrowers`` peers have released its token."""
        region = self._region(size)
        return self._token_of(region.bytes, borrowers), region

    def _region(self, size: int, *, may_be_sent: bool = False) -> Region:
        """A free region, after taking back those that peers have released."""
        for peer in self.peers:
            for token in self.channel.returned(peer):
                left = self._lent[token]
                left.pop()
                if not left:
                    del self._lent[token]
        return self.arena.lend(size, may_be_sent=may_be_sent)

    def _token_of(self, memory: Bytes | Tensor, borrowers: int) -> int:
        self._token += 1
        self._lent[self._token] = [memory] * borrowers
        return self._token

    def borrowed(self, peer: int, token: int, window: int, offset: int, size: int) -> Bytes:
        """Memory of a peer, released when no tensor refers to it any more."""
        if not size:
            self.channel.release(peer, token)
            return np.empty(0, dtype=np.uint8)
        memory = self.channel.windows[peer].bytes(window, offset, size)
        self.channel.release_after(peer, token, memory)
        return memory

    def _outgoing(self, parts: Sequence[Tensor]) -> Any:
        """Bytes, or (token, window, offset, size)."""
        size = sum(map(_NBYTES, parts))
        if size <= _INLINE_BYTES:
            return torch.cat(list(parts)).view(torch.uint8).numpy().tobytes()
        if len(parts) == 1:
            address = parts[0].untyped_storage().data_ptr()
            lent = self.arena.lent.get(address)
            if lent is not None and lent.may_be_sent:
                window, offset, _ = lent.place
                return self._token_of(parts[0], 1), window, offset + parts[0].data_ptr() - address, size
        token, region = self.lend(size, 1)
        torch.cat(list(parts), out=as_tensor(region.bytes, parts[0].dtype))
        return token, region.window, region.offset, size

    def arrived(self, peer: int, outgoing: Any, dtype: torch.dtype) -> Tensor:
        """What :meth:`_outgoing` of a peer has sent."""
        if isinstance(outgoing, bytes):
            return torch.frombuffer(bytearray(outgoing), dtype=dtype) if outgoing else torch.empty(0, dtype=dtype)
        return as_tensor(self.borrowed(peer, *outgoing), dtype)

    def refuse(self, peer: int, came: int, size: int, what: str) -> NoReturn:
        """Raise for a message of another size than this rank expects."""
        raise PeerError(
            f"rank {self.rank}: {came} bytes came from rank {peer} in the {what} exchange and {size} were expected. "
            "The ranks issued different collectives"
        )

    def send_far(self, parts: Mapping[int, Sequence[Tensor]], receive: Sequence[int], what: str) -> Pending | None:
        """Issue the process group's all-to-all with the ranks on other hosts. None without any."""
        if not self.far:
            return None
        # The parts are copied, because a caller of this method may write to them when it returns.
        nothing = parts[self.far[0]][0].new_empty(0)
        out: list[Sequence[Tensor]] = [[nothing]] * self.world_size
        into = [0] * self.world_size
        for rank in self.far:
            out[rank], into[rank] = parts[rank], receive[rank]
        return self.base.send(out, into, what)


class _SharedPending:
    """Parts being received from peers, from this rank itself, and from ranks of other hosts.

    Args:
        collectives: the collectives that made the exchange.
        number: of the exchange.
        own_part: what this rank keeps.
        receive: elements from each rank.
        what: the exchange's name.
        far: the parts of ranks on other hosts.
        way_back: of gradients.
        recorded: number in the flight record.
    """

    __slots__ = ("_collectives", "_far", "_number", "_own_part", "_receive", "_recorded", "_what", "way_back")

    def __init__(
        self,
        collectives: SharedCollectives,
        number: int,
        own_part: Tensor,
        receive: Sequence[int],
        what: str,
        far: Pending | None,
        way_back: _SharedWayBack | None,
        recorded: int,
    ) -> None:
        self._collectives, self._number, self._receive, self._what = collectives, number, receive, what
        self._own_part: Tensor | None = own_part
        self._far, self.way_back, self._recorded = far, way_back, recorded

    def __del__(self) -> None:
        if self._own_part is not None:
            self._collectives.dropped.append(self._number)

    def wait(self) -> list[Tensor]:
        collectives, own_part, key = self._collectives, self._own_part, (self._number, 0)
        assert own_part is not None, "an exchange is waited for once"
        parts = [own_part] * collectives.world_size
        with collectives.channel.lock:
            for peer in collectives.peers:
                outgoing, offers = collectives.channel.receive(peer, key, self._what)
                size = self._receive[peer] * own_part.element_size()
                came = len(outgoing) if isinstance(outgoing, bytes) else outgoing[3]
                if came != size:
                    collectives.refuse(peer, came, size, self._what)
                parts[peer] = collectives.arrived(peer, outgoing, own_part.dtype)
                if self.way_back is not None:
                    self.way_back.offered(peer, offers)
        if self._far is not None:
            done = self._far.wait()
            for rank in collectives.far:
                parts[rank] = done[rank]
        self._own_part = None
        flight_record().end(self._recorded)
        return parts


class _SharedWayBack:
    """Gradients that are written directly to the memory where they are needed."""

    def __init__(self, collectives: SharedCollectives, number: int, streams: StreamSizes) -> None:
        self._collectives = collectives
        self._number = number
        self._streams = streams
        self._turn = 1
        self._recorded = 0  # in the flight record
        self._landing: list[Tensor] = []
        self._regions: list[tuple[int, Region] | None] = []
        self._starts: list[list[int]] = []  # per stream, the start of each rank's part
        self._views: dict[int, list[Tensor]] = {}  # per rank, where to write each stream's gradient
        self._far_sent: Pending | None = None
        self._lend()

    def _lend(self) -> None:
        """Memory for the streams' gradients, rank after rank."""
        for sizes in zip(*self._streams.out, strict=True):
            elements = sum(sizes)
            lent = self._collectives.lend(4 * elements, len(self._collectives.peers)) if elements else None
            self._regions.append(lent)
            self._starts.append(list(accumulate(sizes, initial=0)))
            self._landing.append(
                torch.empty(0, dtype=torch.float32) if lent is None else as_tensor(lent[1].bytes, torch.float32)
            )

    def offer(self, peer: int) -> Message:
        """Per stream, (token, window, offset, bytes) of the peer's part of the memory lent; () for none."""
        messages: list[Message] = []
        for stream, lent in enumerate(self._regions):
            if lent is None:
                messages.append(())
                continue
            token, region = lent
            start, end = self._starts[stream][peer : peer + 2]
            messages.append((token, region.window, region.offset + 4 * start, 4 * (end - start)))
        return tuple(messages)

    def offered(self, peer: int, offers: Message) -> None:
        """Map the memory that a peer lends."""
        theirs: list[Tensor] = []
        for stream, offer in enumerate(offers):
            size = 4 * self._streams.into[peer][stream]
            if (offer[3] if offer else 0) != size:
                raise PeerError(
                    f"rank {self._collectives.rank}: rank {peer} lends {offer[3] if offer else 0} bytes for a gradient "
                    f"of {size}. The ranks issued different collectives"
                )
            memory = self._collectives.borrowed(peer, *offer) if offer else None
            theirs.append(torch.empty(0, dtype=torch.float32) if memory is None else as_tensor(memory, torch.float32))
        self._views[peer] = theirs

    def views(self) -> list[Tensor]:
        collectives = self._collectives
        if not self._landing:
            self._again()
        self._views[collectives.rank] = self._parts(self._landing, collectives.rank)
        for rank in collectives.far:
            self._views[rank] = [torch.empty(size, dtype=torch.float32) for size in self._streams.into[rank]]
        return list(chain.from_iterable(map(self._views.__getitem__, range(collectives.world_size))))

    def send(self) -> None:
        self._recorded = flight_record().begin("gradient", 4 * sum(map(sum, self._streams.out)))
        if torch.autograd.profiler._is_profiler_enabled:
            with _counted():
                self._send()
        else:
            self._send()

    def _send(self) -> None:
        collectives = self._collectives
        with collectives.channel.lock:
            views, self._views = self._views, {}
            for peer in collectives.peers:
                collectives.channel.send(peer, (self._number, 2 * self._turn), "gradient", ())
            if collectives.far:
                far = {rank: views[rank] for rank in collectives.far}
                self._far_sent = collectives.send_far(far, list(map(sum, self._streams.out)), "gradient")

    def wait(self) -> list[Tensor]:
        collectives = self._collectives
        with collectives.channel.lock:
            for peer in collectives.peers:
                collectives.channel.receive(peer, (self._number, 2 * self._turn), "gradient")
        landing, starts, self._landing, self._regions, self._starts = self._landing, self._starts, [], [], []
        self._turn += 1
        flight_record().end(self._recorded)
        if self._far_sent is not None:
            done, self._far_sent = self._far_sent.wait(), None
            for rank in collectives.far:
                of_streams = done[rank].split(list(self._streams.out[rank]))
                for memory, first, came in zip(landing, starts, of_streams, strict=True):
                    memory[first[rank] : first[rank + 1]].copy_(came)
        return landing

    def _parts(self, landing: Sequence[Tensor], rank: int) -> list[Tensor]:
        """Per stream, the gradient of the values that went to a rank."""
        parts = []
        for stream, memory in enumerate(landing):
            start, end = self._starts[stream][rank : rank + 2]
            parts.append(memory[start:end])
        return parts

    def _again(self) -> None:
        """Lend new memory for another backward through the same forward."""
        collectives, key = self._collectives, (self._number, 2 * self._turn - 1)
        with collectives.channel.lock:
            self._lend()
            for peer in collectives.peers:
                collectives.channel.send(peer, key, "gradient", self.offer(peer))
            for peer in collectives.peers:
                self.offered(peer, collectives.channel.receive(peer, key, "gradient"))


def _tokens(message: Message) -> list[int]:
    """The tokens of the regions in a forward message."""
    outgoing, offers = message
    lent = [outgoing] if isinstance(outgoing, tuple) else []
    return [region[0] for region in (*lent, *offers) if region]


def _counted() -> AbstractContextManager[object]:
    """An event for the profiler that runs, as the process group's operators record."""
    return torch.autograd.profiler.record_function("shardrec::all_to_all")

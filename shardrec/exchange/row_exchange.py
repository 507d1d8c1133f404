"""Exchange of blocks of float rows, and of their gradients: one all-to-all each way, for one or several calls.

Shapes: W ranks, M calls, n elements of a block.

::

    forward    call m: flat rows, rank after rank ────┐
    buffer     to rank q: call 0 | call 1 | ...       ├─ all-to-all ──► W blocks per call, views of one buffer
    backward   gradients of the blocks, written in place into one buffer ── all-to-all ──► gradient of each flat

[Note: gradients in place]
Gradients are written to :meth:`RowsInFlight.gradient_blocks`: into the send buffer, or, between ranks that share
memory, directly into the other rank's memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from math import prod
from operator import attrgetter

import torch
from torch import Tensor

from shardrec.errors import ConfigError
from shardrec.exchange.collectives import Collectives, Pending, StreamSizes, WayBack, joined
from shardrec.exchange.wire_format import QuantizedComms, Shape, Wire

_OUT, _INTO = attrgetter("out"), attrgetter("into")


@dataclass(frozen=True, kw_only=True, slots=True)
class OutgoingRows:
    """The rows that one call sends, and the shapes of those it receives, in a shared exchange.

    Args:
        flat: float32, the parts for each rank one after the other.
        out: per rank, the shapes of the parts that go to it.
        into: per rank, the shapes of the parts that come from it.
    """

    flat: Tensor
    out: Sequence[Sequence[Shape]]
    into: Sequence[Sequence[Shape]]


class RowAllToAll:
    """All-to-alls of float rows over a group.

    Attributes:
        ended: why no gradients can be sent any more, if that is so.
    """

    ended = ""

    def __init__(
        self,
        collectives: Collectives,
        comms: QuantizedComms,
        what: str = "output",
        device: torch.device | None = None,
    ) -> None:
        self.collectives = collectives
        self.device = device or torch.device("cpu")
        self.what = what
        self.wire = Wire(comms.output, collectives)
        self.gradient_wire = Wire(comms.gradient, collectives)

    def refuse_ended(self) -> None:
        """Raise if no gradients can be sent any more.

        Raises:
            ConfigError: on every rank.
        """
        if self.ended:
            raise ConfigError(self.ended)


class RowsInFlight:
    """Rows on their way, and their gradients on the way back.

    Args:
        exchange: what sends them.
        calls: the rows per call. At least one.
        with_gradients: whether gradients may come back. The same on every rank.
    """

    __slots__ = ("_into", "_into_sizes", "_out", "_out_sizes", "_pending", "_views", "_way_back", "exchange")

    def __init__(self, exchange: RowAllToAll, calls: Sequence[OutgoingRows], *, with_gradients: bool) -> None:
        self.exchange = exchange
        self._out, self._out_sizes = _by_rank(list(map(_OUT, calls)))
        self._into, self._into_sizes = _by_rank(list(map(_INTO, calls)))
        self._views: list[Tensor] | None = None
        wire, what = exchange.wire, exchange.what
        split = []
        for call, sizes in zip(calls, zip(*self._out_sizes, strict=True), strict=True):
            split.append(torch.split_with_sizes(call.flat, sizes))
        parts = list(zip(*split, strict=True))
        if wire.is_plain:
            in_place = with_gradients and exchange.gradient_wire.is_plain
            streams = StreamSizes(out=self._out_sizes, into=self._into_sizes) if in_place else None
            pending = exchange.collectives.send(parts, list(map(sum, self._into_sizes)), what, streams)
        else:
            buffer = joined([part for rank in parts for part in rank])
            pending = wire.send(buffer, self._into, self._out, what)
        self._pending: Pending | None = pending
        self._way_back: WayBack = pending.way_back or _Buffered(self)

    def receive(self) -> list[Sequence[Tensor]]:
        """Wait for the rows: per call, a flat float32 block per rank. Call it once."""
        assert self._pending is not None, "an exchange is received once"
        parts = self._pending.wait()
        self._pending = None
        if len(self._into_sizes[0]) == 1:
            return [parts]
        blocks = [part.split(sizes) for part, sizes in zip(parts, self._into_sizes, strict=True)]
        return list(zip(*blocks, strict=True))

    def gradient_blocks(self) -> list[list[Tensor]]:
        """The memory to which the gradients of the blocks are written, (n,) each, as :meth:`receive` orders them."""
        if self.exchange.ended:
            self.exchange.refuse_ended()
        if self._views is None:
            self._views = self._way_back.views()
        calls = len(self._into_sizes[0])
        return [self._views[call::calls] for call in range(calls)]

    def send_gradients(self) -> None:
        """Send the gradients that were written to the blocks. The next backward gets new ones."""
        self._views = None
        self._way_back.send()

    def receive_gradients(self) -> list[Tensor]:
        """Wait for the gradient of each call's ``flat``, which :meth:`send_gradients` of every rank has sent."""
        return self._way_back.wait()


class _Buffered:
    """The way back for gradients that travel as one buffer, in the exchange's format."""

    def __init__(self, rows: RowsInFlight) -> None:
        self._exchange = rows.exchange
        self._out, self._into = rows._out, rows._into
        self._out_sizes = [size for rank in rows._out_sizes for size in rank]
        self._into_sizes = [size for rank in rows._into_sizes for size in rank]
        self._calls = len(rows._out_sizes[0])
        self._buffer: Tensor | None = None
        self._pending: Pending | None = None

    def views(self) -> list[Tensor]:
        device = self._exchange.device
        self._buffer = torch.empty(sum(self._into_sizes), dtype=torch.float32, device=device)
        return list(self._buffer.split(self._into_sizes))

    def send(self) -> None:
        assert self._buffer is not None, "gradients are written before they are sent"
        wire = self._exchange.gradient_wire
        self._pending = wire.send(self._buffer, self._out, self._into, "gradient")
        self._buffer = None

    def wait(self) -> list[Tensor]:
        assert self._pending is not None, "the output's gradient is sent before it is received"
        parts = joined(self._pending.wait()).split(self._out_sizes)
        self._pending = None
        return [joined(parts[call :: self._calls]) for call in range(self._calls)]


def _by_rank(calls: Sequence[Sequence[Sequence[Shape]]]) -> tuple[list[list[Shape]], list[list[int]]]:
    """Per rank, the shapes of the parts of all calls, and the elements per call."""
    shapes: list[list[Shape]] = []
    sizes: list[list[int]] = []
    for of_rank in zip(*calls, strict=True):
        shapes.append(list(chain.from_iterable(of_rank)))
        elements = []
        for parts in of_rank:
            elements.append(sum(map(prod, parts)))
        sizes.append(elements)
    return shapes, sizes

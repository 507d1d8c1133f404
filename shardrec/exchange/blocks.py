"""Blocks of float rows between ranks and their gradients back: one all-to-all each way, for one or several modules.

Shapes: W ranks, M streams (one per module), n elements of a block.

::

    forward    stream m: flat rows, rank after rank ──┐
    buffer     to rank q: stream 0 | stream 1 | ...   ├─ all-to-all ──► W blocks per stream, views of one buffer
    backward   gradients of the blocks, written in place into one buffer ── all-to-all ──► gradient of each flat

[Note: two autograd functions]
The exchange is issued in one function and waited for in another, with a token between them, so that forward and
backward both have work to do while it is under way: whatever the dense model computes between the two.

[Note: gradients in place]
A stream's consumer asks for :meth:`BlocksInFlight.gradient_blocks` and writes there, so that the send buffer needs no
copy of its own. A gradient that lies elsewhere (autograd added two up) is copied in; a missing one is zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from shardrec.exchange.collectives import Collectives
from shardrec.exchange.wire import QuantizedComms, Shape, Wire

__all__ = ["BlockExchange", "BlocksInFlight", "Stream", "joined"]


@dataclass(frozen=True, kw_only=True)
class Stream:
    """What one module sends.

    Args:
        flat: float32, the parts for each rank one after the other.
        out: per rank, the shapes of the parts that go to it.
        into: per rank, the shapes of the parts that come from it.
    """

    flat: Tensor
    out: list[list[Shape]]
    into: list[list[Shape]]


class BlockExchange:
    """All-to-alls of float rows over a group.

    Args:
        collectives: of the group.
        comms: formats on the wire.
        what: a word for error messages.
    """

    def __init__(self, collectives: Collectives, comms: QuantizedComms, what: str = "output") -> None:
        self.collectives = collectives
        self.what = what
        self.wire = Wire(comms.output, collectives)
        self.gradient_wire = Wire(comms.gradient, collectives)

    def start(self, streams: Sequence[Stream]) -> BlocksInFlight:
        """Issue the all-to-all."""
        return BlocksInFlight(self, streams)


class BlocksInFlight:
    """An exchange under way.

    Args:
        exchange: how it travels.
        streams: what is sent; at least one.
    """

    def __init__(self, exchange: BlockExchange, streams: Sequence[Stream]) -> None:
        self.exchange = exchange
        self.out = [[list(stream.out[rank]) for stream in streams] for rank in range(len(streams[0].out))]
        self.into = [[list(stream.into[rank]) for stream in streams] for rank in range(len(streams[0].into))]
        self.streams = len(streams)
        self._blocks: dict[int, tuple[Tensor, ...]] | None = None
        self.received: Tensor | None = None  # the receive buffer of the forward all-to-all, until it is used
        self.gradient: Tensor | None = None  # likewise of the backward all-to-all
        self._gradient_views: list[Tensor] | None = None
        flats = [stream.flat for stream in streams]
        if torch.is_grad_enabled():
            # A rank whose rows need no gradient still takes its part in the others' backward.
            flats = [flat if flat.requires_grad else flat.detach().requires_grad_() for flat in flats]
        self._token: Tensor = _Issue.apply(self, *flats)  # type: ignore[no-untyped-call]

    def blocks(self, stream: int) -> tuple[Tensor, ...]:
        """W flat float32 blocks of a stream, which are handed out once; waits at the first call.

        Call it in the grad mode that the exchange was started in.
        """
        if self._blocks is None:
            every: tuple[Tensor, ...] = _Receive.apply(self._token, self)  # type: ignore[no-untyped-call]
            self._blocks = {index: every[index :: self.streams] for index in range(self.streams)}
        return self._blocks.pop(stream)

    def gradient_blocks(self, stream: int) -> list[Tensor]:
        """Where the gradients of a stream's blocks are to be written, (n,) each."""
        return self.gradient_views()[stream :: self.streams]

    def gradient_views(self) -> list[Tensor]:
        """The gradient's send buffer, rank after rank and in a rank stream after stream."""
        if self._gradient_views is None:
            sizes = [_numel(parts) for rank in self.into for parts in rank]
            buffer = torch.empty(sum(sizes), dtype=torch.float32, device=self._token.device)
            self._gradient_views = list(buffer.split(sizes))
        return self._gradient_views

    def take_gradient_buffer(self) -> Tensor:
        """The whole send buffer; the next backward gets a new one."""
        views, self._gradient_views = self.gradient_views(), None
        return joined(views)


class _Issue(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, flight: BlocksInFlight, *flats: Tensor) -> Tensor:
        ctx.flight = flight  # type: ignore[attr-defined]
        ctx.sizes = [flat.shape for flat in flats]  # type: ignore[attr-defined]
        wire = flight.exchange.wire
        flat = _rank_major([one.detach().reshape(-1) for one in flats], flight.out)
        flight.received = wire.send(flat, _by_rank(flight.into), _by_rank(flight.out), flight.exchange.what)
        return flats[0].new_zeros(())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, token_gradient: Tensor) -> tuple[Tensor | None, ...]:
        flight: BlocksInFlight = ctx.flight
        assert flight.gradient is not None, "the output's gradient is sent before it is received"
        shapes = _by_rank(flight.out)
        gradient = flight.exchange.gradient_wire.receive(flight.gradient, shapes, "gradient")
        flight.gradient = None
        parts = gradient.split([_numel(parts) for rank in flight.out for parts in rank])
        flats = [joined(parts[stream :: flight.streams]) for stream in range(flight.streams)]
        return None, *(flat.view(size) for flat, size in zip(flats, ctx.sizes, strict=True))


class _Receive(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, token: Tensor, flight: BlocksInFlight) -> tuple[Tensor, ...]:
        ctx.flight = flight  # type: ignore[attr-defined]
        ctx.set_materialize_grads(False)
        assert flight.received is not None, "an exchange is received once"
        received = flight.exchange.wire.receive(flight.received, _by_rank(flight.into), flight.exchange.what)
        flight.received = None
        blocks: tuple[Tensor, ...] = received.split([_numel(parts) for rank in flight.into for parts in rank])
        return blocks

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor, None]:
        flight: BlocksInFlight = ctx.flight
        for view, gradient in zip(flight.gradient_views(), gradients, strict=True):
            if gradient is None:
                view.zero_()
            elif gradient.data_ptr() != view.data_ptr() or gradient.stride() != view.stride():
                view.copy_(gradient)
        buffer = flight.take_gradient_buffer()
        wire = flight.exchange.gradient_wire
        flight.gradient = wire.send(buffer, _by_rank(flight.out), _by_rank(flight.into), "gradient")
        return buffer.new_zeros(()), None


def joined(parts: Sequence[Tensor]) -> Tensor:
    """One flat tensor of the (n,) parts: a view where they lie one after the other, else a copy."""
    first = parts[0]
    place = first.storage_offset()
    memory = first.untyped_storage().data_ptr()
    for part in parts:
        if part.storage_offset() != place or part.untyped_storage().data_ptr() != memory:
            return torch.cat(list(parts))
        place += part.numel()
    return first.as_strided((place - first.storage_offset(),), (1,))


def _rank_major(flats: Sequence[Tensor], shapes: list[list[list[Shape]]]) -> Tensor:
    """One buffer: to each rank, its part of each stream."""
    if len(flats) == 1:
        return flats[0]
    split = [flat.split([_numel(rank[stream]) for rank in shapes]) for stream, flat in enumerate(flats)]
    return torch.cat([parts[rank] for rank in range(len(shapes)) for parts in split])


def _by_rank(shapes: list[list[list[Shape]]]) -> list[list[Shape]]:
    return [[shape for stream in rank for shape in stream] for rank in shapes]


def _numel(parts: Sequence[Shape]) -> int:
    return sum(rows * cols for rows, cols in parts)

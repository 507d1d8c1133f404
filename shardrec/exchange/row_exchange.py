"""Exchange of blocks of float rows, and of their gradients: one all-to-all each way, for one or several calls.

Shapes: W ranks, M streams (one per call), n elements of a block.

::

    forward    stream m: flat rows, rank after rank ──┐
    buffer     to rank q: stream 0 | stream 1 | ...   ├─ all-to-all ──► W blocks per stream, views of one buffer
    backward   gradients of the blocks, written in place into one buffer ── all-to-all ──► gradient of each flat

[Note: two autograd functions]
The exchange is issued in one function and waited for in another, with a token between them, so that forward and
backward both have work to do while it is under way: whatever the dense model computes between the two.

[Note: gradients in place]
A stream's consumer asks for :meth:`BlocksInFlight.gradient_blocks` and writes there: into the send buffer, or, between
ranks that share memory, directly into the other rank's memory. A gradient that lies elsewhere (autograd added two up)
is copied; a missing gradient is zero.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from shardrec.errors import ConfigError
from shardrec.exchange.collectives import Collectives, Pending, StreamSizes, WayBack, joined
from shardrec.exchange.wire_format import QuantizedComms, Shape, Wire

__all__ = ["BlocksInFlight", "RowAllToAll", "Stream"]


@dataclass(frozen=True, kw_only=True)
class Stream:
    """The rows that one call sends, and the shapes of those it receives, in a shared exchange; not a CUDA stream.

    Args:
        flat: float32, the parts for each rank one after the other.
        out: per rank, the shapes of the parts that go to it.
        into: per rank, the shapes of the parts that come from it.
    """

    flat: Tensor
    out: list[list[Shape]]
    into: list[list[Shape]]


class RowAllToAll:
    """All-to-alls of float rows over a group.

    Args:
        collectives: of the group.
        comms: formats on the wire.
        what: the exchange's name in errors.
        device: of the rows; default: the CPU.
        before_gradients: called in each backward before gradients are sent, on every rank.

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
        before_gradients: Callable[[], None] | None = None,
    ) -> None:
        self.before_gradients = before_gradients
        self.collectives = collectives
        self.device = device or torch.device("cpu")
        self.what = what
        self.wire = Wire(comms.output, collectives)
        self.gradient_wire = Wire(comms.gradient, collectives)

    def start(self, streams: Sequence[Stream], *, requires_grad: bool = True) -> BlocksInFlight:
        """Issue the all-to-all of at least one stream.

        Args:
            streams: the rows of each call.
            requires_grad: whether the received rows get gradients, if gradients are enabled; the same on every rank.
        """
        with torch.set_grad_enabled(requires_grad and torch.is_grad_enabled()):
            return _LocalBlocks(self, streams) if self.collectives.world_size == 1 else _RemoteBlocks(self, streams)

    def refuse_ended(self) -> None:
        """Raise if no gradients can be sent any more.

        Raises:
            ConfigError: on every rank.
        """
        if self.ended:
            raise ConfigError(self.ended)


class BlocksInFlight(abc.ABC):
    """An exchange under way."""

    @abc.abstractmethod
    def blocks(self, stream: int) -> tuple[Tensor, ...]:
        """W flat float32 blocks of a stream, which can be taken once; the first call waits.

        Call it in the grad mode that the exchange was started in.
        """

    @abc.abstractmethod
    def gradient_blocks(self, stream: int) -> list[Tensor]:
        """The memory to which the gradients of a stream's blocks are written, (n,) each."""

    @abc.abstractmethod
    def cut_graph(self) -> tuple[list[Tensor], list[Tensor]]:
        """Cut the autograd graph between what was sent and the blocks, before the blocks are handed out.

        Returns:
            What the graph of the sending half ends in, and the leaves that the blocks' half begins with in its place.
        """


class _LocalBlocks(BlocksInFlight):
    """The streams of a single rank, which do not travel."""

    def __init__(self, exchange: RowAllToAll, streams: Sequence[Stream]) -> None:
        self._exchange = exchange
        with_gradients = torch.is_grad_enabled()
        self._flats = {
            number: stream.flat if with_gradients else stream.flat.detach() for number, stream in enumerate(streams)
        }
        self._like = {number: stream.flat.detach()[:0].view(-1) for number, stream in enumerate(streams)}
        self._sizes = [stream.flat.numel() for stream in streams]

    def blocks(self, stream: int) -> tuple[Tensor, ...]:
        block = self._flats.pop(stream).reshape(-1)
        if block.requires_grad:  # its consumer may be a view, which asks for no gradient_blocks
            exchange = self._exchange
            block.register_hook(lambda _: exchange.refuse_ended())
        return (block,)

    def gradient_blocks(self, stream: int) -> list[Tensor]:
        return [self._like[stream].new_empty(self._sizes[stream])]

    def cut_graph(self) -> tuple[list[Tensor], list[Tensor]]:
        sent = {number: flat for number, flat in self._flats.items() if flat.requires_grad}
        leaves = {number: flat.detach().requires_grad_() for number, flat in sent.items()}
        self._flats.update(leaves)
        return list(sent.values()), list(leaves.values())


class _RemoteBlocks(BlocksInFlight):
    """Streams between several ranks."""

    def __init__(self, exchange: RowAllToAll, streams: Sequence[Stream]) -> None:
        self._streams = len(streams)
        self._state = state = _ExchangeState(exchange, streams)
        self._blocks: dict[int, tuple[Tensor, ...]] | None = None
        flats = [stream.flat for stream in streams]
        if torch.is_grad_enabled():
            # A rank whose rows need no gradient still takes part in the other ranks' backward.
            flats = [flat if flat.requires_grad else flat.detach().requires_grad_() for flat in flats]
        self._token: Tensor = _Issue.apply(state, *flats)  # type: ignore[no-untyped-call]

    def blocks(self, stream: int) -> tuple[Tensor, ...]:
        if self._blocks is None:
            received: tuple[Tensor, ...] = _Receive.apply(self._token, self._state)  # type: ignore[no-untyped-call]
            self._blocks = {index: received[index :: self._streams] for index in range(self._streams)}
        return self._blocks.pop(stream)

    def gradient_blocks(self, stream: int) -> list[Tensor]:
        self._state.exchange.refuse_ended()
        return self._state.gradient_views()[stream :: self._streams]

    def cut_graph(self) -> tuple[list[Tensor], list[Tensor]]:
        if not self._token.requires_grad:
            return [], []
        token, self._token = self._token, self._token.detach().requires_grad_()
        return [token], [self._token]


class _ExchangeState:
    """State that forward and backward share. It holds no tensor of the autograd graph, which refers to it."""

    way_back: WayBack
    """Of the gradients, once the rows are under way."""

    def __init__(self, exchange: RowAllToAll, streams: Sequence[Stream]) -> None:
        self.exchange = exchange
        self.out, self.out_sizes = _by_rank([stream.out for stream in streams])
        self.into, self.into_sizes = _by_rank([stream.into for stream in streams])
        self.pending: Pending | None = None
        self.with_gradients = torch.is_grad_enabled()
        self._views: list[Tensor] | None = None

    def send(self, flats: Sequence[Tensor]) -> None:
        """Issue the forward exchange."""
        wire, what = self.exchange.wire, self.exchange.what
        split = [flat.split([rank[stream] for rank in self.out_sizes]) for stream, flat in enumerate(flats)]
        parts = [[stream_parts[rank] for stream_parts in split] for rank in range(len(self.out_sizes))]
        sizes_in = list(map(sum, self.into_sizes))
        if wire.is_plain:
            streams = StreamSizes(out=self.out_sizes, into=self.into_sizes) if self.with_gradients else None
            in_place = streams if self.exchange.gradient_wire.is_plain else None
            self.pending = self.exchange.collectives.send(parts, sizes_in, what, in_place)
        else:
            buffer = joined([part for rank in parts for part in rank])
            self.pending = wire.send(buffer, self.into, self.out, what)
        self.way_back = self.pending.way_back or _Buffered(self)

    def receive(self) -> tuple[Tensor, ...]:
        """Wait for the blocks, and return them by rank, then stream."""
        assert self.pending is not None, "an exchange is received once"
        parts = self.pending.wait()
        self.pending = None
        return tuple(block for part, sizes in zip(parts, self.into_sizes, strict=True) for block in part.split(sizes))

    def gradient_views(self) -> list[Tensor]:
        """The memory to which the blocks' gradients are written, in the blocks' order."""
        if self._views is None:
            self._views = self.way_back.views()
        return self._views

    def send_gradient(self) -> None:
        """Send the gradients that were written to the views; the next backward gets new views."""
        self._views = None
        self.way_back.send()


class _Buffered:
    """The way back for gradients that travel as one buffer, in the exchange's format."""

    def __init__(self, state: _ExchangeState) -> None:
        self._exchange = state.exchange
        self._out, self._into = state.out, state.into
        self._out_sizes = [size for rank in state.out_sizes for size in rank]
        self._into_sizes = [size for rank in state.into_sizes for size in rank]
        self._streams = len(state.out_sizes[0])
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
        return [joined(parts[stream :: self._streams]) for stream in range(self._streams)]


class _Issue(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, state: _ExchangeState, *flats: Tensor) -> Tensor:
        ctx.state = state  # type: ignore[attr-defined]
        ctx.sizes = [flat.shape for flat in flats]  # type: ignore[attr-defined]
        state.send([flat.detach().reshape(-1) for flat in flats])
        return flats[0].new_zeros(())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, token_gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Waits for the gradients, which :meth:`_Receive.backward` of every rank has sent."""
        state: _ExchangeState = ctx.state
        gradients = state.way_back.wait()
        return None, *(gradient.view(size) for gradient, size in zip(gradients, ctx.sizes, strict=True))


class _Receive(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, token: Tensor, state: _ExchangeState) -> tuple[Tensor, ...]:
        ctx.state = state  # type: ignore[attr-defined]
        ctx.like = token  # type: ignore[attr-defined]
        ctx.set_materialize_grads(False)
        return state.receive()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor, None]:
        state: _ExchangeState = ctx.state
        if state.exchange.before_gradients is not None:
            state.exchange.before_gradients()
        for view, gradient in zip(state.gradient_views(), gradients, strict=True):
            if gradient is None:
                view.zero_()
            elif gradient.data_ptr() != view.data_ptr() or gradient.stride() != view.stride():
                view.copy_(gradient)
        state.send_gradient()
        return ctx.like.new_zeros(()), None


def _by_rank(streams: Sequence[list[list[Shape]]]) -> tuple[list[list[Shape]], list[list[int]]]:
    """Per rank, the shapes of the parts of all streams, and the elements of each stream."""
    ranks = list(zip(*streams, strict=True))
    shapes = [[shape for stream in rank for shape in stream] for rank in ranks]
    return shapes, [[sum(rows * cols for rows, cols in stream) for stream in rank] for rank in ranks]

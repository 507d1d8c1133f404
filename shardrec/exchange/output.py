"""The output exchange: pooled rows back to the ranks that asked, in one all-to-all forward and one backward.

Shapes: B local batch, B_all the batches of all ranks, D_q pooled columns on rank q, D output columns, W ranks.

::

    pooled (B_all, D_mine) ── all-to-all ──► blocks (B, D_0), ..., (B, D_{W-1}) ── pieces ──► output (B, D)
    gradient of pooled     ◄── all-to-all ── gradients of the blocks, over W    ◄──────────── gradient (B, D)

[Note: the mean over ranks]
As in DistributedDataParallel, the gradient of a shard is the mean over ranks of what their losses ask for, so that a
mean loss on each rank trains as the mean over the global batch would. The division happens where the gradient is packed
for sending. Replicated tables are left to the dense part's all-reduce, which averages too.

[Note: two autograd functions]
The exchange is issued in one function and waited for in another, with a token between them, so that forward and
backward both have work to do while it is under way: whatever the dense model computes between the two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from shardrec.exchange.collectives import Collectives
from shardrec.exchange.route import Piece, Source
from shardrec.exchange.wire import QuantizedComms, Shape, Wire

__all__ = ["OutputExchange", "PendingOutput"]


@dataclass(kw_only=True)
class PendingOutput:
    """An output exchange under way.

    Args:
        blocks_in: per rank, the block (B, D_q) that comes from it forward and goes to it backward.
        blocks_out: per rank, the block (B_w, D_mine) that goes to it forward and comes from it backward.
        batch_size: B.
        pooled_shape: (B_all, D_mine).
        blocks: the receive buffer of the forward all-to-all, until it is used.
        gradient: the receive buffer of the backward all-to-all, until it is used.
    """

    blocks_in: list[list[Shape]]
    blocks_out: list[list[Shape]]
    batch_size: int
    pooled_shape: tuple[int, int]
    blocks: Tensor | None = None
    gradient: Tensor | None = None


class OutputExchange:
    """Sends pooled rows to the ranks that asked for them and puts columns in the unsharded order.

    Args:
        widths: pooled columns D_q of each rank.
        pieces: how the output's columns come from the blocks.
        collectives: of the group that the embeddings are sharded over.
        comms: formats on the wire.
    """

    def __init__(
        self,
        widths: Sequence[int],
        pieces: Sequence[Piece],
        collectives: Collectives,
        comms: QuantizedComms | None = None,
    ) -> None:
        comms = comms or QuantizedComms()
        self.output_wire = Wire(comms.output, collectives)
        self.gradient_wire = Wire(comms.gradient, collectives)
        self.widths = tuple(widths)
        self.pieces = tuple(pieces)
        self.collectives = collectives

    def start(self, pooled: Tensor, batch_sizes: Sequence[int]) -> tuple[Tensor, PendingOutput]:
        """Issue the all-to-all.

        Args:
            pooled: (B_all, D_mine) float32, rank after rank.
            batch_sizes: samples of each rank.

        Returns:
            A token that carries the gradient's way back, and the record to :meth:`finish` with.
        """
        mine = self.widths[self.collectives.rank]
        batch_size = batch_sizes[self.collectives.rank]
        pending = PendingOutput(
            blocks_in=[[(batch_size, width)] for width in self.widths],
            blocks_out=[[(size, mine)] for size in batch_sizes],
            batch_size=batch_size,
            pooled_shape=(sum(batch_sizes), mine),
        )
        if torch.is_grad_enabled() and not pooled.requires_grad:
            # A rank whose pooled rows need no gradient still takes its part in the others' backward.
            pooled = pooled.detach().requires_grad_()
        token: Tensor = _Start.apply(pooled, pending, self)  # type: ignore[no-untyped-call]
        return token, pending

    def finish(self, token: Tensor, pending: PendingOutput, replicated: Tensor | None) -> Tensor:
        """Wait for the blocks and assemble the output.

        Args:
            token: from :meth:`start`.
            pending: from :meth:`start`.
            replicated: (B, D_r) pooled columns of the replicated tables, or None.

        Returns:
            (B, D) float32, columns in the unsharded order.
        """
        output: Tensor = _Finish.apply(token, replicated, pending, self)  # type: ignore[no-untyped-call]
        return output

    def assemble(self, blocks: Sequence[Tensor]) -> Tensor:
        """(B, D) output from one block per rank, and one for the replicated tables if there are any."""
        columns = []
        for piece in self.pieces:
            first, *others = piece.sources
            column = _columns(blocks, first, piece.width)
            for number, source in enumerate(others):
                other = _columns(blocks, source, piece.width)
                column = column.add_(other) if number else column + other
            columns.append(column)
        return columns[0].contiguous() if len(columns) == 1 else torch.cat(columns, dim=1)

    def distribute(self, gradient: Tensor, blocks: Sequence[Tensor]) -> None:
        """The transpose of :meth:`assemble`: writes the gradient of each block, from the output's (B, D)."""
        start = 0
        for piece in self.pieces:
            part = gradient[:, start : start + piece.width]
            for source in piece.sources:
                _columns(blocks, source, piece.width).copy_(part)
            start += piece.width


def _columns(blocks: Sequence[Tensor], source: Source, width: int) -> Tensor:
    return blocks[source.block][:, source.start : source.start + width]


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, pooled: Tensor, pending: PendingOutput, exchange: OutputExchange) -> Tensor:
        ctx.pending, ctx.exchange = pending, exchange  # type: ignore[attr-defined]
        flat = pooled.detach().reshape(-1)
        pending.blocks = exchange.output_wire.send(flat, pending.blocks_in, pending.blocks_out, "output")
        return pooled.new_zeros(())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, token_gradient: Tensor) -> tuple[Tensor, None, None]:
        pending: PendingOutput = ctx.pending
        assert pending.gradient is not None, "the output's gradient is sent before it is received"
        gradient = ctx.exchange.gradient_wire.receive(pending.gradient, pending.blocks_out, "gradient")
        pending.gradient = None
        return gradient.view(pending.pooled_shape), None, None


class _Finish(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx,
        token: Tensor,
        replicated: Tensor | None,
        pending: PendingOutput,
        exchange: OutputExchange,
    ) -> Tensor:
        ctx.pending, ctx.exchange = pending, exchange  # type: ignore[attr-defined]
        ctx.replicated_width = 0 if replicated is None else replicated.size(1)  # type: ignore[attr-defined]
        assert pending.blocks is not None, "an output exchange is finished once"
        received = exchange.output_wire.receive(pending.blocks, pending.blocks_in, "output")
        pending.blocks = None
        blocks = _split(received, pending, exchange.widths)
        if replicated is not None:
            blocks.append(replicated.detach())
        return exchange.assemble(blocks)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        pending: PendingOutput = ctx.pending
        exchange: OutputExchange = ctx.exchange
        buffer = gradient.new_empty(sum(pending.batch_size * width for width in exchange.widths))
        blocks = _split(buffer, pending, exchange.widths)
        replicated = None
        if ctx.replicated_width:
            replicated = gradient.new_empty((pending.batch_size, ctx.replicated_width))
            blocks.append(replicated)
        exchange.distribute(gradient, blocks)
        if exchange.collectives.world_size > 1:
            buffer.div_(exchange.collectives.world_size)
        pending.gradient = exchange.gradient_wire.send(buffer, pending.blocks_out, pending.blocks_in, "gradient")
        return gradient.new_zeros(()), replicated, None, None


def _split(buffer: Tensor, pending: PendingOutput, widths: Sequence[int]) -> list[Tensor]:
    """The blocks (B, D_q) of a flat buffer."""
    parts = buffer.split([pending.batch_size * width for width in widths])
    return [part.view(pending.batch_size, width) for part, width in zip(parts, widths, strict=True)]

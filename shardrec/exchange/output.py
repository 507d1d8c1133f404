"""A pooled module's part of the output exchange: its rows by rank, and the output put together from the blocks.

Shapes: B local batch, B_all the batches of all ranks, D_q pooled columns on rank q, D output columns, W ranks.

::

    pooled (B_all, D_mine) ── all-to-all ──► blocks (B, D_0), ..., (B, D_{W-1}) ── pieces ──► output (B, D)
    gradient of pooled     ◄── all-to-all ── gradients of the blocks, over W    ◄──────────── gradient (B, D)

[Note: the mean over ranks]
As in DistributedDataParallel, the gradient of a shard is the mean over ranks of what their losses ask for, so that a
mean loss on each rank trains as the mean over the global batch would. The division happens where the gradient is
written for sending. Replicated tables are left to the dense part's all-reduce, which averages too.

[Note: slots with a batch size each]
On this rank and on the one that looks up, such a slot's column has the rows of the largest slot, the rest being empty
bags. Only a slot's own rows travel, column after column: ``Ragged`` takes the others out and puts zeros back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from shardrec.exchange.blocks import BlocksInFlight, Stream
from shardrec.exchange.input import ShardInput
from shardrec.exchange.ragged import Ragged, strip
from shardrec.exchange.route import Piece, Route, Source
from shardrec.exchange.wire import Shape

__all__ = ["OutputExchange"]


class OutputExchange:
    """Sends pooled rows to the ranks that asked for them and puts columns in the unsharded order.

    Args:
        route: of the ids.
        pieces: how the output's columns come from the blocks.
        rank: this rank.
    """

    def __init__(self, route: Route, pieces: Sequence[Piece], rank: int) -> None:
        self.world_size = len(route.slots)
        self.widths = tuple(route.width(other) for other in range(self.world_size))
        self.pieces = tuple(pieces)
        self._rank = rank
        self._columns = [tuple(slot.shard.cols for slot in slots) for slots in route.slots]

    def stream(self, pooled: Tensor, served: ShardInput, slot_sizes: Sequence[int] | None) -> Stream:
        """What this rank sends and receives.

        Args:
            pooled: (B_all, D_mine) float32, rank after rank.
            served: the ids that were looked up.
            slot_sizes: (S,) batch size of each slot of all ranks in the local batch, where they differ.
        """
        size, mine = served.batch_sizes[self._rank], self.widths[self._rank]
        out: list[list[Shape]] = []
        blocks = list(pooled.split(list(served.batch_sizes))) if any(served.slot_sizes) else []
        for source, rows in enumerate(served.batch_sizes):
            sizes = served.slot_sizes[source]
            if sizes is None:
                out.append([(rows, mine)])
            else:
                ragged = Ragged(rows=rows, sizes=sizes, columns=self._columns[self._rank])
                blocks[source] = strip(blocks[source], ragged)
                out.append(ragged.shapes)
        flat = torch.cat([block.reshape(-1) for block in blocks]) if blocks else pooled
        into: list[list[Shape]] = [[(size, width)] for width in self.widths]
        if slot_sizes is not None:
            into = [ragged.shapes for ragged in self._ragged(size, slot_sizes)]
        return Stream(flat=flat, out=out, into=into)

    def finish(
        self,
        flight: BlocksInFlight,
        stream: int,
        size: int,
        slot_sizes: Sequence[int] | None,
        replicated: Tensor | None,
    ) -> Tensor:
        """Wait for the blocks and assemble the output.

        Args:
            flight: the exchange.
            stream: number of this module's part of it.
            size: B.
            slot_sizes: as given to :meth:`stream`.
            replicated: (B, D_r) pooled columns of the replicated tables, or None.

        Returns:
            (B, D) float32, columns in the unsharded order.
        """
        ragged = None if slot_sizes is None else self._ragged(size, slot_sizes)
        plan = _Assembly(exchange=self, flight=flight, stream=stream, size=size, ragged=ragged)
        output: Tensor = _Assemble.apply(plan, replicated, *flight.blocks(stream))  # type: ignore[no-untyped-call]
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

    def distribute(self, gradient: Tensor, blocks: Sequence[Tensor], scale: float) -> None:
        """The transpose of :meth:`assemble`: writes the gradient of each block, from the output's (B, D).

        Args:
            gradient: of the output.
            blocks: where to write, one (B, D_q) per rank, and one for the replicated tables if there are any.
            scale: a factor for the blocks of ranks.
        """
        start = 0
        for piece in self.pieces:
            part = gradient[:, start : start + piece.width]
            for source in piece.sources:
                target = _columns(blocks, source, piece.width)
                if source.block < self.world_size and scale != 1.0:
                    torch.mul(part, scale, out=target)
                else:
                    target.copy_(part)
            start += piece.width

    def _ragged(self, size: int, slot_sizes: Sequence[int]) -> list[Ragged]:
        found, start = [], 0
        for columns in self._columns:
            sizes = tuple(slot_sizes[start : start + len(columns)])
            found.append(Ragged(rows=size, sizes=sizes, columns=columns))
            start += len(columns)
        return found


def _columns(blocks: Sequence[Tensor], source: Source, width: int) -> Tensor:
    return blocks[source.block][:, source.start : source.start + width]


class _Assembly:
    """What forward and backward of one assembly share."""

    def __init__(
        self, *, exchange: OutputExchange, flight: BlocksInFlight, stream: int, size: int, ragged: list[Ragged] | None
    ) -> None:
        self.exchange = exchange
        self.flight = flight
        self.stream = stream
        self.size = size
        self.ragged = ragged

    def blocks(self, flats: Sequence[Tensor]) -> list[Tensor]:
        """(B, D_q) blocks of what came."""
        if self.ragged is not None:
            return [ragged.pad(flat) for ragged, flat in zip(self.ragged, flats, strict=True)]
        widths = self.exchange.widths
        return [flat.view(self.size, width) for flat, width in zip(flats, widths, strict=True)]


class _Assemble(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, assembly: _Assembly, replicated: Tensor | None, *flats: Tensor) -> Tensor:
        ctx.assembly = assembly  # type: ignore[attr-defined]
        ctx.replicated_width = 0 if replicated is None else replicated.size(1)  # type: ignore[attr-defined]
        blocks = assembly.blocks(flats)
        if replicated is not None:
            blocks.append(replicated.detach())
        return assembly.exchange.assemble(blocks)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        assembly: _Assembly = ctx.assembly
        exchange = assembly.exchange
        views = assembly.flight.gradient_blocks(assembly.stream)
        if assembly.ragged is None:
            blocks = assembly.blocks(views)
        else:
            blocks = [gradient.new_empty((assembly.size, width)) for width in exchange.widths]
        replicated = None
        if ctx.replicated_width:
            replicated = gradient.new_empty((assembly.size, ctx.replicated_width))
            blocks.append(replicated)
        exchange.distribute(gradient, blocks, 1.0 / exchange.world_size)
        if assembly.ragged is not None:
            for view, ragged, block in zip(views, assembly.ragged, blocks, strict=False):
                view.copy_(ragged.strip(block))
        return None, replicated, *views

"""A pooled module's part of the output exchange: it lays its rows out by rank and assembles the output from blocks.

Shapes: B local batch, B_all the batches of all ranks, D_q pooled columns on rank q, D output columns, W ranks.

::

    pooled (B_all, D_mine) ── all-to-all ──► blocks (B, D_0), ..., (B, D_{W-1}) ── pieces ──► output (B, D)
    gradient of pooled     ◄── all-to-all ── gradients of the blocks, over W    ◄──────────── gradient (B, D)

[Note: the mean over ranks]
As in DistributedDataParallel, the gradient of a shard is the mean over ranks of their losses' gradients, so that a
mean loss on each rank trains as the mean over the global batch would. The division happens where the gradient is
written for sending. The gradients of replicated tables are averaged by the dense part's all-reduce.

[Note: slots with a batch size each]
On this rank and on the one that looks up, the columns of each slot have as many rows as the largest slot; the
additional bags are empty. Only a slot's own rows travel, slot after slot: ``Ragged`` removes the others and inserts
zeros again. Sums over a host's ranks (:mod:`shardrec.exchange.hosts`) travel with all the rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from shardrec.exchange.assemble import Columns
from shardrec.exchange.hosts import HostExchange, host_sums
from shardrec.exchange.payload import ShardInput
from shardrec.exchange.ragged import Ragged
from shardrec.exchange.route import Lookup, Route, output_pieces
from shardrec.exchange.row_exchange import BlocksInFlight, Stream
from shardrec.exchange.wire_format import Shape

__all__ = ["PooledOutputLayout"]


class PooledOutputLayout:
    """Lays out pooled rows for the requesting ranks, and puts columns in the unsharded order.

    Args:
        route: of the ids.
        lookups: in the order of the unsharded module's output.
        rank: this rank.
        ranks_per_host: ranks are numbered host by host; default: one host.
        mean_over: number of ranks whose mean the gradients are; default: all.

    Attributes:
        hosts: the exchange inside hosts, if there is something to sum on any host; else None.
    """

    def __init__(
        self,
        route: Route,
        lookups: Sequence[Lookup],
        rank: int,
        ranks_per_host: int | None = None,
        mean_over: int | None = None,
    ) -> None:
        self.world_size = len(route.slots)
        self._rank = rank
        self._ranks_per_host = ranks_per_host or self.world_size
        sums = host_sums(route, self._ranks_per_host)
        self.hosts = None if sums is None else HostExchange(sums, rank)
        self._sums = sums
        self._slots = [range(len(slots)) for slots in route.slots] if sums is None else list(sums.direct)
        self._columns = [
            tuple(slots[number].shard.cols for number in direct)
            for slots, direct in zip(route.slots, self._slots, strict=True)
        ]
        self.widths = tuple(map(sum, self._columns))
        self._slot_counts = route.slot_counts()
        blocks = self.world_size + (0 if sums is None else len(sums.columns))
        scales = [1.0 / (mean_over or self.world_size)] * blocks + [1.0]
        self.columns = Columns(output_pieces(lookups, route, () if sums is None else sums.columns), scales)

    def stream(
        self,
        pooled: Tensor,
        shard_input: ShardInput,
        slot_sizes: Sequence[int] | None,
        sums: Sequence[Tensor] = (),
    ) -> Stream:
        """The stream that this rank sends, with the shapes that it receives.

        Args:
            pooled: (B_all, D_mine) float32, rank after rank, without the columns that are summed on hosts.
            shard_input: the ids that the ranks requested, which were looked up.
            slot_sizes: batch size of each of the S slots of all ranks in the local batch, if they differ; else None.
            sums: the sums from :attr:`hosts`, if that is not None.
        """
        flat, out = self.outgoing(pooled, shard_input, sums)
        size = shard_input.batch_sizes[self._rank]
        ragged_in = None if slot_sizes is None else self._ragged(size, slot_sizes)
        into = [self._shapes_in(other, size, ragged_in) for other in range(self.world_size)]
        return Stream(flat=flat, out=out, into=into)

    def outgoing(
        self, pooled: Tensor, shard_input: ShardInput, sums: Sequence[Tensor] = ()
    ) -> tuple[Tensor, list[list[Shape]]]:
        """The rows that this rank sends to each rank (on a server: to each request), one after the other, and their
        shapes.

        Args:
            pooled: as :meth:`stream` takes it.
            shard_input: as :meth:`stream` takes it.
            sums: as :meth:`stream` takes it.
        """
        mine = self.widths[self._rank]
        out: list[list[Shape]] = []
        plain = not any(shard_input.slot_sizes) and self._sums is None
        blocks = [] if plain else list(pooled.split(list(shard_input.batch_sizes)))
        parts: list[Tensor] = []
        for other, rows in enumerate(shard_input.batch_sizes):
            sizes = shard_input.slot_sizes[other]
            shapes: list[Shape] = [(rows, mine)]
            if sizes is not None:
                direct_sizes = tuple(sizes[number] for number in self._slots[self._rank])
                ragged = Ragged(rows=rows, sizes=direct_sizes, columns=self._columns[self._rank])
                blocks[other], shapes = ragged.strip(blocks[other]), ragged.shapes
            if not plain:
                parts.append(blocks[other].reshape(-1))
            if self._has_same_local_rank(other):
                summed = sums[other // self._ranks_per_host]
                parts.append(summed.reshape(-1))
                shapes.append((rows, summed.size(1)))
            out.append(shapes)
        return torch.cat(parts) if parts else pooled, out

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
            stream: number of this call's part of it.
            size: B.
            slot_sizes: as given to :meth:`stream`.
            replicated: (B, D_r) pooled columns of the replicated tables, or None.

        Returns:
            (B, D) float32, columns in the unsharded order.
        """
        if self.world_size == 1 and self.columns.is_identity:
            return flight.blocks(stream)[0].view(size, self.columns.width)
        ragged = None if slot_sizes is None else self._ragged(size, slot_sizes)
        plan = _Assembly(layout=self, flight=flight, stream=stream, size=size, ragged=ragged)
        output: Tensor = _Assemble.apply(plan, replicated, *flight.blocks(stream))  # type: ignore[no-untyped-call]
        return output

    def sums_in(self, flats: Sequence[Tensor], size: int) -> list[Tensor]:
        """(B, D_s) of each host: the end of the block from its rank that has this rank's place on a host."""
        if self._sums is None:
            return []
        sums = []
        for other in filter(self._has_same_local_rank, range(self.world_size)):
            width = self._sums.width(other // self._ranks_per_host)
            sums.append(flats[other][flats[other].numel() - size * width :].view(size, width))
        return sums

    def _has_same_local_rank(self, other: int) -> bool:
        """Whether sums over hosts travel between this rank and ``other``."""
        return self._sums is not None and (other - self._rank) % self._ranks_per_host == 0

    def _shapes_in(self, other: int, size: int, ragged: list[Ragged] | None) -> list[Shape]:
        shapes = [(size, self.widths[other])] if ragged is None else ragged[other].shapes
        if self._sums is not None and self._has_same_local_rank(other):
            shapes = [*shapes, (size, self._sums.width(other // self._ranks_per_host))]
        return shapes

    def _ragged(self, size: int, slot_sizes: Sequence[int]) -> list[Ragged]:
        layouts, start = [], 0
        for count, direct, columns in zip(self._slot_counts, self._slots, self._columns, strict=True):
            sizes = tuple(slot_sizes[start + number] for number in direct)
            layouts.append(Ragged(rows=size, sizes=sizes, columns=columns))
            start += count
        return layouts


@dataclass(frozen=True, kw_only=True)
class _Assembly:
    """What forward and backward of one assembly share."""

    layout: PooledOutputLayout
    flight: BlocksInFlight
    stream: int
    size: int
    ragged: list[Ragged] | None

    def direct(self, flats: Sequence[Tensor]) -> list[Tensor]:
        """The part of each rank's block with its own columns: (B · D_q,), or less if batch sizes differ by slot."""
        if self.ragged is None:
            sizes = [self.size * width for width in self.layout.widths]
        else:
            sizes = [sum(rows * cols for rows, cols in ragged.shapes) for ragged in self.ragged]
        return [flat[:count] for flat, count in zip(flats, sizes, strict=True)]


class _Assemble(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, assembly: _Assembly, replicated: Tensor | None, *flats: Tensor) -> Tensor:
        ctx.assembly = assembly  # type: ignore[attr-defined]
        ctx.replicated_width = 0 if replicated is None else replicated.size(1)  # type: ignore[attr-defined]
        layout, direct = assembly.layout, assembly.direct(flats)
        if assembly.ragged is None:
            blocks = [part.view(assembly.size, width) for part, width in zip(direct, layout.widths, strict=True)]
        else:
            blocks = [ragged.pad(part) for ragged, part in zip(assembly.ragged, direct, strict=True)]
        blocks += layout.sums_in(flats, assembly.size)
        if replicated is not None:
            blocks.append(replicated.detach())
        return layout.columns.assemble(blocks)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        assembly: _Assembly = ctx.assembly
        layout = assembly.layout
        views = assembly.flight.gradient_blocks(assembly.stream)
        direct = assembly.direct(views)
        if assembly.ragged is None:
            blocks = [part.view(assembly.size, width) for part, width in zip(direct, layout.widths, strict=True)]
        else:
            blocks = [gradient.new_empty((assembly.size, width)) for width in layout.widths]
        padded = blocks[:]
        blocks += layout.sums_in(views, assembly.size)
        replicated = None
        if ctx.replicated_width:
            replicated = gradient.new_empty((assembly.size, ctx.replicated_width))
            blocks.append(replicated)
        layout.columns.distribute(gradient, blocks)
        if assembly.ragged is not None:
            for part, ragged, block in zip(direct, assembly.ragged, padded, strict=True):
                part.copy_(ragged.strip(block))
        return None, replicated, *views

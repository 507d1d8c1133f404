"""The layout of the output exchange without pooling: one row per id, for the requesting rank.

Shapes: N_sent ids that this rank sent, M rows of the output, D columns of the output, n rows of a lookup group, w
columns of its shards, W ranks, S slots of all ranks, u columns of a column unit.

::

    rows of a shard, slot after slot, in a slot rank after rank ── reorder ──► rank after rank ── all-to-all ──►
    rows in the order in which the ids were sent ── scatter by column unit ──► output (M, D)

The output is scattered in column units: u is the greatest width that divides every shard's columns, so that a table
cut by columns needs no additional step. Where no table is cut, the rows of each lookup come back in one piece, and are
copied piece by piece; on one rank with lookups in the order of their slots there is nothing to copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from math import gcd
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from shardrec.exchange.payload import ShardInput
from shardrec.exchange.prepared_input import SentIds
from shardrec.exchange.route import Route
from shardrec.exchange.row_exchange import BlocksInFlight, Stream
from shardrec.exchange.to_device import staged
from shardrec.exchange.wire_format import Shape

__all__ = ["SequenceOutputLayout"]

_SOURCES = 64  # as in shardrec.exchange.payload


class SequenceOutputLayout:
    """Puts rows in the order of the requesting ranks, and scatters received rows into the output.

    Args:
        route: of the ids; each group's shards have one width.
        group_widths: columns of each group.
        dim: columns D of the output.
        rank: this rank.
        device: where the rows are.
        mean_over: number of ranks whose mean the gradients are; default: all.

    Attributes:
        widths: columns of each group.
        column_unit: columns u of a column unit.
        slot_firsts: per slot of all ranks, the column unit of a row where its columns begin.
        slot_column_units: per slot of all ranks, its column units.
    """

    def __init__(
        self,
        route: Route,
        group_widths: Sequence[int],
        dim: int,
        rank: int,
        device: torch.device,
        mean_over: int | None = None,
    ) -> None:
        self.dim = dim
        self.widths = tuple(group_widths)
        self.mean_over = mean_over or len(route.slots)
        self._device = device
        self._slots = [slot for rank_slots in route.slots for slot in rank_slots]
        self.column_unit = gcd(dim, *self.widths, *(slot.shard.col_start for slot in self._slots))
        self._rank_slots = route.slot_counts()
        mine = route.slots[rank]
        self._group_slots = [sum(slot.group == group for slot in mine) for group in range(route.groups)]
        self.slot_firsts = [slot.shard.col_start // self.column_unit for slot in self._slots]
        self.slot_column_units = [slot.shard.cols // self.column_unit for slot in self._slots]
        self._slot_width = torch.tensor(self.slot_column_units, dtype=torch.int64, device=device)
        self._units = [width // self.column_unit for width in self.widths]
        slots = [slot.lookup for slot in self._slots]
        # Per lookup, in the order of the output, its slot; None if tables are cut.
        self._pieces = sorted(range(len(slots)), key=slots.__getitem__) if route.in_whole else None
        self.rank_major = lru_cache(maxsize=_SOURCES)(self._new_rank_major)

    def stream(self, rows: Sequence[Tensor], shard_input: ShardInput, sent: Sequence[Sequence[int]]) -> Stream:
        """The stream that this rank sends, with the shapes that it receives.

        Args:
            rows: per group, (n, w) float32, slot-major.
            shard_input: the ids that the ranks requested, whose rows these are.
            sent: per rank, the number of ids of each group that this rank sent to it.
        """
        flat = torch.zeros(0, dtype=torch.float32, device=self._device)
        if rows:
            orders = self._orders(shard_input)
            pack = rows[0].reshape(-1) if len(orders) == 1 and orders[0] is None else None
            flat = _Pack.apply(shard_input.counts, orders, *rows) if pack is None else pack  # type: ignore[no-untyped-call]
        return Stream(
            flat=flat,
            out=[self._parts(counts) for counts in shard_input.counts],
            into=[self._parts(counts) for counts in sent],
        )

    def targets(self, sent: SentIds, starts: Sequence[int], sizes: Sequence[int]) -> Tensor | _Pieces:
        """The output's column unit of each received one, (column units of the received rows,) int64; where no table
        is cut, the pieces that the output is made of.

        Args:
            sent: the local batch.
            starts: per slot of all ranks, an id's output row minus its position in ``sent.positions``.
            sizes: number of ids of each lookup.
        """
        if self._pieces is not None:
            return _Pieces(slots=self._pieces, sizes=[count * self.dim for count in sizes])
        assert sent.positions is not None and sent.slot_ids is not None, "the positions of the ids were kept"
        units = self.dim // self.column_unit
        firsts = [start * units + first for first, start in zip(self.slot_firsts, starts, strict=True)]
        total = sum(ids * width for counts in sent.counts for ids, width in zip(counts, self._units, strict=True))
        first_S = staged(firsts, torch.int64, self._device)
        return column_unit_targets(sent.positions, sent.slot_ids, first_S, self._slot_width, units, total)

    def finish(self, flight: BlocksInFlight, stream: int, target: Tensor | _Pieces, output_rows: int) -> Tensor:
        """Wait for the rows.

        Args:
            flight: the exchange.
            stream: number of this call's part of it.
            target: from :meth:`targets`.
            output_rows: M.

        Returns:
            (M, D) float32.
        """
        blocks = flight.blocks(stream)
        if isinstance(target, Tensor):
            output: Tensor = _PutRows.apply(self, flight, stream, target, output_rows, *blocks)  # type: ignore[no-untyped-call]
            return output
        if len(blocks) == self.mean_over == 1 and target.slots == sorted(target.slots):
            return blocks[0].view(output_rows, self.dim)
        pieces: Tensor = _PutPieces.apply(self, flight, stream, target, *blocks)  # type: ignore[no-untyped-call]
        return pieces.view(output_rows, self.dim)

    def slots_of(self, blocks: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
        """The parts of the blocks that are of each slot of all ranks, whose elements are given."""
        left = iter(sizes)
        return [
            part
            for block, count in zip(blocks, self._rank_slots, strict=True)
            for part in block.split(list(islice(left, count)))
        ]

    def _parts(self, counts: Sequence[int]) -> list[Shape]:
        return list(zip(counts, self.widths, strict=True))

    def _orders(self, shard_input: ShardInput) -> list[Tensor | None]:
        """Per group, (n,) the slot-major place of each row in rank-major order; None if the two orders are one."""
        orders: list[Tensor | None] = []
        slot = 0
        rank_major = self.rank_major(len(shard_input.batch_sizes))
        for group, count in enumerate(shard_input.group_ids):
            slots = self._group_slots[group]
            lengths = shard_input.lengths[slot : slot + slots].reshape(-1)
            slot += slots
            if slots <= 1 or len(shard_input.batch_sizes) == 1:
                orders.append(None)
                continue
            places = torch.arange(count, device=self._device)
            if count:
                _, places, _ = torch.ops.fbgemm.permute_1D_sparse_data(rank_major[group], lengths, places, None, count)
            orders.append(places)
        return orders

    def _new_rank_major(self, sources: int) -> list[Tensor]:
        """Per group, (its slots · sources,) int32: slot-major blocks in source-major order."""
        numbers = [torch.arange(count * sources, dtype=torch.int32, device=self._device) for count in self._group_slots]
        return [blocks.view(-1, sources).t().flatten() for blocks in numbers]


def column_unit_targets(
    positions: Tensor, slot_ids: Tensor, firsts: Tensor, slot_column_units: Tensor, units: int, total: int
) -> Tensor:
    """The output's column unit of each received one. TorchScript also compiles it; it reads no value.

    Args:
        positions: (N_sent,) int64, position of each sent id, in order of travel.
        slot_ids: (S,) number of ids of each slot of all ranks.
        firsts: (S,) int64, output's column unit where an id's columns of the slot begin, less those of its position.
        slot_column_units: (S,) int64, column units of a slot's columns.
        units: of a row of the output.
        total: column units that are received.

    Returns:
        (total,) int64.
    """
    device, count = positions.device, positions.numel()
    base_N = positions * units + firsts.repeat_interleave(slot_ids, output_size=count)
    width_N = slot_column_units.repeat_interleave(slot_ids, output_size=count)
    ends_N = width_N.cumsum(0)
    inside = torch.arange(total, device=device)
    inside = inside - (ends_N - width_N).repeat_interleave(width_N, output_size=total)
    return base_N.repeat_interleave(width_N, output_size=total) + inside


class _Pack(torch.autograd.Function):
    """The send buffer: per rank, each group's rows.

    ``counts``: per rank and group, the ids that the rank asked of this one. ``orders``: per group, the slot-major
    place of each row in rank-major order, or None. ``rows``: per group, (n, w) slot-major.
    """

    @staticmethod
    def forward(
        ctx: FunctionCtx, counts: tuple[tuple[int, ...], ...], orders: list[Tensor | None], *rows: Tensor
    ) -> Tensor:
        ctx.counts, ctx.orders = counts, orders  # type: ignore[attr-defined]
        ctx.widths = [part.size(1) for part in rows]  # type: ignore[attr-defined]
        ordered = [
            part if order is None else part.index_select(0, order) for part, order in zip(rows, orders, strict=True)
        ]
        if len(ordered) == 1:
            return ordered[0].reshape(-1)
        per_group = [part.split([of_rank[group] for of_rank in counts]) for group, part in enumerate(ordered)]
        return torch.cat([split[rank].reshape(-1) for rank in range(len(counts)) for split in per_group])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        sizes = [count * width for of_rank in ctx.counts for count, width in zip(of_rank, ctx.widths, strict=True)]
        parts = gradient.split(sizes)
        gradients = []
        for group, (order, width) in enumerate(zip(ctx.orders, ctx.widths, strict=True)):
            of_group = parts[group :: len(ctx.widths)]
            whole = gradient if len(ctx.widths) == 1 else of_group[0] if len(of_group) == 1 else torch.cat(of_group)
            rank_major = whole.view(-1, width)
            if order is not None:
                rank_major = torch.empty_like(rank_major).index_copy_(0, order, rank_major)
            gradients.append(rank_major)
        return None, None, *gradients


@dataclass(frozen=True, kw_only=True)
class _Pieces:
    """The output as the rows of one lookup after the other.

    Args:
        slots: per lookup, the number of its slot among those of all ranks.
        sizes: elements of each lookup.
    """

    slots: list[int]
    sizes: list[int]

    @property
    def slot_sizes(self) -> list[int]:
        """Elements of each slot."""
        size_of = dict(zip(self.slots, self.sizes, strict=True))
        return [size_of[slot] for slot in range(len(self.slots))]


class _PutPieces(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx,
        layout: SequenceOutputLayout,
        flight: BlocksInFlight,
        stream: int,
        pieces: _Pieces,
        *blocks: Tensor,
    ) -> Tensor:
        ctx.layout, ctx.flight, ctx.stream, ctx.pieces = layout, flight, stream, pieces  # type: ignore[attr-defined]
        received = layout.slots_of(blocks, pieces.slot_sizes)
        return torch.cat([received[slot] for slot in pieces.slots])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        pieces: _Pieces = ctx.pieces
        views = ctx.flight.gradient_blocks(ctx.stream)
        received = ctx.layout.slots_of(views, pieces.slot_sizes)
        for slot, part in zip(pieces.slots, gradient.split(pieces.sizes), strict=True):
            received[slot].copy_(part)
        if ctx.layout.mean_over > 1:
            torch._foreach_div_(views, ctx.layout.mean_over)
        return None, None, None, None, *views


class _PutRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx,
        layout: SequenceOutputLayout,
        flight: BlocksInFlight,
        stream: int,
        target: Tensor,
        output_rows: int,
        *blocks: Tensor,
    ) -> Tensor:
        ctx.layout, ctx.flight, ctx.stream, ctx.target = layout, flight, stream, target  # type: ignore[attr-defined]
        units, column_unit = layout.dim // layout.column_unit, layout.column_unit
        output = blocks[0].new_empty((output_rows * units, column_unit))
        targets = target.split([block.numel() // column_unit for block in blocks])
        for target, block in zip(targets, blocks, strict=True):
            output.index_copy_(0, target, block.view(-1, column_unit))
        return output.view(output_rows, layout.dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        layout: SequenceOutputLayout = ctx.layout
        units = gradient.reshape(-1, layout.column_unit)
        views = ctx.flight.gradient_blocks(ctx.stream)
        targets = ctx.target.split([view.numel() // layout.column_unit for view in views])
        for view, target in zip(views, targets, strict=True):
            torch.index_select(units, 0, target, out=view.view(-1, layout.column_unit))
            if layout.mean_over > 1:
                # The mean over ranks: see shardrec.exchange.pooled_output.
                view.div_(layout.mean_over)
        return None, None, None, None, None, *views

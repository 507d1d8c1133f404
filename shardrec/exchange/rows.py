"""The output exchange without pooling: one row per id back to the rank that asked, in one all-to-all each way.

Shapes: N ids of this rank, M rows of the output, D columns of the output, w columns of a shard, W ranks, S slots of
this rank, u columns of a unit.

::

    rows of a shard, slot after slot, in a slot rank after rank ── reorder ──► rank after rank ── all-to-all ──►
    rows in the order in which the ids were sent ── scatter by unit ──► output (M, D)

The output is scattered in units of u columns, u the greatest width that divides every shard's columns, so that a table
cut by columns needs no step of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import gcd
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from shardrec.exchange.blocks import BlocksInFlight, Stream
from shardrec.exchange.input import ShardInput, Trace
from shardrec.exchange.route import Route
from shardrec.exchange.staging import staged
from shardrec.exchange.wire import Shape

__all__ = ["Placement", "RowExchange"]

_SOURCES = 64  # as in shardrec.exchange.payload


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Where received rows go.

    Args:
        target: where each received unit goes in the output.
        output_rows: M.
    """

    target: Tensor
    output_rows: int


class RowExchange:
    """Sends rows to the ranks that asked for them and puts each in its place.

    Args:
        route: of the ids; each group's shards have one width.
        group_widths: columns of each group.
        dim: columns D of the output.
        rank: this rank.
        device: where the rows are.
        mean_over: number of ranks whose mean the gradients are; default: all.
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
        self.unit = gcd(dim, *self.widths, *(slot.shard.col_start for slot in self._slots))
        slot_units = [slot.shard.cols // self.unit for slot in self._slots]
        self._slot_units = set(slot_units)
        self._slot_width = torch.tensor(slot_units, dtype=torch.int64, device=device)
        mine = route.slots[rank]
        self._group_slots = [sum(slot.group == group for slot in mine) for group in range(route.groups)]
        self._rank_major = lru_cache(maxsize=_SOURCES)(self._new_rank_major)

    def stream(self, rows: Sequence[Tensor], served: ShardInput, sent: Sequence[Sequence[int]]) -> Stream:
        """What this rank sends and receives.

        Args:
            rows: per group, (n, w) float32, slot-major.
            served: the ids that the rows are for.
            sent: per rank, the number of ids of each group that this rank sent to it.
        """
        flat = torch.zeros(0, device=self._device)
        if rows:
            packing = _Packing(exchange=self, served=served.counts, orders=self._orders(served))
            flat = _Pack.apply(packing, *rows)  # type: ignore[no-untyped-call]
        return Stream(
            flat=flat,
            out=[self._parts(counts) for counts in served.counts],
            into=[self._parts(counts) for counts in sent],
        )

    def placement(self, trace: Trace, starts: Sequence[int], output_rows: int) -> Placement:
        """Where the rows go that come back.

        Args:
            trace: of the ids that were sent.
            starts: per slot of all ranks, an id's output row minus its position in the sent batch.
            output_rows: M.
        """
        return Placement(target=self._target(trace, starts, output_rows), output_rows=output_rows)

    def finish(self, flight: BlocksInFlight, stream: int, placement: Placement) -> Tensor:
        """Wait for the rows: (M, D) float32."""
        blocks = flight.blocks(stream)
        output: Tensor = _Place.apply(self, flight, stream, placement, *blocks)  # type: ignore[no-untyped-call]
        return output

    def _parts(self, counts: Sequence[int]) -> list[Shape]:
        return list(zip(counts, self.widths, strict=True))

    def _orders(self, served: ShardInput) -> list[Tensor]:
        orders, slot = [], 0
        rank_major = self._rank_major(len(served.batch_sizes))
        for group, count in enumerate(served.group_ids):
            slots = self._group_slots[group]
            lengths = served.lengths[slot : slot + slots].reshape(-1)
            slot += slots
            places = torch.arange(count, device=self._device)
            if count:
                _, places, _ = torch.ops.fbgemm.permute_1D_sparse_data(rank_major[group], lengths, places, None, count)
            orders.append(places)
        return orders

    def _new_rank_major(self, sources: int) -> list[Tensor]:
        """Per group, (its slots · sources,) int32: slot-major blocks in source-major order."""
        orders = [
            [slot * sources + other for other in range(sources) for slot in range(count)] for count in self._group_slots
        ]
        return [torch.tensor(order, dtype=torch.int32, device=self._device) for order in orders]

    def _target(self, trace: Trace, starts: Sequence[int], output_rows: int) -> Tensor:
        positions, slot_ids = trace.positions, trace.slot_ids
        units = self.dim // self.unit
        first = [
            start * units + slot.shard.col_start // self.unit for slot, start in zip(self._slots, starts, strict=True)
        ]
        count = positions.numel()
        per_slot = staged(first, torch.int64, self._device)
        base = positions * units + per_slot.repeat_interleave(slot_ids, output_size=count)
        if len(self._slot_units) <= 1:
            width = next(iter(self._slot_units), 1)
            return (base.unsqueeze(1) + torch.arange(width, device=self._device)).reshape(-1)
        width_N = self._slot_width.repeat_interleave(slot_ids, output_size=count)
        ends = width_N.cumsum(0)
        total = output_rows * units  # each unit of the output comes once
        inside = torch.arange(total, device=self._device)
        inside -= (ends - width_N).repeat_interleave(width_N, output_size=total)
        return base.repeat_interleave(width_N, output_size=total) + inside


@dataclass(frozen=True, kw_only=True)
class _Packing:
    """The order of the send buffer.

    Args:
        exchange: whose rows.
        served: per rank and group, ids that the rank asked of this one.
        orders: per group, (n,) the slot-major place of each row in rank-major order.
    """

    exchange: RowExchange
    served: tuple[tuple[int, ...], ...]
    orders: list[Tensor]

    def pack(self, rows: Sequence[Tensor]) -> Tensor:
        """The send buffer: per rank, each group's rows."""
        ordered = [part.index_select(0, order) for part, order in zip(rows, self.orders, strict=True)]
        if len(ordered) == 1:
            return ordered[0].reshape(-1)
        per_group = [part.split([counts[group] for counts in self.served]) for group, part in enumerate(ordered)]
        return torch.cat([split[rank].reshape(-1) for rank in range(len(self.served)) for split in per_group])

    def unpack(self, flat: Tensor) -> list[Tensor]:
        """The transpose of :meth:`pack`: per group, (n, w) slot-major."""
        widths = self.exchange.widths
        found: list[list[Tensor]] = [[] for _ in widths]
        sizes = [count * widths[group] for counts in self.served for group, count in enumerate(counts)]
        for index, part in enumerate(flat.split(sizes)):
            found[index % len(widths)].append(part.view(-1, widths[index % len(widths)]))
        result = []
        for parts, order in zip(found, self.orders, strict=True):
            rank_major = torch.cat(parts)
            result.append(torch.empty_like(rank_major).index_copy_(0, order, rank_major))
        return result


class _Pack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, packing: _Packing, *rows: Tensor) -> Tensor:
        ctx.packing = packing  # type: ignore[attr-defined]
        return packing.pack(rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return None, *ctx.packing.unpack(gradient)


class _Place(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx,
        exchange: RowExchange,
        flight: BlocksInFlight,
        stream: int,
        placement: Placement,
        *blocks: Tensor,
    ) -> Tensor:
        ctx.exchange, ctx.flight, ctx.stream = exchange, flight, stream  # type: ignore[attr-defined]
        ctx.placement = placement  # type: ignore[attr-defined]
        units, unit = exchange.dim // exchange.unit, exchange.unit
        output = blocks[0].new_empty((placement.output_rows * units, unit))
        targets = placement.target.split([block.numel() // unit for block in blocks])
        for target, block in zip(targets, blocks, strict=True):
            output.index_copy_(0, target, block.view(-1, unit))
        return output.view(placement.output_rows, exchange.dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        exchange: RowExchange = ctx.exchange
        units = gradient.reshape(-1, exchange.unit)
        views = ctx.flight.gradient_blocks(ctx.stream)
        targets = ctx.placement.target.split([view.numel() // exchange.unit for view in views])
        for view, target in zip(views, targets, strict=True):
            torch.index_select(units, 0, target, out=view.view(-1, exchange.unit))
            if exchange.mean_over > 1:
                # The mean over ranks: see shardrec.exchange.output.
                view.div_(exchange.mean_over)
        return None, None, None, None, *views

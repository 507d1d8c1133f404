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
from math import gcd
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from shardrec.exchange.collectives import Collectives
from shardrec.exchange.input import PendingInput, ShardInput, Trace
from shardrec.exchange.route import Route
from shardrec.exchange.wire import QuantizedComms, Shape, Wire

__all__ = ["PendingRows", "RowExchange"]


@dataclass(kw_only=True)
class PendingRows:
    """A row exchange under way.

    Args:
        served: per rank and group, ids that the rank asked of this one.
        parts_in: per rank and group, the part (n, w) that comes from it forward and goes to it backward.
        parts_out: per rank and group, the part (n, w) that goes to it forward and comes from it backward.
        orders: per group, (n,) the slot-major place of each row in rank-major order.
        target: where each received unit goes in the output.
        output_rows: M.
        rows: the receive buffer of the forward all-to-all, until it is used.
        gradient: the receive buffer of the backward all-to-all, until it is used.
    """

    served: tuple[tuple[int, ...], ...]
    parts_in: list[list[Shape]]
    parts_out: list[list[Shape]]
    orders: list[Tensor]
    target: Tensor
    output_rows: int
    rows: Tensor | None = None
    gradient: Tensor | None = None


class RowExchange:
    """Sends rows to the ranks that asked for them and puts each in its place.

    Args:
        route: of the ids; each group's shards have one width.
        group_widths: columns of each group.
        dim: columns D of the output.
        collectives: of the group that the embeddings are sharded over.
        device: where the rows are.
        comms: formats on the wire.
    """

    def __init__(
        self,
        route: Route,
        group_widths: Sequence[int],
        dim: int,
        collectives: Collectives,
        device: torch.device,
        comms: QuantizedComms | None = None,
    ) -> None:
        comms = comms or QuantizedComms()
        self.output_wire = Wire(comms.output, collectives)
        self.gradient_wire = Wire(comms.gradient, collectives)
        self.dim = dim
        self.widths = tuple(group_widths)
        self.collectives = collectives
        self._device = device
        self._slots = [slot for rank_slots in route.slots for slot in rank_slots]
        self.unit = gcd(dim, *self.widths, *(slot.shard.col_start for slot in self._slots))
        world_size = collectives.world_size
        self._rank_major: list[Tensor] = []
        self._group_slots: list[int] = []
        for group in range(route.groups):
            count = sum(slot.group == group for slot in route.slots[collectives.rank])
            order = [slot * world_size + rank for rank in range(world_size) for slot in range(count)]
            self._rank_major.append(torch.tensor(order, dtype=torch.int32, device=device))
            self._group_slots.append(count)

    def start(
        self,
        rows: Sequence[Tensor],
        served: ShardInput,
        asked: PendingInput,
        starts: Sequence[int],
        output_rows: int,
    ) -> tuple[Tensor, PendingRows]:
        """Issue the all-to-all.

        Args:
            rows: per group, (n, w) float32, slot-major.
            served: the ids that the rows are for.
            asked: the ids that this rank sent.
            starts: per slot of all ranks, an id's output row minus its position in the sent batch.
            output_rows: M.

        Returns:
            A token that carries the gradient's way back, and the record to :meth:`finish` with.
        """
        assert asked.trace is not None, "the positions of the ids were kept"
        pending = PendingRows(
            served=served.counts,
            parts_in=[self._parts(counts) for counts in asked.sent],
            parts_out=[self._parts(counts) for counts in served.counts],
            orders=self._orders(served),
            target=self._target(asked.trace, starts),
            output_rows=output_rows,
        )
        if torch.is_grad_enabled() and rows and not any(part.requires_grad for part in rows):
            # A rank whose rows need no gradient still takes its part in the others' backward.
            rows = [part.detach().requires_grad_() for part in rows]
        token: Tensor = _Start.apply(pending, self, *rows)  # type: ignore[no-untyped-call]
        return token, pending

    def finish(self, token: Tensor, pending: PendingRows) -> Tensor:
        """Wait for the rows: (M, D) float32."""
        output: Tensor = _Finish.apply(token, pending, self)  # type: ignore[no-untyped-call]
        return output

    def pack(self, rows: Sequence[Tensor], pending: PendingRows) -> Tensor:
        """The send buffer: per rank, each group's rows."""
        ordered = [part.index_select(0, order) for part, order in zip(rows, pending.orders, strict=True)]
        if len(ordered) == 1:
            return ordered[0].reshape(-1)
        per_group = [part.split([counts[group] for counts in pending.served]) for group, part in enumerate(ordered)]
        parts = [split[rank].reshape(-1) for rank in range(len(pending.served)) for split in per_group]
        return torch.cat(parts) if parts else torch.zeros(0, device=self._device)

    def unpack(self, buffer: Tensor, pending: PendingRows) -> list[Tensor]:
        """The transpose of :meth:`pack`: per group, (n, w) slot-major."""
        found: list[list[Tensor]] = [[] for _ in self.widths]
        sizes = [count * self.widths[group] for counts in pending.served for group, count in enumerate(counts)]
        groups = len(self.widths)
        for index, part in enumerate(buffer.split(sizes)):
            found[index % groups].append(part.view(-1, self.widths[index % groups]))
        result = []
        for parts, order in zip(found, pending.orders, strict=True):
            joined = torch.cat(parts)
            result.append(torch.empty_like(joined).index_copy_(0, order, joined))
        return result

    def _parts(self, counts: Sequence[int]) -> list[Shape]:
        return list(zip(counts, self.widths, strict=True))

    def _orders(self, served: ShardInput) -> list[Tensor]:
        orders, slot = [], 0
        for group, count in enumerate(served.group_ids):
            slots = self._group_slots[group]
            lengths = served.lengths[slot : slot + slots].reshape(-1)
            slot += slots
            places = torch.arange(count, device=self._device)
            if count:
                _, places, _ = torch.ops.fbgemm.permute_1D_sparse_data(
                    self._rank_major[group], lengths, places, None, count
                )
            orders.append(places)
        return orders

    def _target(self, trace: Trace, starts: Sequence[int]) -> Tensor:
        positions, slot_ids = trace.positions, trace.slot_ids
        units = self.dim // self.unit
        first = [
            start * units + slot.shard.col_start // self.unit for slot, start in zip(self._slots, starts, strict=True)
        ]
        count = positions.numel()
        per_slot = torch.tensor(first, dtype=torch.int64, device=self._device)
        base = positions * units + per_slot.repeat_interleave(slot_ids, output_size=count)
        widths = {slot.shard.cols // self.unit for slot in self._slots}
        if len(widths) <= 1:
            width = widths.pop() if widths else 1
            return (base.unsqueeze(1) + torch.arange(width, device=self._device)).reshape(-1)
        slot_width = torch.tensor([slot.shard.cols // self.unit for slot in self._slots], device=self._device)
        width_N = slot_width.repeat_interleave(slot_ids, output_size=count)
        ends = width_N.cumsum(0)
        inside = torch.arange(int(ends[-1]) if count else 0, device=self._device)
        inside -= (ends - width_N).repeat_interleave(width_N)
        return base.repeat_interleave(width_N) + inside


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, pending: PendingRows, exchange: RowExchange, *rows: Tensor) -> Tensor:
        ctx.pending, ctx.exchange = pending, exchange  # type: ignore[attr-defined]
        send = exchange.pack([part.detach() for part in rows], pending)
        pending.rows = exchange.output_wire.send(send, pending.parts_in, pending.parts_out, "output")
        return torch.zeros((), device=send.device)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, token_gradient: Tensor) -> tuple[Tensor | None, ...]:
        pending: PendingRows = ctx.pending
        assert pending.gradient is not None, "the output's gradient is sent before it is received"
        received = ctx.exchange.gradient_wire.receive(pending.gradient, pending.parts_out, "gradient")
        pending.gradient = None
        return None, None, *ctx.exchange.unpack(received, pending)


class _Finish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, token: Tensor, pending: PendingRows, exchange: RowExchange) -> Tensor:
        ctx.pending, ctx.exchange = pending, exchange  # type: ignore[attr-defined]
        assert pending.rows is not None, "a row exchange is finished once"
        received = exchange.output_wire.receive(pending.rows, pending.parts_in, "output")
        pending.rows = None
        units = exchange.dim // exchange.unit
        output = received.new_empty((pending.output_rows * units, exchange.unit))
        output.index_copy_(0, pending.target, received.view(-1, exchange.unit))
        return output.view(pending.output_rows, exchange.dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        pending: PendingRows = ctx.pending
        exchange: RowExchange = ctx.exchange
        send = gradient.reshape(-1, exchange.unit).index_select(0, pending.target).reshape(-1)
        if exchange.collectives.world_size > 1:
            send.div_(exchange.collectives.world_size)
        pending.gradient = exchange.gradient_wire.send(send, pending.parts_out, pending.parts_in, "gradient")
        return gradient.new_zeros(()), None, None

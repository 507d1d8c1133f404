"""Rows of sequences: one per id, laid out for the ranks that asked for them, and scattered into the output there.

Shapes: N_sent ids that this rank sent, M rows of the output, D columns of the output, n rows of a lookup group, w
columns of its shards, W ranks, S slots of all ranks, u columns of a column unit, U features that the tables use.

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
from itertools import accumulate, islice
from math import gcd
from typing import NamedTuple

import torch
from torch import Tensor, nn

from shardrec.exchange.bad_ids import places_of_rows
from shardrec.exchange.payload import ShardInput
from shardrec.exchange.route import Lookup, Route
from shardrec.exchange.to_device import staged
from shardrec.exchange.wire_format import Shape
from shardrec.step.records import Arrival, DifferentiableOutput, InFlight

_SOURCES = 64  # as in shardrec.exchange.payload


class SequenceKey(NamedTuple):
    """One entry of the output.

    Args:
        name: key of the output dict.
        ids: (N_f,) ids of the feature.
        lengths: (B,) ids per sample.
        replica: (N_f, D) rows, where the table is replicated; else None.
    """

    name: str
    ids: Tensor
    lengths: Tensor
    replica: Tensor | None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Pieces:
    """The output as the rows of one lookup after the other.

    Args:
        slots: per lookup, the number of its slot among the slots of all ranks.
        sizes: elements per lookup.
    """

    slots: list[int]
    sizes: list[int]

    @property
    def slot_sizes(self) -> list[int]:
        """Elements per slot."""
        size_of = dict(zip(self.slots, self.sizes, strict=True))
        return [size_of[slot] for slot in range(len(self.slots))]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Finishing:
    """What is known of a call's output before its rows come.

    Args:
        places: (M',) int64, per row of the value, its index among the M rows. None if the two orders are the same.
        has_zero_row: the rows follow a row of zeros, to which ``places`` refers as 0.
        entries: of the output.
    """

    places: Tensor | None
    has_zero_row: bool
    entries: list[SequenceKey]


class SequenceOutput:
    """The layout of rows.

    Args:
        route: of the ids. Each group's shards have one width.
        lookups: in the order of the output.
        sent_lookups: of cut tables, by the keys that are sent.
        replica_number: per replicated table, by its name in the plan.
        group_widths: columns per group.
        dim: columns D of the output.
        rank: this rank.
        device: where the rows are.
        dtype: of the output.
        mean_over: number of ranks over which gradients are averaged. Default: all.

    Attributes:
        widths: columns per group.
        column_unit: columns u of a column unit.
        slot_firsts: per slot of all ranks, the column unit of a row where its columns begin.
        slot_column_units: per slot of all ranks, its column units.
        is_identity: on one rank, the rows that were looked up are the output.
        pools: rows are not summed.
        hosts: nothing is summed inside hosts.
    """

    pools = False
    hosts = None

    def __init__(
        self,
        route: Route,
        lookups: Sequence[Lookup],
        sent_lookups: Sequence[Lookup],
        replica_number: dict[str, int],
        *,
        group_widths: Sequence[int],
        dim: int,
        rank: int,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        mean_over: int | None = None,
    ) -> None:
        self.dim = dim
        self.widths = tuple(group_widths)
        self.mean_over = mean_over or len(route.slots)
        self._lookups, self._dtype = tuple(lookups), dtype
        self.cut_lookups = [lookup for lookup in lookups if not lookup.layout.replicated]
        self.sent_lookups = tuple(sent_lookups)
        self.replica_number = replica_number
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
        # Per lookup, in the order of the output, its slot. None if tables are cut.
        self._pieces = sorted(range(len(slots)), key=slots.__getitem__) if route.in_whole else None
        is_alone = self.mean_over == len(route.slots) == 1
        self.is_identity = is_alone and route.groups == 1 and self._pieces == list(range(len(slots)))
        self.rank_major = lru_cache(maxsize=_SOURCES)(self._new_rank_major)

    def outgoing(
        self, rows: Sequence[Tensor], received: ShardInput, sums: Sequence[Tensor] = ()
    ) -> tuple[Tensor, list[list[Shape]]]:
        """The rows that this rank sends to each rank (on a server: to each request), one after the other, and their
        shapes.

        Args:
            rows: per group, (n, w) float32, slot-major.
            received: the ids that the ranks requested. These are their rows.
            sums: none.
        """
        out = [self.shapes(counts) for counts in received.counts]
        if not rows:
            return torch.zeros(0, dtype=torch.float32, device=self._device), out
        orders = self._orders(received)
        ordered = [
            part if order is None else part.index_select(0, order) for part, order in zip(rows, orders, strict=True)
        ]
        if len(ordered) == 1:
            return ordered[0].reshape(-1), out
        per_group = [part.split([counts[group] for counts in received.counts]) for group, part in enumerate(ordered)]
        return torch.cat([split[rank].reshape(-1) for rank in range(len(out)) for split in per_group]), out

    def returned(self, flat: Tensor, received: ShardInput) -> tuple[list[Tensor], list[Tensor]]:
        """The transpose of :meth:`outgoing`: the gradients of ``rows``, and none."""
        groups = len(self.widths)
        parts = flat.split([count * width for counts in received.counts for count, width in self.shapes(counts)])
        gradients = []
        for group, (order, width) in enumerate(zip(self._orders(received), self.widths, strict=True)):
            of_group = parts[group::groups]
            whole = flat if groups == 1 else of_group[0] if len(of_group) == 1 else torch.cat(of_group)
            rank_major = whole.view(-1, width)
            if order is not None:
                rank_major = torch.empty_like(rank_major).index_copy_(0, order, rank_major)
            gradients.append(rank_major)
        return gradients, []

    def shapes(self, counts: Sequence[int]) -> list[Shape]:
        """Gradients of the rows for some ids per group."""
        return list(zip(counts, self.widths, strict=True))

    def into(self, arrival: Arrival) -> list[list[Shape]]:
        """Per rank, the shapes of the parts that come from it."""
        return [self.shapes(counts) for counts in arrival.counts]

    def assemble(self, arrival: Arrival, blocks: Sequence[Tensor], replicated: Tensor | None) -> Tensor:
        """(M, D) float32 rows of the lookups of cut tables, from the blocks that came from each rank."""
        target = arrival.target
        if isinstance(target, _Pieces):
            received = self._slots_of(blocks, target.slot_sizes)
            return torch.cat([received[slot] for slot in target.slots]).view(-1, self.dim)
        units, column_unit = self.dim // self.column_unit, self.column_unit
        output = blocks[0].new_empty((arrival.rows * units, column_unit))
        targets = target.split([block.numel() // column_unit for block in blocks])
        for of_rank, block in zip(targets, blocks, strict=True):
            output.index_copy_(0, of_rank, block.view(-1, column_unit))
        return output.view(arrival.rows, self.dim)

    def distribute(self, arrival: Arrival, gradient: Tensor, blocks: Sequence[Tensor]) -> None:
        """The transpose of :meth:`assemble`: write the gradients of the blocks."""
        target = arrival.target
        if isinstance(target, _Pieces):
            received = self._slots_of(blocks, target.slot_sizes)
            for slot, part in zip(target.slots, gradient.reshape(-1).split(target.sizes), strict=True):
                received[slot].copy_(part)
        else:
            units = gradient.reshape(-1, self.column_unit)
            targets = target.split([block.numel() // self.column_unit for block in blocks])
            for block, of_rank in zip(blocks, targets, strict=True):
                torch.index_select(units, 0, of_rank, out=block.view(-1, self.column_unit))
        if self.mean_over > 1:
            # The mean over ranks: see shardrec.step.pooled_columns.
            torch._foreach_div_(list(blocks), self.mean_over)

    def counted(self, call: InFlight) -> tuple[Tensor, ...]:
        """What was counted when the batch was cut."""
        return call.counted

    def meanwhile(self, call: InFlight) -> None:
        """Compute the targets of the rows, and look up the replicated tables, while the rows are being exchanged."""
        call.arrival.target, call.arrival.rows = self._targets(call)
        full = _full_places(call)
        entries = self._entries(call, full)
        keys, key_ids, with_dropped = call.given.keys, call.counted_values[1], call.batch.with_dropped
        places = distinct_index = call.distinct_index
        features = [lookup.feature for lookup in self.cut_lookups]
        if with_dropped is not None:
            kept = _by_key(keys, with_dropped.kept, key_ids)
            parts = [kept[feature] for feature in features]
            places = places_of_rows(torch.cat([with_dropped.kept[:0], *parts]), distinct_index)
        elif distinct_index is not None:
            ids = dict(zip(keys, key_ids, strict=True))
            places = distinct_index[: sum(map(ids.__getitem__, features))]
        if full is not None:
            of_full = _rows_of_full(call, features, full[0])
            places = of_full if places is None else places.index_select(0, of_full)
        call.finishing = _Finishing(places=places, has_zero_row=with_dropped is not None, entries=entries)

    def finish(self, call: InFlight, rows: Tensor) -> tuple[Tensor, list[SequenceKey]]:
        """(N, D) rows of the cut tables, from the assembled rows, and the entries of the output; differentiable."""
        finishing: _Finishing = call.finishing
        if finishing.has_zero_row:
            rows = nn.functional.pad(rows, [0, 0, 1, 0])
        if finishing.places is not None:
            rows = rows.index_select(0, finishing.places)
        return rows.to(self._dtype), finishing.entries

    def differentiable(self, value: tuple[Tensor, list[SequenceKey]]) -> DifferentiableOutput:
        """What takes a gradient in a call's value: the rows of the lookups of cut tables."""
        rows, entries = value
        sizes = [entry.ids.numel() for entry in entries if entry.replica is None]
        return DifferentiableOutput(rows, sizes, 0, self.cut_lookups)

    def _targets(self, call: InFlight) -> tuple[Tensor | _Pieces, int]:
        """Where the rows go that come back, and the number M of output rows.

        The output's column unit per received unit, (column units of the received rows,) int64. Where no table is
        cut, the pieces that the output is made of.
        """
        key_start = dict(zip(call.to_send.keys, [0, *accumulate(call.counted_values[0])], strict=False))
        count = dict(zip(call.to_send.keys, call.counted_values[0], strict=True))
        sizes = [count[lookup.feature] for lookup in self.sent_lookups]
        starts = [0, *accumulate(sizes)]
        if self._pieces is not None:
            return _Pieces(slots=self._pieces, sizes=[size * self.dim for size in sizes]), starts[-1]
        assert call.positions is not None and call.slot_ids is not None, "the positions of the ids were kept"
        # Per lookup, an id's output row minus its position in to_send.
        apart = [start - key_start[lookup.feature] for lookup, start in zip(self.sent_lookups, starts, strict=False)]
        units = self.dim // self.column_unit
        pairs = zip(self.slot_firsts, self._slots, strict=True)
        first_S = staged([apart[slot.lookup] * units + first for first, slot in pairs], torch.int64, self._device)
        total = sum(ids * width for counts in call.counts for ids, width in zip(counts, self._units, strict=True))
        target = column_unit_targets(call.positions, call.slot_ids, first_S, self._slot_width, units, total)
        return target, starts[-1]

    def _entries(self, call: InFlight, full: tuple[Tensor, Tensor] | None) -> list[SequenceKey]:
        """The output's entries. ``full`` is :func:`_full_places`' value."""
        replicas, features = call.step.replicas, call.features
        keys, counts, with_dropped = call.given.keys, call.counted_values[1], call.batch.with_dropped
        ids, looked_up = features.values(), call.batch.values if with_dropped is None else with_dropped.values
        kept = None if with_dropped is None else with_dropped.kept
        lengths_of = dict(zip(keys, features.lengths().split(features.stride_per_key()), strict=True))
        if full is not None:
            places, lengths = full
            keys, counts = call.input.expect.features, call.counted_values[2]
            ids, looked_up = ids.index_select(0, places), looked_up.index_select(0, places)
            kept = None if kept is None else kept.index_select(0, places)
            lengths_of = dict(zip(keys, lengths.to(features.lengths().dtype).unbind(0), strict=True))
        ids_of = _by_key(keys, ids, counts)
        replicas_of: dict[str, Tensor] = {}
        if replicas is not None:
            looked_up_of = _by_key(keys, looked_up, counts)
            kept_of = None if kept is None else _by_key(keys, kept, counts)
            for lookup in self._lookups:
                if lookup.layout.replicated:
                    number = self.replica_number[lookup.layout.name]
                    replica = replicas.rows(number, looked_up_of[lookup.feature]).to(self._dtype)
                    if kept_of is not None:
                        replica = replica.masked_fill(kept_of[lookup.feature].logical_not().unsqueeze(1), 0)
                    replicas_of[lookup.output] = replica
        return [
            SequenceKey(
                lookup.output, ids_of[lookup.feature], lengths_of[lookup.feature], replicas_of.get(lookup.output)
            )
            for lookup in self._lookups
        ]

    def _slots_of(self, blocks: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
        """The parts of the blocks per slot of all ranks, whose elements are given."""
        left = iter(sizes)
        return [
            part
            for block, count in zip(blocks, self._rank_slots, strict=True)
            for part in block.split(list(islice(left, count)))
        ]

    def _orders(self, shard_input: ShardInput) -> list[Tensor | None]:
        """Per group, (n,) the slot-major place of each row in rank-major order. None if the two orders are one."""
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
    """The output's column unit per received unit. TorchScript also compiles it. It reads no value.

    Args:
        positions: (N_sent,) int64, position per sent id, in order of travel.
        slot_ids: (S,) number of ids per slot of all ranks.
        firsts: (S,) int64, output's column unit where an id's columns of the slot begin, less the columns of its
            position.
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


def _rows_of_full(call: InFlight, features: Sequence[str], places: Tensor) -> Tensor:
    """(M,) place, among the rows of the lookups of cut tables, per row of the full batch."""
    keys, key_ids = call.given.keys, call.counted_values[1]
    start = dict(zip(keys, [0, *accumulate(key_ids)], strict=False))
    count = dict(zip(keys, key_ids, strict=True))
    places_of = _by_key(call.input.expect.features, places, call.counted_values[2])
    row, parts = 0, [places[:0]]
    for feature in features:
        parts.append(places_of[feature] + (row - start[feature]))
        row += count[feature]
    return torch.cat(parts)


def _full_places(call: InFlight) -> tuple[Tensor, Tensor] | None:
    """With inverse indices, feature after feature and sample after sample of the full batch: the place of each id among
    those given (M,), and the lengths (U, B_full)."""
    if call.full is None:
        return None
    lengths, order = call.full
    places = torch.arange(sum(call.counted_values[1]), device=order.device)
    full_lengths, places, _ = torch.ops.fbgemm.permute_1D_sparse_data(
        order.flatten(), lengths, places, None, sum(call.counted_values[2])
    )
    return places, full_lengths.view_as(order)


def _by_key(keys: tuple[str, ...], values: Tensor, counts: Sequence[int]) -> dict[str, Tensor]:
    return dict(zip(keys, values.split(list(counts)), strict=True))

"""The input exchange: a KeyedJaggedTensor in, the ids of this rank's shards out, in two all-to-alls.

Shapes: F features of the input, U units, K blocks (see :mod:`shardrec.exchange.route`), S slots of all ranks, B local
batch size, W ranks, G lookup groups, N ids.

::

    header   (W, C) int64, row q to rank q:  batch size | fault | checksum | ids in group 0 | ... | ids in group G-1
    payload  int32, part q to rank q:        lengths (S_q, B) | ids (n_q,) | weights (n_q,)   ids are 1 or 2 words each
    result   ids slot by slot, each slot's samples rank by rank: what a table-batched kernel takes, and its pooled rows
             (sum of B, D) are then rank by rank, ready to be sent back
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from shardrec.exchange.check import NO_LIMIT, Batch, Expectation, describe_fault, ids_are_valid, read_batch
from shardrec.exchange.route import Route
from shardrec.exchange.step import FIXED_COLUMNS, StepContext, checksum

__all__ = ["InputExchange", "PendingInput", "ShardInput"]


@dataclass(frozen=True, kw_only=True)
class ShardInput:
    """The ids for this rank's shards.

    Args:
        lengths: (S_mine, B_all) int32; a slot's samples are ordered by the rank they come from.
        ids: (n,) int32 or int64, rows inside the shard.
        weights: (n,) float32, or None.
        batch_sizes: W sizes B_w; B_all is their sum.
        group_ids: number of ids of each lookup group; they lie in ``ids`` one group after the other.
        counts: ids from each rank, per group.
    """

    lengths: Tensor
    ids: Tensor
    weights: Tensor | None
    batch_sizes: tuple[int, ...]
    group_ids: tuple[int, ...]
    counts: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, kw_only=True)
class PendingInput:
    """A payload under way.

    Args:
        batch: the checked local input (lookups of replicated tables read it).
        payload: what :meth:`Collectives.all_to_all` gave, or None when there is nothing to exchange.
        local: the result itself when there is one rank.
        receive: words from each rank.
        batch_sizes: samples of each rank.
        counts: ids from each rank, per group.
        send: the packed buffer, kept until the exchange is over.
        sent: ids to each rank, per group.
        trace: where the sent ids were in the batch, if the exchange keeps track.
    """

    batch: Batch
    payload: Tensor | None
    local: ShardInput | None
    receive: tuple[int, ...]
    batch_sizes: tuple[int, ...]
    counts: tuple[tuple[int, ...], ...]
    send: Tensor | None
    sent: tuple[tuple[int, ...], ...]
    trace: Trace | None


@dataclass(frozen=True, kw_only=True)
class Trace:
    """Where the ids that were sent come from, when each is to get a row of its own.

    Args:
        positions: (N_sent,) int64, position of each sent id in the sent batch's values, in order of travel.
        slot_ids: (S,) number of ids of each slot of all ranks.
        sent_batch: the batch that was sent (the deduplicated one, where ids are).
        sent_key_ids: number of ids of each key of ``sent_batch``.
        key_ids: number of ids of each key of the local batch.
    """

    positions: Tensor
    slot_ids: Tensor
    sent_batch: Batch
    sent_key_ids: tuple[int, ...]
    key_ids: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class _KeyOrder:
    """Constants for one order of the input's keys."""

    units: Tensor  # (U,) position of each unit's key
    units_in_place: bool
    slots: Tensor  # (S,) position of each slot's key; used when there is one block


@dataclass(frozen=True, kw_only=True)
class _Cut:
    """A batch cut into blocks: ``lengths`` (K·U, B); ``values``, ``weights`` and ``positions`` (N,) in that order."""

    lengths: Tensor
    values: Tensor
    weights: Tensor | None
    positions: Tensor


class InputExchange:
    """Sends ids to the ranks that hold their rows.

    Args:
        route: where the ids of each lookup go.
        expect: what the input must look like.
        context: collectives and error handling, shared by the model's sharded modules.
        per_id: each id gets a row of its own, so that bags need not travel: all of a rank's samples go as one, and the
            positions of the ids are kept.
    """

    def __init__(self, route: Route, expect: Expectation, context: StepContext, *, per_id: bool = False) -> None:
        self._per_id = per_id
        self._route = route
        self._expect = expect
        self._context = context
        self._rank = context.collectives.rank
        self._world_size = context.collectives.world_size
        context.header_columns = max(context.header_columns, FIXED_COLUMNS + route.groups)
        self._orders: dict[tuple[str, ...], _KeyOrder] = {}
        self._limits: dict[tuple[str, ...], tuple[Tensor, bool]] = {}
        self._slot_counts = route.slot_counts()
        self._slot_edges = [0, *accumulate(self._slot_counts)]
        self._slot_rows = self._tensor(route.slot_rows)
        self._rows_in_place = route.slot_rows == tuple(range(route.blocks * len(route.unit_keys)))
        self._group_edges = self._tensor(_group_edges(route))
        self._block_sizes = self._tensor([boundaries[-1] for boundaries in route.unit_boundaries], self._id_dtype)
        self._boundaries = [
            self._tensor([*edges, *[edges[-1]] * (route.blocks + 1 - len(edges))], self._id_dtype)
            for edges in route.unit_boundaries
        ]
        mine = self._slot_counts[self._rank]
        self._slot_major = self._tensor(
            [source * mine + slot for slot in range(mine) for source in range(self._world_size)], torch.int32
        )

    @property
    def _id_dtype(self) -> torch.dtype:
        # Rows of the whole table decide here, for ids are cut after they are narrowed.
        rows = max((edges[-1] for edges in self._route.unit_boundaries), default=0)
        return torch.int64 if rows > 2**31 - 1 else torch.int32

    def start(
        self, features: object, agreement: str, *, prepare: Callable[[Batch], Batch] | None = None
    ) -> PendingInput:
        """Check the batch, exchange the header and issue the payload.

        Args:
            features: a KeyedJaggedTensor; keys in any order, further keys are ignored.
            agreement: what the ranks must have in common beyond the ids' dtype.
            prepare: makes the batch to send out of the checked one.

        Raises:
            InputError: on every rank, if the batch of any is faulty.
        """
        batch = read_batch(features, self._expect)
        fault = batch if isinstance(batch, str) else ""
        if isinstance(batch, str):
            batch = self._empty_batch()
        agreement = f"ids {str(batch.values.dtype).removeprefix('torch.')}, {agreement}"
        limits, unused_keys = self._key_limits(batch.keys)
        valid = ids_are_valid(batch, limits, unused_keys=unused_keys)
        safe = self._safe(batch, valid)
        sent = safe if prepare is None else prepare(safe)
        order = self._order(sent.keys)
        cut = self._cut(sent, order)
        slot_index = order.slots if self._route.blocks == 1 else self._slot_rows
        lengths_SB = cut.lengths.index_select(0, slot_index)
        size = safe.size
        notes: list[Tensor] = []
        if self._per_id:
            lengths_SB, size = lengths_SB.sum(dim=1, keepdim=True, dtype=torch.int32), 1
            notes = [sent.lengths.sum(dim=1, dtype=torch.int64), safe.lengths.sum(dim=1, dtype=torch.int64)]
        counts_WG = self._counts(lengths_SB)
        header = self._header(counts_WG, size, valid, fault, checksum(agreement))
        sent_counts, headers, noted = self._exchange_header(counts_WG, header, notes)
        if not self._context.check([h[1] for h in headers], [h[2] for h in headers], agreement):
            if not fault and headers[self._rank][1]:
                fault = describe_fault(batch, self._expect)
            self._context.raise_faults(fault, agreement)
        total = sum(map(sum, sent_counts))
        ids, weights = self._permute(slot_index, cut.lengths, cut.values, cut.weights, total)
        trace = None
        if self._per_id:
            positions, _ = self._permute(slot_index, cut.lengths, cut.positions, None, total)
            trace = Trace(
                positions=positions.to(torch.int64),
                slot_ids=lengths_SB.squeeze(1),
                sent_batch=sent,
                sent_key_ids=noted[0],
                key_ids=noted[1],
            )
        return self._send(safe, lengths_SB, ids, weights, sent_counts, headers, trace)

    def finish(self, pending: PendingInput) -> ShardInput:
        """Wait for the payload and put it slot by slot."""
        if pending.local is not None:
            return pending.local
        assert pending.payload is not None, "an exchange between ranks has a payload"
        buffer = self._context.collectives.wait(pending.payload, "payload")
        slots = self._slot_counts[self._rank]
        words = 2 if self._route.wide_ids else 1
        lengths, ids, weights = [], [], []
        for part, size, counts in zip(buffer.split(pending.receive), pending.batch_sizes, pending.counts, strict=True):
            count = sum(counts)
            head, body = slots * size, slots * size + count * words
            lengths.append(part[:head].view(slots, size))
            ids.append(part[head:body])
            weights.append(part[body:])
        lengths_SB = torch.cat(lengths, dim=1)
        total = sum(map(sum, pending.counts))
        flat_ids = _from_words(torch.cat(ids), self._route.wide_ids)
        flat_weights = torch.cat(weights).view(torch.float32) if self._expect.weighted else None
        if slots > 1 and total > 0:
            block_lengths = torch.stack([part.sum(dim=1, dtype=torch.int32) for part in lengths])
            _, flat_ids, flat_weights = torch.ops.fbgemm.permute_1D_sparse_data(
                self._slot_major, block_lengths.view(-1), flat_ids, flat_weights, total
            )
        group_ids = tuple(map(sum, zip(*pending.counts, strict=True)))
        return ShardInput(
            lengths=lengths_SB,
            ids=flat_ids,
            weights=flat_weights,
            batch_sizes=pending.batch_sizes,
            group_ids=group_ids,
            counts=pending.counts,
        )

    def _tensor(self, values: Sequence[int], dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.tensor(list(values), dtype=dtype, device=self._expect.device)

    def _order(self, keys: tuple[str, ...]) -> _KeyOrder:
        order = self._orders.get(keys)
        if order is None:
            position = {key: index for index, key in enumerate(keys)}
            units = [position[key] for key in self._route.unit_keys]
            slots = [units[slot.unit] for rank_slots in self._route.slots for slot in rank_slots]
            order = _KeyOrder(
                units=self._tensor(units),
                units_in_place=units == list(range(len(keys))),
                slots=self._tensor(slots),
            )
            self._orders[keys] = order
        return order

    def _key_limits(self, keys: tuple[str, ...]) -> tuple[Tensor, bool]:
        """(F,) one more than the largest id allowed, per key, and whether some keys are not looked up."""
        if keys not in self._limits:
            limits = [self._expect.rows(key) for key in keys]
            self._limits[keys] = self._tensor(limits), NO_LIMIT in limits
        return self._limits[keys]

    def _empty_batch(self) -> Batch:
        keys = tuple(dict.fromkeys(key for key, _, _ in self._expect.tables))
        device = self._expect.device
        return Batch(
            keys=keys,
            lengths=torch.zeros((len(keys), 0), dtype=torch.int32, device=device),
            values=torch.zeros(0, dtype=torch.int64, device=device),
            weights=torch.zeros(0, device=device) if self._expect.weighted else None,
        )

    def _safe(self, batch: Batch, valid: Tensor) -> Batch:
        """The batch as the kernels take it: contiguous, and of empty bags if it is not valid."""
        values, weights = batch.values.to(self._id_dtype), batch.weights
        if values.device.type == "cpu" and not bool(valid):
            # The CPU's kernels compare the number of ids with the lengths; those of CUDA read by the lengths alone.
            values, weights = values[:0], None if weights is None else weights[:0]
        return Batch(
            keys=batch.keys,
            lengths=(batch.lengths.to(torch.int32) * valid).contiguous(),
            values=values.contiguous(),
            weights=None if weights is None else weights.float().contiguous(),
        )

    def _cut(self, batch: Batch, order: _KeyOrder) -> _Cut:
        """The batch cut into the blocks of each unit, as (K·U, B) lengths; as it is when there is one block."""
        lengths, values, weights = batch.lengths, batch.values, batch.weights
        positions = torch.arange(values.numel() if self._per_id else 0, dtype=torch.int32, device=values.device)
        if self._route.blocks == 1:
            return _Cut(lengths=lengths, values=values, weights=weights, positions=positions)
        if not order.units_in_place:
            units = order.units.to(torch.int32)
            if self._per_id:
                _, positions, _ = torch.ops.fbgemm.permute_2D_sparse_data(units, lengths, positions, None, None)
            lengths, values, weights = torch.ops.fbgemm.permute_2D_sparse_data(units, lengths, values, weights, None)
        cut_lengths, cut_values, cut_weights, _, place = torch.ops.fbgemm.block_bucketize_sparse_features(
            lengths.reshape(-1),
            values,
            bucketize_pos=False,
            sequence=self._per_id,
            block_sizes=self._block_sizes,
            my_size=self._route.blocks,
            weights=weights,
            block_bucketize_pos=self._boundaries,
        )
        if self._per_id:
            positions = torch.empty_like(positions).index_copy_(0, place.to(torch.int64), positions)
        units_count = len(self._route.unit_keys)
        return _Cut(
            lengths=cut_lengths.view(self._route.blocks * units_count, batch.size),
            values=cut_values,
            weights=cut_weights,
            positions=positions,
        )

    def _counts(self, lengths_SB: Tensor) -> Tensor:
        """(W, G) int64: ids for each rank and lookup group."""
        ends_S = torch.ops.fbgemm.asynchronous_complete_cumsum(lengths_SB.sum(dim=1, dtype=torch.int64))
        edges: Tensor = ends_S.index_select(0, self._group_edges)
        return edges.diff().view(self._world_size, self._route.groups)

    def _header(self, counts_WG: Tensor, size: int, valid: Tensor, fault: str, agreed: int) -> Tensor:
        header = counts_WG.new_zeros((self._world_size, self._context.header_columns))
        header[:, 0] = size
        header[:, 1] = 1 if fault else valid.logical_not()
        header[:, 2] = agreed
        header[:, FIXED_COLUMNS : FIXED_COLUMNS + self._route.groups] = counts_WG
        return header

    def _exchange_header(
        self, counts_WG: Tensor, header: Tensor, notes: Sequence[Tensor]
    ) -> tuple[tuple[tuple[int, ...], ...], list[list[int]], list[tuple[int, ...]]]:
        """Exchange headers; what was sent, received and noted comes to the host in one copy."""
        received = self._context.exchange_header(header)
        numbers: list[int] = torch.cat([counts_WG.flatten(), *notes, received.flatten()]).tolist()
        groups, width = self._route.groups, self._context.header_columns
        sent = tuple(tuple(numbers[q * groups : (q + 1) * groups]) for q in range(self._world_size))
        start = self._world_size * groups
        noted = []
        for note in notes:
            noted.append(tuple(numbers[start : start + note.numel()]))
            start += note.numel()
        headers = [numbers[row : row + width] for row in range(start, len(numbers), width)]
        return sent, headers, noted

    def _permute(
        self, slot_index: Tensor, rows: Tensor, values: Tensor, weights: Tensor | None, total: int
    ) -> tuple[Tensor, Tensor | None]:
        """Ids and weights slot by slot."""
        if self._route.blocks > 1 and self._rows_in_place:
            return values, weights
        _, ids, permuted_weights = torch.ops.fbgemm.permute_2D_sparse_data(
            slot_index.to(torch.int32), rows, values, weights, total
        )
        return ids, permuted_weights

    def _send(
        self,
        batch: Batch,
        lengths_SB: Tensor,
        ids: Tensor,
        weights: Tensor | None,
        sent: tuple[tuple[int, ...], ...],
        headers: list[list[int]],
        trace: Trace | None,
    ) -> PendingInput:
        batch_sizes = tuple(header[0] for header in headers)
        groups = self._route.groups
        counts = tuple(tuple(header[FIXED_COLUMNS : FIXED_COLUMNS + groups]) for header in headers)
        if self._world_size == 1:
            local = ShardInput(
                lengths=lengths_SB,
                ids=ids,
                weights=weights,
                batch_sizes=batch_sizes,
                group_ids=counts[0],
                counts=counts,
            )
            return PendingInput(
                batch=batch,
                payload=None,
                local=local,
                receive=(),
                batch_sizes=batch_sizes,
                counts=counts,
                send=None,
                sent=sent,
                trace=trace,
            )
        words = (2 if self._route.wide_ids else 1) + (weights is not None)
        totals = [sum(per_group) for per_group in sent]
        size = lengths_SB.size(1)
        sizes = [slots * size + count * words for slots, count in zip(self._slot_counts, totals, strict=True)]
        packed = self._pack(lengths_SB, ids, weights, totals)
        mine = self._slot_counts[self._rank]
        receive = tuple(mine * size + sum(count) * words for size, count in zip(batch_sizes, counts, strict=True))
        payload = self._context.collectives.all_to_all(packed, receive, sizes, "payload")
        return PendingInput(
            batch=batch,
            payload=payload,
            local=None,
            receive=receive,
            batch_sizes=batch_sizes,
            counts=counts,
            send=packed,
            sent=sent,
            trace=trace,
        )

    def _pack(self, lengths_SB: Tensor, ids: Tensor, weights: Tensor | None, totals: list[int]) -> Tensor:
        """The payload: per rank its lengths, ids and weights as int32 words."""
        dtype = torch.int64 if self._route.wide_ids else torch.int32
        id_parts = ids.to(dtype).split(totals)
        weight_parts = weights.split(totals) if weights is not None else None
        parts = []
        for rank in range(self._world_size):
            parts.append(lengths_SB[self._slot_edges[rank] : self._slot_edges[rank + 1]].reshape(-1))
            parts.append(id_parts[rank].view(torch.int32))
            if weight_parts is not None:
                parts.append(weight_parts[rank].view(torch.int32))
        return torch.cat(parts)


def _from_words(words: Tensor, wide: bool) -> Tensor:
    return words.view(torch.int64) if wide else words


def _group_edges(route: Route) -> list[int]:
    """Where each rank's groups begin among the slots: W·G + 1 positions."""
    edges, position = [0], 0
    for rank_slots in route.slots:
        for group in range(route.groups):
            position += sum(slot.group == group for slot in rank_slots)
            edges.append(position)
    return edges

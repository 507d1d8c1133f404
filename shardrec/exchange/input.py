"""The input exchange: a KeyedJaggedTensor in, the ids of this rank's shards out, in two all-to-alls.

Shapes: F features of the input, S slots of all ranks (see :mod:`shardrec.exchange.route`), B local batch size, W ranks,
G lookup groups, N ids.

::

    header   (W, C) int64, row q to rank q:  batch size | fault | checksum | ids in group 0 | ... | ids in group G-1
    payload  int32, part q to rank q:        lengths | ids | weights (see :mod:`shardrec.exchange.payload`)
    result   ids slot by slot, each slot's samples rank by rank: what a table-batched kernel takes, and its pooled rows
             (sum of B, D) are then rank by rank, ready to be sent back
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shardrec.exchange.check import NO_LIMIT, Batch, Expectation, describe_fault, ids_are_valid, read_batch
from shardrec.exchange.cut import Cutter, SlotIds
from shardrec.exchange.payload import Payload
from shardrec.exchange.route import Route
from shardrec.exchange.step import FIXED_COLUMNS, StepContext, checksum

__all__ = ["InputExchange", "PendingInput", "ShardInput", "Trace"]


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
        batch_sizes: samples of each rank.
        counts: ids from each rank, per group.
        send: the packed buffer, kept until the exchange is over.
        sent: ids to each rank, per group.
        trace: where the sent ids were in the batch, if the exchange keeps track.
    """

    batch: Batch
    payload: Tensor | None
    local: ShardInput | None
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
        self._limits: dict[tuple[str, ...], tuple[Tensor, bool]] = {}
        self._cutter = Cutter(route, expect.device, keep_positions=per_id)
        self._payload = Payload(route, self._rank, weighted=expect.weighted, device=expect.device)
        self._group_edges = torch.tensor(_group_edges(route), dtype=torch.int64, device=expect.device)

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
        cut = self._cutter.cut(sent)
        lengths_SB, size = cut.lengths, safe.size
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
        slot_ids = self._cutter.in_slots(cut, sum(map(sum, sent_counts)))
        trace = None
        if slot_ids.positions is not None:
            trace = Trace(
                positions=slot_ids.positions,
                slot_ids=lengths_SB.squeeze(1),
                sent_batch=sent,
                sent_key_ids=noted[0],
                key_ids=noted[1],
            )
        return self._send(safe, lengths_SB, slot_ids, sent_counts, headers, trace)

    def finish(self, pending: PendingInput) -> ShardInput:
        """Wait for the payload and put it slot by slot."""
        if pending.local is not None:
            return pending.local
        assert pending.payload is not None, "an exchange between ranks has a payload"
        buffer = self._context.collectives.wait(pending.payload, "payload")
        totals = [sum(counts) for counts in pending.counts]
        lengths, ids, weights = self._payload.unpack(buffer, pending.batch_sizes, totals)
        return self._shard_input(lengths, ids, weights, pending.batch_sizes, pending.counts)

    def _shard_input(
        self,
        lengths: Tensor,
        ids: Tensor,
        weights: Tensor | None,
        batch_sizes: tuple[int, ...],
        counts: tuple[tuple[int, ...], ...],
    ) -> ShardInput:
        return ShardInput(
            lengths=lengths,
            ids=ids,
            weights=weights,
            batch_sizes=batch_sizes,
            group_ids=tuple(map(sum, zip(*counts, strict=True))),
            counts=counts,
        )

    def _key_limits(self, keys: tuple[str, ...]) -> tuple[Tensor, bool]:
        """(F,) one more than the largest id allowed, per key, and whether some keys are not looked up."""
        if keys not in self._limits:
            limits = [self._expect.rows(key) for key in keys]
            self._limits[keys] = torch.tensor(limits, dtype=torch.int64, device=self._expect.device), NO_LIMIT in limits
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
        values, weights = batch.values.to(self._cutter.id_dtype), batch.weights
        if values.device.type == "cpu" and not bool(valid):
            # The CPU's kernels compare the number of ids with the lengths; those of CUDA read by the lengths alone.
            values, weights = values[:0], None if weights is None else weights[:0]
        return Batch(
            keys=batch.keys,
            lengths=(batch.lengths.to(torch.int32) * valid).contiguous(),
            values=values.contiguous(),
            weights=None if weights is None else weights.float().contiguous(),
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

    def _send(
        self,
        batch: Batch,
        lengths_SB: Tensor,
        slot_ids: SlotIds,
        sent: tuple[tuple[int, ...], ...],
        headers: list[list[int]],
        trace: Trace | None,
    ) -> PendingInput:
        batch_sizes = tuple(header[0] for header in headers)
        groups = self._route.groups
        counts = tuple(tuple(header[FIXED_COLUMNS : FIXED_COLUMNS + groups]) for header in headers)
        local, payload, packed = None, None, None
        if self._world_size == 1:
            local = self._shard_input(lengths_SB, slot_ids.ids, slot_ids.weights, batch_sizes, counts)
        else:
            totals_out, totals_in = [sum(part) for part in sent], [sum(part) for part in counts]
            packed = self._payload.pack(lengths_SB, slot_ids.ids, slot_ids.weights, totals_out)
            sizes_out = self._payload.sizes_out(lengths_SB.size(1), totals_out)
            sizes_in = self._payload.sizes_in(batch_sizes, totals_in)
            payload = self._context.collectives.all_to_all(packed, sizes_in, sizes_out, "payload")
        return PendingInput(
            batch=batch,
            payload=payload,
            local=local,
            batch_sizes=batch_sizes,
            counts=counts,
            send=packed,
            sent=sent,
            trace=trace,
        )


def _group_edges(route: Route) -> list[int]:
    """Where each rank's groups begin among the slots: W·G + 1 positions."""
    edges, position = [0], 0
    for rank_slots in route.slots:
        for group in range(route.groups):
            position += sum(slot.group == group for slot in rank_slots)
            edges.append(position)
    return edges

"""A sharded module's part of the input exchange: its batch checked, cut by rank, and packed.

Shapes: F keys of the input, U features that the tables use, S slots of all ranks (see :mod:`shardrec.exchange.route`),
B local batch size, W ranks, G lookup groups, N ids.

::

    prepare   KeyedJaggedTensor ──► Batch: read and checked ──► Cut: its ids in blocks of rows (by the C++ operator:
              in slots) ──► Prepared: with their numbers
    header    (W, 2 + G) int64, row q to rank q:  batch size | words of bags | ids in group 0 | ... | in group G-1
    pack      ──► SentIds: in slots, the tensors for each rank (shardrec.exchange.payload), and where each id was

:mod:`shardrec.exchange.call` exchanges the headers and payloads of several modules together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor, nn

from shardrec.exchange import launching
from shardrec.exchange.bad_ids import POLICIES, mended
from shardrec.exchange.batch import KEY_ORDERS, NO_LIMIT, Batch, Expectation, read_batch
from shardrec.exchange.check import add_up, describe_fault, ids_are_valid
from shardrec.exchange.cut import Cut, Cutter
from shardrec.exchange.dedup import DistinctIds
from shardrec.exchange.headers import Headers
from shardrec.exchange.payload import HEADER_SIZES, Payload
from shardrec.exchange.route import Route
from shardrec.exchange.to_device import staged

__all__ = ["FullBatch", "InputPacker", "Prepared", "SentIds"]

_REPEATS = 4  # calls of one module that a header has room for; further ones go into another exchange


class FullBatch(NamedTuple):
    """The bag of each sample of the full batch, for a batch with inverse indices.

    Args:
        lengths: (F·(B + 1),) int32 ids of each key's bags as they were given, with an empty bag after each key's.
        order: (U, B_full) int32 index in ``lengths`` of each sample's bag.
    """

    lengths: Tensor
    order: Tensor


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A batch that was checked and cut, before any exchange between ranks.

    Args:
        batch: the checked local input, of empty bags if it is faulty (read for bag lengths and inverse indices, and of
            sequences for replicated tables).
        given: the input as it was read (for words about faults, keys, weights with a gradient); empty if unreadable.
        to_send: what is cut: ``batch``, or its distinct ids.
        distinct_index: (N,) int64 index of each id of the lookups among the distinct ids; None if all ids are sent.
        cut: ``to_send`` cut into blocks.
        lengths: (S, B) int32 lengths of each slot; (S, 1), their sums, if each id gets its own row.
        slot_sizes: batch size of each of the S slots, if they differ; else None.
        valid: 0-d bool, whether structure, lengths and ids are sound.
        fault: what is wrong with the structure, or "".
        agreement: the properties that must be equal on all ranks, as text.
        extra_counts: further int64 counts, read on the host with the header; ``SentIds`` holds their values.
        weights_require_grad: the weights of the ids take a gradient.
        bad_ids: (U,) int64 number of bad ids of each feature for which they are not an error; None if not counted.
        full: the full batch of a batch with inverse indices, if each id gets its own row; else None.
    """

    batch: Batch
    given: Batch
    to_send: Batch
    distinct_index: Tensor | None
    cut: Cut
    lengths: Tensor
    slot_sizes: tuple[int, ...] | None
    valid: Tensor
    fault: str
    agreement: str
    extra_counts: tuple[Tensor, ...]
    weights_require_grad: bool
    bad_ids: Tensor | None
    full: FullBatch | None


@dataclass(frozen=True, kw_only=True)
class SentIds:
    """A batch as it is sent, once its sizes are known from the header.

    Args:
        parts: per rank, the tensors of its part; see :meth:`Payload.pack`.
        counts: ids to each rank, per group.
        slot_ids: (S,) number of ids of each slot of all ranks; None without ``positions``.
        positions: (N_sent,) int64, position of each sent id, in order of travel: in ``Prepared.to_send``'s values if
            each id gets its own row, else in the local batch's values as they were given. None if not needed.
        sent_key_ids: number of ids of each key of ``to_send``; empty unless each id gets its own row.
        key_ids: number of ids of each key of the local batch as it was given; empty unless each id gets its own row.
        full_ids: number of ids of each feature in the full batch, with ``Prepared.full``; else empty.
        replica_ids: number of ids of each lookup of a replicated table; empty if each id gets its own row.
    """

    parts: list[list[Tensor]]
    counts: tuple[tuple[int, ...], ...]
    slot_ids: Tensor | None
    positions: Tensor | None
    sent_key_ids: tuple[int, ...]
    key_ids: tuple[int, ...]
    full_ids: tuple[int, ...]
    replica_ids: tuple[int, ...]


class InputPacker:
    """Prepares a module's ids for the ranks that hold their rows.

    Args:
        route: where the ids of each lookup go.
        expect: what the input must look like.
        headers: of the model, in each of which this module gets its columns.
        per_id: each id gets a row of its own, so that bags need not travel: all of a rank's samples go as one, and the
            positions of the ids are kept, unless they are in order.
        distinct: finds the distinct ids of each table, which are sent in place of all; default: all are sent.

    Attributes:
        cutter: cuts batches into slots.
        payload: packs what is sent and unpacks what is received.
        group_edges: (W·G + 1,) int64, where each rank's groups begin among the slots.
        columns: width of a call's part of a header.
        shard_rows: (S_mine,) int64, on the CPU, the rows of the shard of each of this rank's slots.
        bad_ids: (U,) int64, per feature, ids outside its table that were no error, in the batches so far.
    """

    def __init__(
        self,
        route: Route,
        expect: Expectation,
        headers: Headers,
        *,
        per_id: bool = False,
        distinct: DistinctIds | None = None,
    ) -> None:
        self.per_id = per_id
        self.distinct = distinct
        self.route = route
        self.expect = expect
        self._rank = headers.collectives.rank
        self._world_size = headers.collectives.world_size
        self.columns = HEADER_SIZES + route.groups
        headers.add_module(_REPEATS * self.columns)
        self._headers = headers
        self._key_limits = lru_cache(maxsize=KEY_ORDERS)(self._new_limits)
        self._key_policies = lru_cache(maxsize=KEY_ORDERS)(self._new_policies)
        self.cutter = Cutter(route, expect.device)
        self.payload = Payload(route, self._rank, weighted=expect.weighted, device=expect.device)
        sizes = (sum(slot.group == group for slot in slots) for slots in route.slots for group in range(route.groups))
        self.group_edges = torch.tensor([0, *accumulate(sizes)], dtype=torch.int64, device=expect.device)
        self._drops = "zero" in expect.on_bad_id.values()
        self.shard_rows = torch.tensor([slot.shard.rows for slot in route.slots[self._rank]], dtype=torch.int64)
        self.bad_ids = torch.zeros(len(expect.features), dtype=torch.int64, device=expect.device)

    def retire(self) -> None:
        """Give back the columns of each header, for an exchange that takes this one's place."""
        self._headers.columns -= _REPEATS * self.columns
        self._headers.modules -= 1

    def prepare(self, features: object, agreement: str, fault: str = "") -> Prepared:
        """Check the batch and cut it. Raises nothing for a faulty batch; waits for the device only for dynamic ids.

        Args:
            features: a KeyedJaggedTensor; keys in any order, further keys are ignored.
            agreement: what the ranks must have in common beyond the ids' dtype.
            fault: of the module, or "".
        """
        input_batch = read_batch(features, self.expect)
        if isinstance(input_batch, str):
            fault = fault or input_batch
            input_batch = self._empty_batch()
        weights_require_grad = (
            input_batch.weights is not None and input_batch.weights.requires_grad and torch.is_grad_enabled()
        )
        agreement = f"ids {str(input_batch.values.dtype).removeprefix('torch.')}, {agreement}"
        agreement += ", weights with gradient" if weights_require_grad else ""
        limits, unlimited = self._key_limits(input_batch.keys)
        valid = ids_are_valid(input_batch, limits, unlimited=unlimited)
        whole, bad_ids = input_batch, None
        if self.expect.on_bad_id and input_batch.size and (valid.is_cuda or not bool(valid)):
            whole, valid, bad_ids = self._mended(input_batch)
        if fault:
            valid = torch.zeros_like(valid)
        safe = self._safe(whole, valid)
        chosen, distinct_index = (safe, None) if self.distinct is None else self.distinct(safe)
        reordered = self.per_id and not self.route.in_whole
        cut = self.cutter.cut(chosen, keep_positions=reordered or weights_require_grad, given=input_batch)
        lengths_SB = cut.lengths
        slot_sizes = None
        extra_counts: tuple[Tensor, ...] = ()
        full: FullBatch | None = None
        if self.per_id:
            lengths_SB = lengths_SB.sum(dim=1, keepdim=True, dtype=torch.int32)
            local = safe.lengths if safe.with_dropped is None else safe.with_dropped.lengths
            sent_ids = chosen.lengths.sum(dim=1, dtype=torch.int64)
            extra_counts = sent_ids, sent_ids if local is chosen.lengths else local.sum(dim=1, dtype=torch.int64)
            if safe.inverse is not None:
                full = self._full(input_batch.keys, local, safe.inverse * valid)
                full_lengths = full.lengths.index_select(0, full.order.flatten()).view_as(full.order)
                extra_counts += (full_lengths.sum(dim=1, dtype=torch.int64),)
        elif chosen.sizes is not None and self._world_size > 1:
            slot_sizes = self._slot_sizes(chosen.keys, chosen.sizes)
        return Prepared(
            batch=safe,
            given=input_batch,
            to_send=chosen,
            distinct_index=distinct_index,
            cut=cut,
            lengths=lengths_SB,
            slot_sizes=slot_sizes,
            valid=valid,
            fault=fault,
            agreement=agreement,
            extra_counts=extra_counts,
            weights_require_grad=weights_require_grad,
            bad_ids=bad_ids,
            full=full,
        )

    def write_header(self, prepared: Prepared, header: Tensor, column: int, checksum: int) -> None:
        """Write the call's part of the header for each rank, and its fault.

        Args:
            prepared: the batch.
            header: (W, C) int64, zeros but for the parts of other calls.
            column: where the call's part begins.
            checksum: for the header.
        """
        lengths_SB = prepared.lengths
        if self.route.groups and launching.has_kernels(header.device):
            grid = self._world_size * self.route.groups, 32
            valid, place = prepared.valid.view(torch.int8), (header.size(1), column, checksum)
            values = (lengths_SB, self.group_edges, valid, header, lengths_SB.size(1), self.route.groups, *place)
            constants = {"SIZES": HEADER_SIZES, "SHARES": grid[1], "BLOCK": 1024}
            launching.launch("shardrec.exchange.input_kernels", "write_header", grid, *values, **constants)
        else:
            header[:, 0].logical_or_(prepared.valid.logical_not())
            header[:, 1] = checksum
            header[:, column] = lengths_SB.size(1)
            header[:, column + HEADER_SIZES : column + self.columns] = self._counts(lengths_SB)
        if prepared.slot_sizes is not None:
            words = self.payload.bag_words(prepared.slot_sizes)
            header[:, column + 1] = staged(words, torch.int64, header.device)

    def describe(self, prepared: Prepared) -> str:
        """What is wrong with the batch, or "". Reads tensors on the host."""
        if prepared.fault or bool(prepared.valid):
            return prepared.fault
        return describe_fault(prepared.given, self.expect)

    def pack(self, prepared: Prepared, counts: Sequence[int], extra_counts: Sequence[Sequence[int]]) -> SentIds:
        """Put the ids in slots and pack them, once the header exchange has brought the sizes to the host.

        Args:
            prepared: the batch.
            counts: ids for each rank and lookup group, rank after rank: the header's.
            extra_counts: values of ``prepared.extra_counts``.
        """
        if prepared.bad_ids is not None:
            self.bad_ids += prepared.bad_ids
        groups = self.route.groups
        counts_WG = tuple(tuple(counts[q * groups : (q + 1) * groups]) for q in range(self._world_size))
        values, weights, positions = self.cutter.in_slots(prepared.cut, sum(counts))
        if positions is not None and not self.per_id:
            positions = prepared.to_send.input_positions(positions)
        totals = [sum(rank_counts) for rank_counts in counts_WG]
        return SentIds(
            parts=self.payload.pack(prepared.lengths, values, weights, totals, prepared.slot_sizes),
            counts=counts_WG,
            slot_ids=None if positions is None else prepared.lengths.sum(dim=1),
            positions=positions,
            sent_key_ids=tuple(extra_counts[0]) if self.per_id else (),
            key_ids=tuple(extra_counts[1]) if self.per_id else (),
            full_ids=() if prepared.full is None else tuple(extra_counts[2]),
            replica_ids=tuple(extra_counts[0]) if extra_counts and not self.per_id else (),
        )

    def _full(self, keys: tuple[str, ...], lengths: Tensor, inverse: Tensor) -> FullBatch:
        """Of (F, B) lengths and (U, B_full) inverse indices, which are 0 if the batch is bad."""
        lengths = nn.functional.pad(lengths, [0, 1])  # so that 0 is a bag also of a batch without bags
        starts = self._key_policies(keys)[1] * lengths.size(1)
        return FullBatch(lengths=lengths.flatten(), order=(inverse + starts.unsqueeze(1)).to(torch.int32))

    def _new_limits(self, keys: tuple[str, ...]) -> tuple[Tensor, bool]:
        """(F,) one more than the largest id allowed, per key, and whether some keys allow any."""
        limits = [self.expect.rows(key) for key in keys]
        return torch.tensor(limits, dtype=torch.int64, device=self.expect.device), NO_LIMIT in limits

    def _mended(self, batch: Batch) -> tuple[Batch, Tensor, Tensor]:
        """The batch without the bad ids that are no error, whether it is sound, and their number per feature (U,)."""
        limits, _ = self._key_limits(batch.keys)
        policies, places = self._key_policies(batch.keys)
        whole, bad_F = mended(batch, limits, policies, drops=self._drops)
        limits, unlimited = self._key_limits(whole.keys)
        lengths = batch.lengths
        fit = add_up(lengths, lengths.sum(dim=1, dtype=torch.int64), batch.values.numel())
        return whole, fit & ids_are_valid(whole, limits, unlimited=unlimited), bad_F.index_select(0, places)

    def _new_policies(self, keys: tuple[str, ...]) -> tuple[Tensor, Tensor]:
        """(F,) number of each key's policy, and (U,) place of each feature among the keys."""
        numbers = [POLICIES.index(self.expect.on_bad_id.get(key, "error")) for key in keys]
        places = [keys.index(feature) for feature in self.expect.features]
        device = self.expect.device
        return torch.tensor(numbers, device=device), torch.tensor(places, dtype=torch.int64, device=device)

    def _slot_sizes(self, keys: tuple[str, ...], sizes: tuple[int, ...]) -> tuple[int, ...]:
        size_of = dict(zip(keys, sizes, strict=True))
        unit_sizes = [size_of[key] for key in self.route.unit_keys]
        return tuple(unit_sizes[slot.unit] for rank_slots in self.route.slots for slot in rank_slots)

    def _empty_batch(self) -> Batch:
        keys = self.expect.features
        device = self.expect.device
        return Batch(
            keys=keys,
            lengths=torch.zeros((len(keys), 0), dtype=torch.int32, device=device),
            values=torch.zeros(0, dtype=torch.int64, device=device),
            weights=torch.zeros(0, dtype=torch.float32, device=device) if self.expect.weighted else None,
        )

    def _safe(self, batch: Batch, valid: Tensor) -> Batch:
        """The batch as the kernels take it: contiguous, and of empty bags if it is not valid."""
        values, weights = batch.values.to(self.cutter.id_dtype), batch.weights
        if values.device.type == "cpu" and not bool(valid):
            # The CPU's kernels compare the number of ids with the lengths; those of CUDA read by the lengths alone.
            values, weights = values[:0], None if weights is None else weights[:0]
        with_dropped = batch.with_dropped
        return replace(
            batch,
            lengths=(batch.lengths.to(torch.int32) * valid).contiguous(),
            values=values.contiguous(),
            weights=None if weights is None else weights.detach().float().contiguous(),
            with_dropped=None if with_dropped is None else replace(with_dropped, lengths=with_dropped.lengths * valid),
        )

    def _counts(self, lengths_SB: Tensor) -> Tensor:
        """(W, G) int64: ids for each rank and lookup group."""
        # A slot's ids fit 32 bits, and torch adds int32 up as int32 ten times as fast as it does as int64.
        ids_S = lengths_SB.sum(dim=1, dtype=torch.int32).to(torch.int64)
        ends_S = torch.ops.fbgemm.asynchronous_complete_cumsum(ids_S)
        edges: Tensor = ends_S.index_select(0, self.group_edges)
        return edges.diff().view(self._world_size, self.route.groups)

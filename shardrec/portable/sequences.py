"""A sharded embedding collection as operators and plain data: its twin for TorchScript, torch.compile and export.

The same steps as :mod:`shardrec.modules.sequences`, :mod:`shardrec.exchange.dedup` and :mod:`shardrec.exchange.rows`.
"""

from __future__ import annotations

from itertools import accumulate
from math import gcd
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from shardrec._torchscript import list_of
from shardrec.exchange.bad_ids import places_of_rows
from shardrec.modules.live import parameters_of
from shardrec.pending import Await, awaitable
from shardrec.portable.bags import refuse_quantized, slots_per_group
from shardrec.portable.input import ScriptedInput
from shardrec.portable.rows import arrived_rows, exchange_rows

if TYPE_CHECKING:
    from shardrec.modules.sequences import ShardedEmbeddingCollection

__all__ = ["ScriptedSequences"]


Issued = tuple[Tensor, Tensor, int, int, Tensor, bool, list[int], list[Tensor], list[Tensor], list[Tensor]]
"""Rows under way, their places, how many; number of rows, the place of each id's among them, whether that counts from a
zero row before them, rows of each cut output; rows of each replicated output; ids and lengths of each output."""


class ScriptedSequences(nn.Module):
    """The scripted twin of a :class:`ShardedEmbeddingCollection`, with its live parameters.

    Args:
        collection: the eager module.
    """

    def __init__(self, collection: ShardedEmbeddingCollection) -> None:
        super().__init__()
        collectives, device = collection.context.collectives, collection.device
        comms = collection.context.comms
        if collectives.world_size > 1:
            refuse_quantized(collection, comms.output, comms.gradient)
        outputs = collection._lookups
        sent, route, groups = collection._sent_lookups, collection._route, collection._groups
        self.embeddings = parameters_of(collection.embeddings)
        self.input = ScriptedInput(route, collection._expect, collectives, collection._input.bad_ids, per_id=True)
        self.lookups, _ = collection._shards.scripted(training=collection.training)
        self.group_slots = list_of(int, slots_per_group(route, collectives.rank))
        self.rank = collectives.rank
        self.world_size = collectives.world_size
        self.dim = collection.embedding_dim()
        self.need_indices = collection.need_indices()
        self.widths = list_of(int, [group.width or 0 for group in groups])
        slots = [slot for rank_slots in route.slots for slot in rank_slots]
        self.unit = gcd(self.dim, *(group.width or 0 for group in groups), *(slot.shard.col_start for slot in slots))
        self.slot_lookups = list_of(int, [slot.lookup for slot in slots])
        self.slot_firsts = list_of(int, [slot.shard.col_start // self.unit for slot in slots])
        self.slot_units = list_of(int, [slot.shard.cols // self.unit for slot in slots])
        self.sent_features = list_of(str, [one.feature for one in sent])
        self.dedup = collection._dedup and len(sent) > 0
        starts = [0, *accumulate(one.layout.num_embeddings for one in sent)]
        first = dict(zip((one.layout.name for one in sent), starts, strict=False))
        self.dedup_features = list_of(str, [feature for feature, _ in collection._dedup_lookups])
        firsts = [first[table] for _, table in collection._dedup_lookups]
        self.dedup_firsts = torch.tensor(firsts, dtype=torch.int64, device=device)
        self.dedup_edges = torch.tensor(starts, dtype=torch.int64, device=device)
        self.names = list_of(str, [one.output for one in outputs])
        self.features = list_of(str, [one.feature for one in outputs])
        own = [one for one in outputs if one.layout.replicated]
        numbers = [collection._replica_number[one.layout.name] for one in own]
        replicas = collection._replicas
        self.replicas = nn.ModuleList(
            [] if replicas is None else [replicas.scripted([number], pooled=False) for number in numbers]
        )
        # Per output key, the number of its replica, or -1.
        places = iter(range(len(own)))
        self.replica_of = list_of(int, [next(places) if one.layout.replicated else -1 for one in outputs])
        orders = [
            [
                slot * self.world_size + rank
                for rank in range(self.world_size)
                for slot in range(sum(one.group == group for one in route.slots[self.rank]))
            ]
            for group in range(len(groups))
        ]
        self.rank_major = list_of(Tensor, [torch.tensor(order, dtype=torch.int32, device=device) for order in orders])
        self.output_dtype = collection.output_dtype
        self.nothing = torch.zeros(0, device=device)
        self.anchor = torch.zeros(0, device=device, requires_grad=True)

    def forward(self, features: KeyedJaggedTensor) -> Await[dict[str, JaggedTensor]]:
        """Look up the local batch."""
        pending, target, units, rows_back, inverse, zeros, sizes, replicas, ids, lengths = self.begin(features)
        return awaitable(
            finish_sequences,
            pending,
            self.world_size,
            target,
            units,
            rows_back,
            inverse,
            self.dedup,
            zeros,
            self.dim,
            self.unit,
            sizes,
            self.names,
            self.replica_of,
            replicas,
            ids,
            lengths,
            self.need_indices,
            self.output_dtype,
        )

    @torch.jit.unused
    def traced(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """The same for a tracer: the value itself."""
        pending, target, units, rows_back, inverse, zeros, sizes, replicas, ids, lengths = self.begin(features)
        return finish_sequences(
            pending,
            self.world_size,
            target,
            units,
            rows_back,
            inverse,
            self.dedup,
            zeros,
            self.dim,
            self.unit,
            sizes,
            self.names,
            self.replica_of,
            replicas,
            ids,
            lengths,
            self.need_indices,
            self.output_dtype,
        )

    def begin(self, features: KeyedJaggedTensor) -> Issued:
        """The rows under way, and what puts them in place."""
        checked = self.input.checked(features)
        keys, local, values = checked.keys, checked.lengths, checked.values
        sent_keys, sent_lengths, sent_values = keys, local, values
        inverse = self.nothing
        key_ids = ids_per_key(local, values.size(0))
        if self.dedup:
            sent_keys = self.sent_features
            sent_lengths, sent_values, inverse = self.distinct(keys, key_ids, local, values)
        lengths, found_ids, _, _, came, went, positions, slot_ids = self.input.exchange(
            features, checked, sent_keys, sent_lengths, sent_values
        )
        assert positions is not None
        into: list[int] = []
        out: list[int] = []
        for rank in range(self.world_size):
            arriving, leaving = 0, 0
            for group, width in enumerate(self.widths):
                arriving += went[rank][group] * width
                leaving += came[rank][group] * width
            into.append(arriving)
            out.append(leaving)
        flat = self.look_up(lengths, found_ids, came)
        pending = exchange_rows(flat, into, out, self.input.process_group.group_name, self.anchor)
        units = 0
        for counts in went:
            for group, width in enumerate(self.widths):
                units += counts[group] * (width // self.unit)
        sent_ids = key_ids
        if self.dedup:
            sent_ids = ids_per_key(sent_lengths, sent_values.size(0))
        target = self.targets(sent_keys, sent_ids, positions, slot_ids, units)
        rows_back = 0
        for feature in self.sent_features:
            rows_back += sent_ids[sent_keys.index(feature)]
        ids_of: list[Tensor] = []
        lengths_of: list[Tensor] = []
        sizes: list[int] = []
        replicas: list[Tensor] = []
        raw_values, raw_lengths = features.values(), features.lengths()
        if raw_values.size(0) != values.size(0):
            # A batch with a fault, of which a tracer takes the empty one that was sent.
            raw_values, raw_lengths = values, local.flatten()
        if checked.dropped:
            keys = features.keys()
            key_ids = ids_per_key(checked.given, values.size(0))
        by_key = raw_values.split(key_ids)
        looked_up = checked.looked_up.split(key_ids)
        lengths_by_key = raw_lengths.view(len(keys), -1)
        for place, feature in enumerate(self.features):
            ids_of.append(by_key[keys.index(feature)])
            lengths_of.append(lengths_by_key[keys.index(feature)])
            if self.replica_of[place] < 0:
                sizes.append(key_ids[keys.index(feature)])
        if checked.dropped:
            kept = checked.kept.split(key_ids)
            some: list[Tensor] = [checked.kept[:0]]
            for place, feature in enumerate(self.features):
                if self.replica_of[place] < 0:
                    some.append(kept[keys.index(feature)])
            inverse = places_of_rows(torch.cat(some), inverse if self.dedup else None)
        for number, replica in enumerate(self.replicas):
            for place, which in enumerate(self.replica_of):
                if which == number:
                    key = keys.index(self.features[place])
                    rows = replica(looked_up[key], lengths_of[place].unsqueeze(0), None)
                    if checked.dropped:
                        rows = rows.masked_fill(checked.kept.split(key_ids)[key].logical_not().unsqueeze(1), 0)
                    replicas.append(rows)
        return pending, target, units, rows_back, inverse, checked.dropped, sizes, replicas, ids_of, lengths_of

    def look_up(self, lengths: Tensor, ids: Tensor, came: list[list[int]]) -> Tensor:
        """The rows for all ranks as one flat tensor, rank after rank and in a rank group after group."""
        totals: list[int] = []
        for group in range(len(self.group_slots)):
            total = 0
            for per_group in came:
                total += per_group[group]
            totals.append(total)
        ids_of = ids.split(totals)
        lengths_of = lengths.split(self.group_slots)
        parts: list[list[Tensor]] = []
        for group, lookup in enumerate(self.lookups):
            total = totals[group]
            rows = lookup(ids_of[group], lengths_of[group], None)
            if self.group_slots[group] > 0:
                places = torch.arange(total, device=self.nothing.device)
                places = torch.ops.fbgemm.permute_1D_sparse_data(
                    self.rank_major[group], lengths_of[group].reshape(-1), places, None, total
                )[1]
                rows = rows.index_select(0, places)
            counts: list[int] = []
            for per_group in came:
                counts.append(per_group[group])
            parts.append(list(rows.split(counts)))
        flat: list[Tensor] = [self.nothing]
        for rank in range(self.world_size):
            for part in parts:
                flat.append(part[rank].reshape(-1))
        return torch.cat(flat)

    def distinct(
        self, keys: list[str], key_ids: list[int], lengths: Tensor, values: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(tables, 1) numbers of distinct ids, the ids, and the place of each id among them."""
        order: list[int] = []
        total = 0
        for feature in self.dedup_features:
            order.append(keys.index(feature))
            total += key_ids[keys.index(feature)]
        index = torch.tensor(order, dtype=torch.int32, device=values.device)
        lengths, ids, _ = torch.ops.fbgemm.permute_2D_sparse_data(index, lengths, values, None, total)
        counts = lengths.sum(dim=1, dtype=torch.int64)
        linear = ids + self.dedup_firsts.repeat_interleave(counts, output_size=ids.numel())
        distinct, inverse, _ = torch._unique2(linear, sorted=True, return_inverse=True)
        per_table = torch.searchsorted(distinct, self.dedup_edges).diff()
        start = self.dedup_edges[:-1].repeat_interleave(per_table, output_size=distinct.numel())
        return per_table.to(torch.int32).unsqueeze(1), (distinct - start).to(values.dtype), inverse

    def targets(self, keys: list[str], key_ids: list[int], positions: Tensor, slot_ids: Tensor, total: int) -> Tensor:
        """Where each of the ``total`` received units goes in the output; see :mod:`shardrec.exchange.rows`."""
        key_starts: list[int] = [0]
        for count in key_ids:
            key_starts.append(key_starts[-1] + count)
        offsets: list[int] = []
        row = 0
        for feature in self.sent_features:
            key = keys.index(feature)
            offsets.append(row - key_starts[key])
            row += key_ids[key]
        units = self.dim // self.unit
        firsts: list[int] = []
        for slot, lookup in enumerate(self.slot_lookups):
            firsts.append(offsets[lookup] * units + self.slot_firsts[slot])
        device = positions.device
        count = positions.numel()
        first_N = torch.tensor(firsts, dtype=torch.int64, device=device).repeat_interleave(slot_ids, output_size=count)
        base = positions * units + first_N
        width_N = torch.tensor(self.slot_units, dtype=torch.int64, device=device).repeat_interleave(
            slot_ids, output_size=count
        )
        ends = width_N.cumsum(0)
        inside = torch.arange(total, device=device)
        inside = inside - (ends - width_N).repeat_interleave(width_N, output_size=total)
        return base.repeat_interleave(width_N, output_size=total) + inside


def ids_per_key(lengths: Tensor, total: int) -> list[int]:
    """Number of ids of each row of ``lengths`` (F, B), on the host; ``total`` of them."""
    counts: list[int] = lengths.sum(dim=1).tolist()
    if not torch.jit.is_scripting():
        for count in counts:
            torch._check(count >= 0)
        torch._check(sum(counts) == total)
    return counts


def finish_sequences(
    pending: Tensor,
    world_size: int,
    target: Tensor,
    units: int,
    rows_back: int,
    inverse: Tensor,
    dedup: bool,
    zeros: bool,
    dim: int,
    unit: int,
    sizes: list[int],
    names: list[str],
    replica_of: list[int],
    replicas: list[Tensor],
    ids: list[Tensor],
    lengths: list[Tensor],
    need_indices: bool,
    dtype: torch.dtype,
) -> dict[str, JaggedTensor]:
    """Wait for the rows and put each in its place."""
    received = arrived_rows(pending, world_size).view(units, unit)
    rows = received.new_zeros([rows_back * (dim // unit), unit]).index_copy(0, target, received).view(rows_back, dim)
    if zeros:
        rows = nn.functional.pad(rows, [0, 0, 1, 0])
    if dedup or zeros:
        rows = rows.index_select(0, inverse)
    parts = rows.split(sizes)
    found: dict[str, JaggedTensor] = {}
    number = 0
    for place, name in enumerate(names):
        values = received
        if replica_of[place] < 0:
            values = parts[number]
            number += 1
        else:
            values = replicas[replica_of[place]]
        values = values.to(dtype=dtype)
        found[name] = JaggedTensor(values, lengths=lengths[place], weights=ids[place] if need_indices else None)
    return found

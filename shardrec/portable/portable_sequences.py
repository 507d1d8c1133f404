"""A sharded embedding collection as operators and plain data: its portable twin.

It takes the steps of :mod:`shardrec.modules.sequences`, :mod:`shardrec.exchange.dedup` and
:mod:`shardrec.step.sequence_rows`.
"""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from shardrec._torchscript import counts_of, list_of
from shardrec.exchange.bad_ids import places_of_rows
from shardrec.exchange.dedup import distinct
from shardrec.modules.live_twins import parameters_of
from shardrec.pending import Await, awaitable
from shardrec.portable.portable_input import Received, constant
from shardrec.portable.portable_module import PortableTwin
from shardrec.step.sequence_rows import column_unit_targets

if TYPE_CHECKING:
    from shardrec.modules.sequences import ShardedEmbeddingCollection


class PortableSequences(PortableTwin):
    """The portable twin of a :class:`ShardedEmbeddingCollection`."""

    def __init__(self, collection: ShardedEmbeddingCollection) -> None:
        super().__init__(collection)
        device = collection.device
        outputs = collection.lookups
        sent, route = collection.sent_lookups, collection.input.route
        self.embeddings = parameters_of(collection.embeddings)
        self.dim = collection.embedding_dim()
        self.need_indices = collection.need_indices()
        rows = collection.output_layout
        self.column_unit = rows.column_unit
        self.slot_lookups = list_of(int, [slot.lookup for slots in route.slots for slot in slots])
        self.widths = list_of(int, list(rows.widths))
        self.slot_firsts = list_of(int, rows.slot_firsts)
        self.slot_column_units = torch.tensor(list(rows.slot_column_units), dtype=torch.int64, device=device)
        self.sent_features = list_of(str, [lookup.feature for lookup in sent])
        self.dedup = collection.finds_distinct and len(sent) > 0
        starts = [0, *accumulate(lookup.layout.num_embeddings for lookup in sent)]
        first = dict(zip((lookup.layout.name for lookup in sent), starts, strict=False))
        self.dedup_features = list_of(str, [feature for feature, _ in collection.dedup_lookups])
        firsts = [first[table] for _, table in collection.dedup_lookups]
        self.dedup_firsts = torch.tensor(firsts, dtype=torch.int64, device=device)
        self.dedup_edges = torch.tensor(starts, dtype=torch.int64, device=device)
        self.names = list_of(str, [lookup.output for lookup in outputs])
        self.features = list_of(str, [lookup.feature for lookup in outputs])
        # Numbers of the outputs that are rows of replicated tables, and of the others.
        self.replicated = list_of(int, [number for number, lookup in enumerate(outputs) if lookup.layout.replicated])
        self.cut = list_of(int, [number for number, lookup in enumerate(outputs) if not lookup.layout.replicated])
        numbers = [collection.replica_number[lookup.layout.name] for lookup in outputs if lookup.layout.replicated]
        replicas = collection.replicas
        self.replicas = nn.ModuleList(
            [] if replicas is None else [replicas.scripted([number], pooled=False) for number in numbers]
        )
        self.rank_major = list_of(Tensor, rows.rank_major(self.world_size))

    def forward(self, features: KeyedJaggedTensor) -> Await[dict[str, JaggedTensor]]:
        """Look up the local batch."""
        checked = self.input.checked(features)
        keys, local, values = checked.keys, checked.lengths, checked.values
        sent_keys, sent_lengths, sent_values = keys, local, values
        places: Tensor | None = None
        key_ids = counts_of(local.sum(dim=1), values.size(0))
        if self.dedup:
            sent_keys = self.sent_features
            sent_lengths, sent_values, places = self.distinct(keys, key_ids, local, values)
        got = self.input.exchange(checked, sent_keys, sent_lengths, sent_values)
        came, went = got.came, got.went
        into = [sum([count * self.widths[group] for group, count in enumerate(counts)]) for counts in went]
        out = [sum([count * self.widths[group] for group, count in enumerate(counts)]) for counts in came]
        ids = got.ids
        mask: Tensor | None = None
        for maps in self.id_maps:
            ids, mask = maps(got.lengths, ids)
        flat = self.look_up(got.lengths, ids, mask, came)
        pending = self.exchange_rows(flat, into, out)
        sent_ids = key_ids
        if self.dedup:
            sent_ids = counts_of(sent_lengths.sum(dim=1), sent_values.size(0))
        target, rows_back = self.targets(sent_keys, sent_ids, got, sum(into) // self.column_unit)
        raw_values, raw_lengths = features.values(), features.lengths()
        if raw_values.size(0) != values.size(0):
            # A batch with a fault. A tracer takes the empty batch that was sent.
            raw_values, raw_lengths = values, local.flatten()
        kept: list[Tensor] = []
        if checked.dropped:
            keys = features.keys()
            key_ids = counts_of(checked.given.sum(dim=1), values.size(0))
            kept = list(checked.kept.split(key_ids))
        key_of = [keys.index(feature) for feature in self.features]
        cut = [key_of[number] for number in self.cut]
        if checked.dropped:
            places = places_of_rows(torch.cat([checked.kept[:0]] + [kept[key] for key in cut]), places)
        ids_of, lengths_of = raw_values.split(key_ids), raw_lengths.view(len(keys), -1)
        looked_up = checked.looked_up.split(key_ids)
        replicas: list[Tensor] = []
        for number, replica in enumerate(self.replicas):
            key = key_of[self.replicated[number]]
            rows = replica(looked_up[key], lengths_of[key : key + 1], None)
            if checked.dropped:
                rows = rows.masked_fill(kept[key].logical_not().unsqueeze(1), 0)
            replicas.append(rows)
        return awaitable(
            self.finish,
            pending,
            target,
            rows_back,
            places,
            checked.dropped,
            [key_ids[key] for key in cut],
            replicas,
            [ids_of[key] for key in key_of],
            [lengths_of[key] for key in key_of],
        )

    def look_up(self, lengths: Tensor, ids: Tensor, mask: Tensor | None, came: list[list[int]]) -> Tensor:
        """The rows for all ranks as one flat tensor, rank after rank and in a rank group after group.

        ``mask`` (n,) is 0 for ids with rows of zeros, and 1 otherwise.
        """
        lengths_of = lengths.split(self.group_slots)
        rows_of = self.by_group(lengths, ids, None, came)
        parts: list[list[Tensor]] = []
        totals = [sum([per_group[group] for per_group in came]) for group in range(len(rows_of))]
        for group, rows in enumerate(rows_of):
            if mask is not None:
                rows = rows.masked_fill(mask.split(totals)[group].unsqueeze(1) == 0, 0.0)
            if self.group_slots[group] > 0:
                places = torch.arange(totals[group], device=self.nothing.device)
                places = torch.ops.fbgemm.permute_1D_sparse_data(
                    self.rank_major[group], lengths_of[group].reshape(-1), places, None, totals[group]
                )[1]
                rows = rows.index_select(0, places)
            parts.append(list(rows.split([per_group[group] for per_group in came])))
        flat: list[Tensor] = [self.nothing]
        for rank in range(self.world_size):
            flat.extend([part[rank].reshape(-1) for part in parts])
        return torch.cat(flat)

    def distinct(
        self, keys: list[str], key_ids: list[int], lengths: Tensor, values: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(tables, 1) numbers of distinct ids, the ids, and the place per id among them."""
        order = [keys.index(feature) for feature in self.dedup_features]
        total = sum([key_ids[key] for key in order])
        index = constant(order, torch.int32, values.device)
        return distinct(index, lengths, values, self.dedup_firsts, self.dedup_edges, total)

    def targets(self, keys: list[str], key_ids: list[int], sent: Received, total: int) -> tuple[Tensor, int]:
        """Where each of the ``total`` received column units goes, and the number of rows in which they go."""
        key_starts: list[int] = [0]
        for count in key_ids:
            key_starts.append(key_starts[-1] + count)
        offsets: list[int] = []
        row = 0
        for feature in self.sent_features:
            key = keys.index(feature)
            offsets.append(row - key_starts[key])
            row += key_ids[key]
        units = self.dim // self.column_unit
        firsts = [offsets[lookup] * units + self.slot_firsts[slot] for slot, lookup in enumerate(self.slot_lookups)]
        positions = sent.positions
        assert positions is not None
        first_S = constant(firsts, torch.int64, positions.device)
        return column_unit_targets(positions, sent.slot_ids, first_S, self.slot_column_units, units, total), row

    def finish(
        self,
        pending: Tensor,
        target: Tensor,
        count: int,
        places: Tensor | None,
        zeros: bool,
        sizes: list[int],
        replicas: list[Tensor],
        ids: list[Tensor],
        lengths: list[Tensor],
    ) -> dict[str, JaggedTensor]:
        """Wait for the rows and put each in its place.

        Args:
            pending: the all-to-all.
            target: (n,) int64, where each column unit that comes goes.
            count: number of rows in which the units go.
            places: (M,) int64, the place of each id's row among them. None if they are the ids'.
            zeros: the places count from a zero row before the rows.
            sizes: rows per output of a cut table.
            replicas: rows per output of a replicated table.
            ids: per output.
            lengths: per output.
        """
        unit = self.column_unit
        received = self.arrived_rows(pending).view(target.size(0), unit)
        rows = received.new_zeros([count * (self.dim // unit), unit]).index_copy(0, target, received)
        rows = rows.view(count, self.dim)
        if zeros:
            rows = nn.functional.pad(rows, [0, 0, 1, 0])
        if places is not None:
            rows = rows.index_select(0, places)
        cut, whole = list(rows.split(sizes)), list(replicas)
        by_name: dict[str, JaggedTensor] = {}
        for number, name in enumerate(self.names):
            values = whole.pop(0) if number in self.replicated else cut.pop(0)
            weights = ids[number] if self.need_indices else None
            by_name[name] = JaggedTensor(values.to(self.output_dtype), lengths=lengths[number], weights=weights)
        return by_name

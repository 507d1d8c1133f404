"""A sharded ``EmbeddingCollection``: a row for each id, in the order of the ids, with its tables spread over the ranks.

Shapes: B samples of this rank, N_f ids of a feature, D columns of the tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from shardrec.exchange.bad_ids import places_of_rows
from shardrec.exchange.call import Call, DifferentiableOutput
from shardrec.exchange.context import ModelContext
from shardrec.exchange.dedup import DistinctIds
from shardrec.exchange.payload import ShardInput
from shardrec.exchange.prepared_input import Prepared, SentIds
from shardrec.exchange.route import Lookup
from shardrec.exchange.row_exchange import BlocksInFlight, Stream
from shardrec.exchange.row_output import SequenceOutputLayout
from shardrec.layout import ShardingPlan
from shardrec.lookup.groups import group_tables
from shardrec.modules.collection import ShardedCollection
from shardrec.modules.live_twins import LiveSequences
from shardrec.modules.storage import Storage
from shardrec.pending import LazyAwaitable, LazyGetItemMixin

__all__ = ["SequenceCall", "SequenceEmbeddings", "SequenceKey", "ShardedEmbeddingCollection"]


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


class SequenceEmbeddings(LazyGetItemMixin[str, JaggedTensor], LazyAwaitable[dict[str, JaggedTensor]]):
    """A dict of JaggedTensors whose all-to-all is in progress or about to begin; its first use waits, also
    ``pending["f"]``.

    Args:
        call: gives the (N, D) rows of the cut tables' lookups and the output's entries.
        need_indices: give each JaggedTensor its ids as weights.
    """

    def __init__(self, call: Call, *, need_indices: bool) -> None:
        super().__init__()
        self._call = call
        self._need_indices = need_indices

    def _wait_impl(self) -> dict[str, JaggedTensor]:
        rows, entries = self._call.value()
        with self._call.mode():
            parts = iter(rows.split([entry.ids.numel() for entry in entries if entry.replica is None]))
            return {
                entry.name: JaggedTensor(
                    values=next(parts) if entry.replica is None else entry.replica,
                    lengths=entry.lengths,
                    weights=entry.ids if self._need_indices else None,
                )
                for entry in entries
            }


class ShardedEmbeddingCollection(ShardedCollection):
    """An EmbeddingCollection whose tables are cut over the ranks of a process group.

    Takes a KeyedJaggedTensor of the local batch and returns a lazily awaited dict of JaggedTensors, as the unsharded
    module does, rows in the order of the ids under every cut. If each feature has its own batch size and there are
    inverse indices, each sample of the full batch gets the rows of its bag, as from TorchRec's sharded module (the
    unsharded one ignores inverse indices). It makes one header, one payload and one output all-to-all in forward and
    one all-to-all in backward. Gradients are means over the ranks.

    Args:
        module: the unsharded collection, on the CPU, on ``device``, or on meta (then its values are drawn:
            docs/guide.md), whose optimizers given by ``apply_optimizer_in_backward`` are fused; or a sharded one, of
            the same plan, which is copied.
        plan: holds a layout for each table, under ``qualified_name(path, table)``.
        path: the module's path in the model; "" by itself.
        device: where the shards live; default: the CPU.
        group: the process group; default: the default group, or a single rank without one.
        context: shared by the sharded modules of a model; default: a new one.
        storage: of the tables; default: kernels that train.
        dedup: send and look up each distinct id of a table once per batch. A single rank on CUDA, which sends nothing,
            does so only for dynamic ids and tables of tier ``"host"``.

    Raises:
        PlanError: if the plan does not fit the tables or the group.
        ConfigError: for a table type or an optimizer that cannot be sharded.
    """

    _holder = "embeddings"
    _by_width = True
    embeddings: nn.ModuleDict

    def __init__(
        self,
        module: EmbeddingCollection | ShardedEmbeddingCollection,
        plan: ShardingPlan,
        *,
        path: str = "",
        device: torch.device | str | None = None,
        group: dist.ProcessGroup | None = None,
        context: ModelContext | None = None,
        storage: Storage | None = None,
        dedup: bool = True,
    ) -> None:
        self.dedup: bool = getattr(module, "dedup", dedup)  # before the lookups are made
        super().__init__(module, plan, path=path, device=device, group=group, context=context, storage=storage)

    def _read(self, module: Any) -> None:
        self._need_indices: bool = module.need_indices()
        self._embedding_dim: int = module.embedding_dim()
        self._names_by_table: list[list[str]] = module.embedding_names_by_table()

    def _build_lookups(self) -> None:
        collectives = self.context.collectives
        self.groups = groups = group_tables(self._lookup_tables.values(), self.device, by_width=self._by_width)
        lookups: list[Lookup] = []
        for config, names in zip(self._configs, self._names_by_table, strict=True):
            layout = self.table_layouts[config.name]
            width_groups = tuple(
                (group.width, index)
                for index, group in enumerate(groups)
                if group.width is not None and layout in group.layouts
            )
            for feature, name in zip(config.feature_names, names, strict=True):
                lookups.append(
                    Lookup(
                        feature=feature,
                        layout=layout,
                        group=0,
                        output=name,
                        dynamic=self._is_dynamic(layout),
                        width_groups=width_groups,
                    )
                )
        self.lookups = tuple(lookups)
        sharded = [lookup for lookup in lookups if not lookup.layout.replicated]
        dynamic = any(lookup.dynamic for lookup in lookups)
        on_host = any(lookup.layout.tier == "host" for lookup in lookups)
        self.finds_distinct = self.dedup and (
            dynamic or on_host or distinct_ids_pay(self.device, collectives.world_size)
        )
        if self.finds_distinct:
            by_table = {lookup.layout.name: lookup for lookup in sharded}
            self.sent_lookups = tuple(replace(lookup, feature=name, output=name) for name, lookup in by_table.items())
        else:
            self.sent_lookups = tuple(sharded)
        self.dedup_lookups = [(lookup.feature, lookup.layout.name) for lookup in sharded]
        limits = [(lookup.feature, lookup.layout.num_embeddings) for lookup in self.sent_lookups]
        distinct = DistinctIds(self.dedup_lookups, limits, self.device, dynamic) if self.finds_distinct else None
        route = self._make(groups, lookups, self.sent_lookups, weighted=False, pooled=False, distinct=distinct)
        widths = [group.width or 0 for group in groups]
        self.output_layout = SequenceOutputLayout(
            route, widths, self._embedding_dim, collectives.rank, self.device, mean_over=collectives.mean_over
        )

    def new_call(self, features: KeyedJaggedTensor) -> SequenceCall:
        """A forward's call, whose ids are not under way yet."""
        return SequenceCall(self, features)

    def _pending(self, call: Call) -> LazyAwaitable[dict[str, JaggedTensor]]:
        return SequenceEmbeddings(call, need_indices=self._need_indices)

    def serve(self, shard_input: ShardInput) -> Stream:
        """The rows of this rank's shards for requests: the rows of each request, one request after the other."""
        return self.output_layout.stream(self.shards.rows(shard_input), shard_input, ())

    def scripted_twin(self) -> nn.Module:
        """What TorchScript of this process sees in this module's place; :mod:`shardrec.portable` has another."""
        return LiveSequences(
            self,
            self.embeddings,
            partial(_flat_rows, need_ids=self._need_indices),
            self.lookups,
            width=self._embedding_dim,
            need_indices=self._need_indices,
        )

    def embedding_configs(self) -> list[EmbeddingConfig]:
        """The configs of the unsharded collection."""
        return self._configs

    def embedding_dim(self) -> int:
        """Columns of every table."""
        return self._embedding_dim

    def need_indices(self) -> bool:
        """Whether each JaggedTensor has its ids as weights."""
        return self._need_indices

    def embedding_names_by_table(self) -> list[list[str]]:
        """Output keys of each table."""
        return self._names_by_table

    def _targets(self, prepared: Prepared, sent: SentIds) -> tuple[Any, int]:
        """Where the rows go that come back; and the number of output rows."""
        key_start = dict(zip(prepared.to_send.keys, [0, *accumulate(sent.sent_key_ids)], strict=False))
        count = dict(zip(prepared.to_send.keys, sent.sent_key_ids, strict=True))
        sizes = [count[lookup.feature] for lookup in self.sent_lookups]
        starts = [0, *accumulate(sizes)]
        # Per lookup, an id's output row minus its position in to_send.
        apart = [start - key_start[lookup.feature] for lookup, start in zip(self.sent_lookups, starts, strict=False)]
        of_slots = [apart[slot.lookup] for slots in self.input.route.slots for slot in slots]
        return self.output_layout.targets(sent, of_slots, sizes), starts[-1]

    def _entries(
        self, prepared: Prepared, sent: SentIds, features: KeyedJaggedTensor, full: tuple[Tensor, Tensor] | None
    ) -> list[SequenceKey]:
        """The output's entries; ``full`` is :func:`_full_places`' value."""
        keys, counts, with_dropped = prepared.given.keys, sent.key_ids, prepared.batch.with_dropped
        ids, looked_up = features.values(), prepared.batch.values if with_dropped is None else with_dropped.values
        kept = None if with_dropped is None else with_dropped.kept
        lengths_of = dict(zip(keys, features.lengths().split(features.stride_per_key()), strict=True))
        if full is not None:
            places, lengths = full
            keys, counts = self.input.expect.features, sent.full_ids
            ids, looked_up = ids.index_select(0, places), looked_up.index_select(0, places)
            kept = None if kept is None else kept.index_select(0, places)
            lengths_of = dict(zip(keys, lengths.to(features.lengths().dtype).unbind(0), strict=True))
        ids_of, looked_up_of = _by_key(keys, ids, counts), _by_key(keys, looked_up, counts)
        kept_of = None if kept is None else _by_key(keys, kept, counts)
        entries = []
        for lookup in self.lookups:
            replica = None
            if lookup.layout.replicated:
                assert self.replicas is not None, "a replicated table has a replicated lookup"
                number = self.replica_number[lookup.layout.name]
                replica = self.replicas.rows(number, looked_up_of[lookup.feature]).to(self.output_dtype)
                if kept_of is not None:
                    replica = replica.masked_fill(kept_of[lookup.feature].logical_not().unsqueeze(1), 0)
            entries.append(
                SequenceKey(
                    name=lookup.output,
                    ids=ids_of[lookup.feature],
                    lengths=lengths_of[lookup.feature],
                    replica=replica,
                )
            )
        return entries

    def _rows_of(self, keys: tuple[str, ...], sent: SentIds, places: Tensor) -> Tensor:
        """(M,) place, among the rows of the lookups of cut tables, of each row of the full batch."""
        start = dict(zip(keys, [0, *accumulate(sent.key_ids)], strict=False))
        count = dict(zip(keys, sent.key_ids, strict=True))
        places_of = _by_key(self.input.expect.features, places, sent.full_ids)
        row, parts = 0, [places[:0]]
        for feature, _ in self.dedup_lookups:
            parts.append(places_of[feature] + (row - start[feature]))
            row += count[feature]
        return torch.cat(parts)


def distinct_ids_pay(device: torch.device, world_size: int) -> bool:
    """Whether distinct ids are worth finding. On one rank nothing travels, and a GPU reads repeated rows of its memory
    faster than it finds distinct ids (benchmarks/gpu)."""
    return device.type != "cuda" or world_size > 1


class SequenceCall(Call):
    """One forward."""

    def __init__(self, collection: ShardedEmbeddingCollection, features: KeyedJaggedTensor) -> None:
        prepared = collection.input.prepare(features, collection._agreement(), collection.fault())
        requires_grad = prepared.weights_require_grad or collection.has_trainable_shards
        super().__init__(collection.context.queue.used, collection.input, prepared, requires_grad=requires_grad)
        self.assigns_new_ids = collection.assigns_new_ids()
        self._collection = collection
        self._features = features
        self._places: Tensor | None = None
        self._zero_row = False
        self._rows: Stream | None = None
        self._target: Any = None
        self._output_rows = 0
        self._entries: list[SequenceKey] = []

    def find_rows(self) -> None:
        """Begin to map ids, behind the computation of the previous batch."""
        if self._collection.id_maps is not None and self.assigns_new_ids:
            self.found_rows = self._collection.id_maps.find_rows(self.received())

    def look_up(self, shard_input: ShardInput) -> None:
        """The rows of this rank's shards."""
        assert self.sent is not None, "ids are sent before they are looked up"
        collection = self._collection
        mapped = collection.mapped(shard_input, assign_new_ids=self.assigns_new_ids, rows=self.found_rows)
        looked_up = collection.shards.rows(mapped.shard_input)
        if collection.id_maps is not None:
            collection.id_maps.hold(looked_up, mapped)
        rows = mapped.in_place(looked_up)
        self._rows = collection.output_layout.stream(rows, shard_input, self.sent.counts)

    def outgoing(self, inside: BlocksInFlight | None, stream: int) -> Stream:
        """The rows for the ranks that asked. There is nothing to sum inside hosts, as each row is whole."""
        self._collection.before_row_exchange(self)
        rows, self._rows = self._rows, None
        assert rows is not None, "rows are looked up before they are sent"
        return rows

    def issued(self) -> None:
        """Compute the targets of the rows, and look up the replicated tables, while the rows are being exchanged."""
        collection, sent = self._collection, self.sent
        assert sent is not None, "rows are asked for before they come"
        self._target, self._output_rows = collection._targets(self.prepared, sent)
        full = _full_places(self.prepared, sent)
        self._entries = collection._entries(self.prepared, sent, self._features, full)
        keys, with_dropped = self.prepared.given.keys, self.prepared.batch.with_dropped
        self._zero_row = with_dropped is not None
        self._places = distinct_index = self.prepared.distinct_index
        if with_dropped is None and distinct_index is not None:
            ids = dict(zip(keys, sent.key_ids, strict=True))
            self._places = distinct_index[: sum(ids[feature] for feature, _ in collection.dedup_lookups)]
        if with_dropped is not None:
            kept = _by_key(keys, with_dropped.kept, sent.key_ids)
            parts = [kept[feature] for feature, _ in collection.dedup_lookups]
            self._places = places_of_rows(torch.cat([with_dropped.kept[:0], *parts]), distinct_index)
        if full is not None:
            rows = collection._rows_of(keys, sent, full[0])
            self._places = rows if self._places is None else self._places.index_select(0, rows)

    def finish(self, flight: BlocksInFlight, stream: int) -> tuple[Tensor, list[SequenceKey]]:
        """(N, D) rows of the lookups of cut tables, and the output's entries."""
        assert self._target is not None, "the places were found when the rows were sent"
        rows = self._collection.output_layout.finish(flight, stream, self._target, self._output_rows)
        if self._zero_row:
            rows = nn.functional.pad(rows, [0, 0, 1, 0])
        if self._places is not None:
            rows = rows.index_select(0, self._places)
        return rows.to(self._collection.output_dtype), self._entries

    def differentiable_output(self, value: tuple[Tensor, list[SequenceKey]]) -> DifferentiableOutput:
        """The rows of the lookups of cut tables."""
        rows, entries = value
        cut = [lookup for lookup in self._collection.lookups if not lookup.layout.replicated]
        return DifferentiableOutput(rows, [entry.ids.numel() for entry in entries if entry.replica is None], 0, cut)


def _by_key(keys: tuple[str, ...], values: Tensor, counts: Sequence[int]) -> dict[str, Tensor]:
    return dict(zip(keys, values.split(list(counts)), strict=True))


def _full_places(prepared: Prepared, sent: SentIds) -> tuple[Tensor, Tensor] | None:
    """With inverse indices, feature after feature and sample after sample of the full batch: the place of each id among
    those given (M,), and the lengths (U, B_full)."""
    if prepared.full is None:
        return None
    lengths, order = prepared.full
    places = torch.arange(sum(sent.key_ids), device=order.device)
    full_lengths, places, _ = torch.ops.fbgemm.permute_1D_sparse_data(
        order.flatten(), lengths, places, None, sum(sent.full_ids)
    )
    return places, full_lengths.view_as(order)


def _flat_rows(output: tuple[Tensor, list[SequenceKey]], *, need_ids: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Rows (N, D) and ids, (N,) or none, of all the lookups one after the other, and their numbers (L,)."""
    rows, entries = output
    counts = [entry.ids.numel() for entry in entries]
    if any(entry.replica is not None for entry in entries):
        parts = iter(rows.split([entry.ids.numel() for entry in entries if entry.replica is None]))
        rows = torch.cat([next(parts) if entry.replica is None else entry.replica for entry in entries])
    ids = torch.cat([entry.ids for entry in entries]) if need_ids else entries[0].ids[:0]
    return rows, ids, torch.tensor(counts)

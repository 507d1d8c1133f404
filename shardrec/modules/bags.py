"""A sharded ``EmbeddingBagCollection``: the same input, keys and values, with its tables spread over the ranks.

Shapes: B samples of this rank, D columns of the output (the unsharded module's), L lookups (a feature in a table).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from shardrec.exchange.batch import KEY_ORDERS, Batch
from shardrec.exchange.call import Call, DifferentiableOutput
from shardrec.exchange.cut import permuted
from shardrec.exchange.id_weights import received_id_weights, tied
from shardrec.exchange.payload import ShardInput
from shardrec.exchange.pooled_output import PooledOutputLayout
from shardrec.exchange.route import Lookup
from shardrec.exchange.row_exchange import BlocksInFlight, Stream
from shardrec.lookup.groups import group_tables
from shardrec.modules.collection import ShardedCollection
from shardrec.modules.live_twins import LiveBags
from shardrec.pending import LazyAwaitable

__all__ = ["BagCall", "PooledEmbeddings", "ShardedEmbeddingBagCollection"]


class PooledEmbeddings(LazyAwaitable[KeyedTensor]):
    """A KeyedTensor whose all-to-all is in progress or about to begin; its first use waits.

    Args:
        call: gives the (B, D) values.
        collection: that was called.
    """

    def __init__(self, call: Call, collection: ShardedEmbeddingBagCollection) -> None:
        super().__init__()
        self._call = call
        self._collection = collection

    def _wait_impl(self) -> KeyedTensor:
        keys, dims = self._collection.deferred_columns()
        return KeyedTensor(keys=keys, length_per_key=dims, values=self._call.value())


class ShardedEmbeddingBagCollection(ShardedCollection):
    """An EmbeddingBagCollection whose tables are cut over the ranks of a process group.

    Takes a KeyedJaggedTensor of the local batch and returns a lazily awaited KeyedTensor with the unsharded module's
    keys, in its order. For any cuts, it makes one header, one payload and one output all-to-all in forward and one
    all-to-all in backward. Weights of ids that take a gradient, and row-wise optimizer states on column cuts, need one
    more in backward; sums of row blocks inside hosts, one more each way. Gradients are means over the ranks.

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

    Raises:
        PlanError: if the plan does not fit the tables or the group.
        ConfigError: for a table type or an optimizer that cannot be sharded.
    """

    _holder = "embedding_bags"
    embedding_bags: nn.ModuleDict

    def _read(self, module: Any) -> None:
        self._is_weighted: bool = module.is_weighted()
        self._embedding_names: list[str] = list(module._embedding_names)

    @property
    def embedding_names(self) -> list[str]:
        """Keys of the output."""
        return self._embedding_names

    def _build_lookups(self) -> None:
        collectives = self.context.collectives
        groups = group_tables(self._lookup_tables.values(), self.device, by_width=self._by_width)
        group_of = {layout.name: index for index, group in enumerate(groups) for layout in group.layouts}
        lookups: list[Lookup] = []
        for config in self._configs:
            layout = self.table_layouts[config.name]
            for feature in config.feature_names:
                lookups.append(
                    Lookup(
                        feature=feature,
                        layout=layout,
                        group=group_of.get(layout.name, 0),
                        output=self.embedding_names[len(lookups)],
                        mean=config.pooling is PoolingType.MEAN,
                        dynamic=self._is_dynamic(layout),
                    )
                )
        self.dims = [lookup.layout.embedding_dim for lookup in lookups]
        self.lookups = tuple(lookups)
        self.replicated_lookups = tuple(lookup for lookup in lookups if lookup.layout.replicated)
        route = self._make(groups, lookups, lookups, weighted=self._is_weighted, pooled=True)
        self._output_layout = PooledOutputLayout(
            route, lookups, collectives.rank, self._ranks_per_host, mean_over=collectives.mean_over
        )
        columns = [index for index, dim in enumerate(self.dims) for _ in range(dim)]
        self._column_lookup = torch.tensor(columns, dtype=torch.int64, device=self.device)
        sums = [index for index, lookup in enumerate(lookups) if not lookup.mean]
        self._sum_lookups = torch.tensor(sums, dtype=torch.int64, device=self.device)
        # The positions of the replicated lookups' features, and of all lookups' features, among a batch's keys.
        self._replicated_positions, self._key_positions = (
            lru_cache(maxsize=KEY_ORDERS)(partial(_positions, [lookup.feature for lookup in some], self.device))
            for some in (self.replicated_lookups, self.lookups)
        )

    def new_call(self, features: KeyedJaggedTensor) -> BagCall:
        """A forward's call, whose ids are not under way yet."""
        return BagCall(self, features)

    def _pending(self, call: Call) -> LazyAwaitable[KeyedTensor]:
        return PooledEmbeddings(call, self)

    def serve(self, shard_input: ShardInput) -> Stream:
        """The rows of this rank's shards for requests: the sums of each request, one request after the other."""
        flat, out = self._output_layout.outgoing(self.shards(shard_input), shard_input)
        return Stream(flat=flat, out=out, into=[])

    def scripted_twin(self) -> nn.Module:
        """What TorchScript of this process sees in this module's place; :mod:`shardrec.portable` has another."""
        return LiveBags(self, self.embedding_bags, list(self.embedding_names), list(self.dims))

    def deferred_columns(self) -> tuple[list[str], list[int]]:
        """Keys and columns of the output."""
        return list(self.embedding_names), list(self.dims)

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """The configs of the unsharded collection."""
        return self._configs

    def is_weighted(self) -> bool:
        """Whether the input carries a weight per id."""
        return self._is_weighted

    def _replicated_counts(self, batch: Batch) -> tuple[Tensor, ...]:
        """Number of ids of each lookup of a replicated table, to read on the host; empty without such tables."""
        if not self.replicated_lookups:
            return ()
        return (batch.lengths.index_select(0, self._replicated_positions(batch.keys)).sum(dim=1, dtype=torch.int64),)

    def _look_up_replicas(self, batch: Batch, counts: Sequence[int], weights_with_grad: Tensor | None) -> Tensor | None:
        """(B, D_r) pooled columns of the replicated tables.

        Args:
            batch: ``Prepared.batch``.
            counts: ids of each lookup of a replicated table.
            weights_with_grad: (N,), those that take a gradient; else None.
        """
        if self.replicas is None:
            return None
        order, positions = self._replicated_positions(batch.keys).to(torch.int32), None
        if weights_with_grad is not None:
            positions = torch.arange(batch.values.numel(), dtype=torch.int32, device=self.device)
        batch_tensors = batch.lengths, batch.values, batch.weights
        lengths, ids, weights, positions = permuted(order, *batch_tensors, positions, sum(counts))
        if weights_with_grad is not None and positions is not None:
            weights = weights_with_grad.index_select(0, batch.input_positions(positions)).to(torch.float32)
        return self.replicas(ids, lengths, weights, counts)

    def _bag_lengths(self, batch: Batch) -> Tensor | None:
        """(B, D) bag length behind each mean-pooled column, at least 1; 1 for sums; None without mean pooling."""
        if len(self._sum_lookups) == len(self.lookups):
            return None
        lengths = batch.lengths.index_select(0, self._key_positions(batch.keys)).to(torch.float32).clamp_(min=1)
        lengths.index_fill_(0, self._sum_lookups, 1.0)
        # Contiguous by row, like the values: dividing by a transposed view took ten times as long.
        return lengths.t().index_select(1, self._column_lookup)

    def _expand(self, values: Tensor, inverse: Tensor) -> Tensor:
        """(B_full, D) from (B, D): each feature's bags by its inverse indices (U, B_full)."""
        row = {feature: number for number, feature in enumerate(self.input.expect.features)}
        columns = values.split(self.dims, dim=1)
        chosen = [
            part.index_select(0, inverse[row[lookup.feature]])
            for part, lookup in zip(columns, self.lookups, strict=True)
        ]
        return torch.cat(chosen, dim=1)


def _positions(features: Sequence[str], device: torch.device, keys: tuple[str, ...]) -> Tensor:
    position = {key: index for index, key in enumerate(keys)}
    return torch.tensor([position[feature] for feature in features], dtype=torch.int64, device=device)


class BagCall(Call):
    """One forward of a :class:`ShardedEmbeddingBagCollection`."""

    def __init__(self, collection: ShardedEmbeddingBagCollection, features: KeyedJaggedTensor) -> None:
        prepared = collection.input.prepare(features, collection._agreement(), collection.fault())
        prepared = replace(prepared, extra_counts=collection._replicated_counts(prepared.batch))
        requires_grad = prepared.weights_require_grad or collection.has_trainable_shards
        super().__init__(collection.context.queue.used, collection.input, prepared, requires_grad=requires_grad)
        self.assigns_new_ids = collection.assigns_new_ids()
        self._collection = collection
        self._shard_input: ShardInput | None = None
        self._pooled: Tensor | None = None
        self._replicated: Tensor | None = None
        self._lengths: Tensor | None = None

    def find_rows(self) -> None:
        """Begin to map ids, behind the computation of the previous batch."""
        if self._collection.id_maps is not None and self.assigns_new_ids:
            self.found_rows = self._collection.id_maps.find_rows(self.received())

    def look_up(self, shard_input: ShardInput) -> Stream | None:
        """Look up the pooled rows of this rank's shards; returns the ones to be summed inside hosts."""
        collection = self._collection
        self._shard_input = shard_input
        weights, received, weighted = self._weights_with_grad, None, shard_input
        if weights is not None:
            assert self.sent is not None, "ids are sent before they are looked up"
            received = received_id_weights(weights, self.sent, shard_input, collection.context.collectives)
            weighted = replace(shard_input, weights=received)
        mapped = collection.mapped(weighted, assign_new_ids=self.assigns_new_ids, rows=self.found_rows)
        # Memory from which pooled rows can usually be sent without a copy.
        allocate = collection.context.collectives.allocate
        self._pooled = collection.shards(mapped.shard_input, lambda numel: allocate(numel, collection.device))
        if collection.id_maps is not None:
            collection.id_maps.hold([self._pooled], mapped)
        if received is not None:
            self._pooled = tied(self._pooled, received)
        hosts = collection._output_layout.hosts
        if hosts is None:
            return None
        self._pooled, stream = hosts.divide(self._pooled, shard_input.batch_sizes)
        return stream

    @property
    def _weights_with_grad(self) -> Tensor | None:
        """(N,) of the local batch, if they take a gradient."""
        return self.prepared.given.weights if self.prepared.weights_require_grad else None

    def outgoing(self, inside: BlocksInFlight | None, stream: int) -> Stream:
        """The pooled rows for the ranks that asked."""
        self._collection.before_row_exchange(self)
        output, shard_input, pooled = self._collection._output_layout, self._shard_input, self._pooled
        assert shard_input is not None and pooled is not None, "rows are looked up before they are sent"
        sums: list[Tensor] = []
        if output.hosts is not None:
            assert inside is not None, "what was divided was sent"
            sums = output.hosts.finish(inside, stream, shard_input.batch_sizes)
        self._shard_input = self._pooled = None
        return output.stream(pooled, shard_input, self.prepared.slot_sizes, sums)

    def issued(self) -> None:
        """Look up the replicated tables while the rows are being exchanged."""
        collection, batch = self._collection, self.prepared.batch
        assert self.sent is not None, "ids are sent before rows are"
        self._replicated = collection._look_up_replicas(batch, self.sent.replica_ids, self._weights_with_grad)
        self._lengths = collection._bag_lengths(batch)

    def finish(self, flight: BlocksInFlight, stream: int) -> Tensor:
        """(B, D) values of the output."""
        collection, prepared = self._collection, self.prepared
        values = collection._output_layout.finish(
            flight, stream, prepared.lengths.size(1), prepared.slot_sizes, self._replicated
        )
        if self._lengths is not None:
            values = values / self._lengths
        inverse = prepared.batch.inverse
        if inverse is not None:
            values = collection._expand(values, inverse)
        return values.to(collection.output_dtype)

    def differentiable_output(self, value: Tensor) -> DifferentiableOutput:
        """The values."""
        return DifferentiableOutput(value, self._collection.dims, 1, self._collection.lookups)

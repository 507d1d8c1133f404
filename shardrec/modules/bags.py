"""A sharded ``EmbeddingBagCollection``: the same input, keys and values, with its tables spread over the ranks.

Shapes: B samples of this rank, D columns of the output (the unsharded module's), L lookups (a feature in a table).
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.sparse.jagged_tensor import KeyedTensor

from shardrec.lookup.groups import group_tables
from shardrec.modules.collection import ShardedCollection
from shardrec.modules.live_twins import LiveBags
from shardrec.pending import LazyAwaitable
from shardrec.step.pooled_columns import PooledOutput
from shardrec.step.records import InFlight


class PooledEmbeddings(LazyAwaitable[KeyedTensor]):
    """A KeyedTensor with an all-to-all that is in progress or about to begin. Its first use waits."""

    _collection: ShardedEmbeddingBagCollection

    def __init__(self, call: InFlight, collection: ShardedEmbeddingBagCollection) -> None:
        vars(self).update(_call=call, _collection=collection)  # and not one by one, by LazyAwaitable.__setattr__

    def _wait_impl(self) -> KeyedTensor:
        collection = self._collection
        values = collection.context.step.value(vars(self).pop("_call"))
        return KeyedTensor(list(collection._embedding_names), list(collection.dims), values)


class ShardedEmbeddingBagCollection(ShardedCollection):
    """An EmbeddingBagCollection with tables that are cut over the ranks of a process group.

    Takes a KeyedJaggedTensor of the local batch and returns a lazily awaited KeyedTensor with the unsharded module's
    keys, in its order. For any cuts, it makes one header, one payload and one output all-to-all in forward and one
    all-to-all in backward. Weights of ids that take a gradient, and row-wise optimizer states on column cuts, need one
    more in backward. Sums of row blocks inside hosts, one more each way. Gradients are means over the ranks.

    Args:
        module: the unsharded collection, on the CPU, on ``device``, or on meta (then its values are drawn:
            docs/guide.md). Its optimizers given by ``apply_optimizer_in_backward`` are fused. Or a sharded one, of
            the same plan, which is copied.
        plan: holds a layout for each table, under ``qualified_name(path, table)``.
        path: the module's path in the model; "" by itself.
        device: where the shards live. Default: the CPU.
        group: the process group. Default: the default group, or a single rank without one.
        context: shared by the sharded modules of a model. Default: a new one.
        storage: of the tables. Default: kernels that train.

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
        lookups = self._make_lookups(groups, self._embedding_names)
        self.dims = [lookup.layout.embedding_dim for lookup in lookups]
        route = self._make(groups, lookups, lookups, weighted=self._is_weighted, pooled=True)
        features, rank = self.input.expect.features, collectives.rank
        self._plan_step(
            PooledOutput(
                route,
                lookups,
                features,
                rank,
                self.device,
                self.output_dtype,
                ranks_per_host=self._ranks_per_host,
                mean_over=collectives.mean_over,
            ),
            lookups,
        )

    def _pending(self, call: InFlight) -> LazyAwaitable[KeyedTensor]:
        return PooledEmbeddings(call, self)

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

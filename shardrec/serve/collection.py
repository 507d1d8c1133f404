"""Sharded collections whose tables are kept for inference: the routes and exchanges of those that were trained."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from shardrec.errors import ConfigError
from shardrec.exchange.input import InputExchange
from shardrec.exchange.queue import ModelContext
from shardrec.layout import Shard, TableLayout
from shardrec.modules import ShardedEmbeddingBagCollection, ShardedEmbeddingCollection
from shardrec.modules.collection import ShardedCollection
from shardrec.pending import LazyAwaitable
from shardrec.serve.format import WeightFormat
from shardrec.serve.lookup import ServedReplicas, ServedShards

__all__ = ["ServedCollection", "ServedEmbeddingBagCollection", "ServedEmbeddingCollection", "serve_collection"]


class ServedCollection(ShardedCollection):
    """What the served collections have in common. Their tables hold nothing before their :meth:`memory` is filled.

    Args:
        source: the trained collection, of which the tables are not kept.
        formats: of each table, by its name in the plan.
        context: shared by the served collections of a model.
    """

    shards: ServedShards
    replicas: ServedReplicas | None

    def __init__(self, source: ShardedCollection, formats: Mapping[str, WeightFormat], context: ModelContext) -> None:
        nn.Module.__init__(self)
        bare = vars(nn.Module())
        # Plans, routes and configs are plain data, which a second collection can share. Its kernels are replaced below.
        vars(self).update({name: value for name, value in vars(source).items() if name not in bare})
        self.context = context
        self.id_maps = None if source.id_maps is None else copy.deepcopy(source.id_maps)
        self.formats = {layout.name: formats[layout.name] for layout in self.table_layouts.values()}
        self._optimizers = {}
        setattr(self, self._holder, nn.ModuleDict())  # none that could be trained
        self._build_lookups()

    def _serve(self, widths: list[int], slot_tables: list[int], *, pooled: bool) -> None:
        """Make the kernels, where ``source`` had those that train."""
        collectives, route = self.context.collectives, self.input.route
        self.input = InputExchange(route, self.input.expect, self.context, per_id=not pooled)
        slots = route.slots[collectives.rank]
        self.shards = ServedShards(slots, widths, self.formats, collectives, self.device, pooled=pooled)
        layouts = [table.layout for table in self._replicated_tables()]
        self.replicas = None
        if layouts:
            self.replicas = ServedReplicas(layouts, slot_tables, self.formats, self.context, self.device, pooled=pooled)

    def forward(self, features: KeyedJaggedTensor) -> LazyAwaitable[Any]:
        """Look up the local batch, without gradients."""
        with torch.no_grad():
            return super().forward(features)

    def memory(self, layout: TableLayout, shard: Shard | None) -> Tensor:
        """(rows, b) uint8: the memory of a part of a table that this rank holds."""
        if shard is not None:
            return self.shards.memory[shard]
        assert self.replicas is not None, "a replica has a replicated lookup"
        return self.replicas.memory[self.replica_number[layout.name]]

    def table_bytes(self) -> int:
        """Bytes of the rows that this rank holds, padding aside."""
        kept = [*self.shards.memory.values(), *(self.replicas.memory if self.replicas is not None else [])]
        return sum(rows.numel() for rows in kept)

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        """Its kernels are not copied."""
        raise ConfigError("a served model cannot be copied: make another one with shardrec.serve.quantize")

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        raise ConfigError(
            "a served model has no state_dict: save it with shardrec.serve.save, and the trained one with "
            "shardrec.save_checkpoint"
        )


class ServedEmbeddingBagCollection(ServedCollection, ShardedEmbeddingBagCollection):
    """A :class:`ShardedEmbeddingBagCollection` that does not train; see :func:`shardrec.serve.quantize`."""

    def _build_lookups(self) -> None:
        numbers = [self.replica_number[lookup.layout.name] for lookup in self.replicated_lookups]
        self._serve([0] * self.input.route.groups, numbers, pooled=True)


class ServedEmbeddingCollection(ServedCollection, ShardedEmbeddingCollection):
    """A :class:`ShardedEmbeddingCollection` that does not train; see :func:`shardrec.serve.quantize`."""

    def _build_lookups(self) -> None:
        self._serve([group.width or 0 for group in self.groups], [], pooled=False)


def serve_collection(
    source: ShardedCollection, formats: Mapping[str, WeightFormat], context: ModelContext
) -> ServedCollection:
    """The served collection of a trained one, its tables still empty."""
    pooled = isinstance(source, ShardedEmbeddingBagCollection)
    return (ServedEmbeddingBagCollection if pooled else ServedEmbeddingCollection)(source, formats, context)

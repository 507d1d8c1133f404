"""The lookups of a served collection, which replace the training lookups.

Shapes: B_all the samples of all ranks, N ids, S slots, D pooled columns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import NoReturn

import torch
from torch import Tensor, nn

from shardrec.errors import ConfigError
from shardrec.exchange.collectives import Collectives
from shardrec.exchange.gradients import Gradients
from shardrec.exchange.payload import ShardInput
from shardrec.exchange.route import Slot
from shardrec.layout import Shard
from shardrec.lookup.backward import Kept
from shardrec.lookup.groups import LookupGroup, LookupTable
from shardrec.lookup.replicated import ReplicatedLookup
from shardrec.lookup.scripted import NoTables
from shardrec.lookup.shards import LookupInputs, ShardLookup
from shardrec.modules.collection import ShardedCollection
from shardrec.modules.storage import Storage
from shardrec.modules.table import ShardedTable
from shardrec.serve.inference_tables import ServedTables
from shardrec.serve.row_bytes import WeightFormat


def served_storage(formats: Mapping[str, WeightFormat], *, pooled: bool) -> Storage:
    """A storage with inference kernels as its lookups."""
    shards, replicas = partial(ServedShards, formats), partial(ServedReplicas, formats, pooled=pooled)
    return Storage(shards=shards, replicas=replicas, table=ServedTable, trains=False)


def served_memory(collection: ShardedCollection) -> dict[Shard | str, Tensor]:
    """The (rows, b) uint8 memory per shard on this rank, by the shard, and of each replicated table, by its name in
    the plan."""
    shards, replicas = collection.shards, collection.replicas
    assert isinstance(shards, ServedShards), "the collection has a served storage"
    memory: dict[Shard | str, Tensor] = dict(shards.memory.items())
    memory.update(replicas.memory.items() if isinstance(replicas, ServedReplicas) else ())
    return memory


class ServedTable(ShardedTable):
    """A table that is not trained: it has neither parameters nor an entry in a state_dict."""

    def _save_to_state_dict(self, destination: object, prefix: str, keep_vars: bool) -> NoReturn:
        raise ConfigError(
            "a served model lacks a state_dict: save it with shardrec.serve.save, and the trained one with "
            "shardrec.save_checkpoint"
        )


class ServedShards(ShardLookup):
    """This rank's shards in inference kernels, one per lookup group. Their rows are uninitialized.

    Args, besides the arguments of :class:`ShardLookup`:
        formats: format per table, by the table's name in the plan.

    Attributes:
        memory: (rows, b) uint8 per shard, see :class:`ServedTables`.
    """

    def __init__(
        self,
        formats: Mapping[str, WeightFormat],
        groups: Sequence[LookupGroup],
        slots: Sequence[Slot],
        collectives: Collectives,
        device: torch.device,
        *,
        pooled: bool,
    ) -> None:
        super().__init__((), (), collectives, device, pooled=pooled)
        self.modules: list[ServedTables | NoTables] = []
        self.group_slots: list[int] = []
        self.memory: dict[Shard, Tensor] = {}
        for number, group in enumerate(groups):
            members = [slot for slot in slots if slot.group == number]
            self.group_slots.append(len(members))
            places = {shard: place for place, shard in enumerate(dict.fromkeys(slot.shard for slot in members))}
            if not places:
                self.modules.append(NoTables(0 if pooled else group.width or 0, device))
                continue
            tables = ServedTables(
                [(shard.rows, shard.cols) for shard in places],
                [formats[shard.table] for shard in places],
                [places[slot.shard] for slot in members],
                device,
                pooled=pooled,
            )
            self.modules.append(tables)
            self.memory.update(zip(places, tables.rows, strict=True))
        self.shards = tuple(self.memory)

    def rows(
        self, shard_input: ShardInput, *, to_update: bool = False
    ) -> tuple[list[Tensor], LookupInputs, list[Kept]]:
        """Per group, (B_all, D_group) pooled columns, or (n, w) rows without pooling. Nothing that an update takes."""
        starts = [0, *accumulate(shard_input.group_ids)]
        slots = [0, *accumulate(self.group_slots)]
        looked_up = []
        for group, module in enumerate(self.modules):
            span = slice(starts[group], starts[group + 1])
            lengths = shard_input.lengths[slots[group] : slots[group + 1]]
            weights = None if shard_input.weights is None else shard_input.weights[span]
            looked_up.append(module(shard_input.ids[span], lengths, weights))
        return looked_up, (), []

    def scripted(self) -> tuple[nn.ModuleList, list[int]]:
        """The same modules for TorchScript, and the number of this rank's slots in each."""
        return nn.ModuleList(self.modules), self.group_slots


class ServedReplicas(ReplicatedLookup):
    """The replicated tables of a collection in an inference kernel.

    Args, besides the arguments of :class:`ReplicatedLookup`:
        formats: format per table, by the table's name in the plan.
        pooled: sum each bag; if False, each table is looked up separately and gives a row per id.

    Attributes:
        memory: (rows, b) uint8 per table, by its name in the plan, see :class:`ServedTables`.
    """

    def __init__(
        self,
        formats: Mapping[str, WeightFormat],
        tables: Sequence[LookupTable],
        slot_tables: Sequence[int],
        gradients: Gradients,
        device: torch.device,
        *,
        pooled: bool,
    ) -> None:
        super().__init__((), (), gradients, device)
        layouts = [table.layout for table in tables]
        self.modules = [
            ServedTables(
                [(layout.num_embeddings, layout.embedding_dim) for layout in together],
                [formats[layout.name] for layout in together],
                slot_tables if pooled else [0],
                device,
                pooled=pooled,
            )
            for together in ([layouts] if pooled else [[layout] for layout in layouts])
        ]
        rows = (rows for module in self.modules for rows in module.rows)
        self.memory = dict(zip((layout.name for layout in layouts), rows, strict=True))

    def __call__(self, ids: Tensor, lengths: Tensor, weights: Tensor | None, counts: Sequence[int]) -> Tensor:
        """(B, D) float32 pooled columns of the local batch, from (N,), (S, B) and (N,). ``counts`` is not used."""
        weights = None if weights is None else weights.to(torch.float32)
        pooled: Tensor = self.modules[0](ids, lengths, weights)
        return pooled

    def rows(self, table: int, ids: Tensor) -> Tensor:
        """(N, dim) float32 rows of one table, one per id."""
        lengths = torch.full((1, 1), ids.numel(), dtype=torch.int32, device=ids.device)
        rows: Tensor = self.modules[table](ids, lengths, None)
        return rows

    def scripted(self, slot_tables: Sequence[int], *, pooled: bool) -> nn.Module:
        """The module for TorchScript: of all tables, or without pooling of the single table in ``slot_tables``."""
        return self.modules[0] if pooled else self.modules[slot_tables[0]]

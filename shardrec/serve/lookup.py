"""The lookups of a served collection, in the places of those that it trained with.

Shapes: B_all the samples of all ranks, N ids, S slots, D pooled columns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate

import torch
from torch import Tensor, nn

from shardrec.exchange.collectives import Collectives
from shardrec.exchange.payload import ShardInput
from shardrec.exchange.queue import ModelContext
from shardrec.exchange.route import Slot
from shardrec.layout import Shard, TableLayout
from shardrec.lookup.replicated import ReplicatedLookup
from shardrec.lookup.scripted import NoTables
from shardrec.lookup.shards import ShardLookup
from shardrec.serve.format import WeightFormat
from shardrec.serve.tables import ServedTables

__all__ = ["ServedReplicas", "ServedShards"]


class ServedShards(ShardLookup):
    """This rank's shards in inference kernels, one per lookup group.

    Args, where they are not those of :class:`ShardLookup`:
        widths: per group, the columns of its shards where they have one width and are not pooled; else 0.
        formats: of each table, by its name in the plan.

    Attributes:
        memory: of each shard (rows, b) uint8, see :class:`ServedTables`.
    """

    def __init__(
        self,
        slots: Sequence[Slot],
        widths: Sequence[int],
        formats: Mapping[str, WeightFormat],
        collectives: Collectives,
        device: torch.device,
        *,
        pooled: bool,
    ) -> None:
        super().__init__((), (), collectives, device, pooled=pooled)
        self.modules: list[ServedTables | NoTables] = []
        self.group_slots: list[int] = []
        self.memory: dict[Shard, Tensor] = {}
        for group, width in enumerate(widths):
            members = [slot for slot in slots if slot.group == group]
            self.group_slots.append(len(members))
            number = {shard: index for index, shard in enumerate(dict.fromkeys(slot.shard for slot in members))}
            if not number:
                self.modules.append(NoTables(width, device))
                continue
            tables = ServedTables(
                [(shard.rows, shard.cols) for shard in number],
                [formats[shard.table] for shard in number],
                [number[slot.shard] for slot in members],
                device,
                pooled=pooled,
            )
            self.modules.append(tables)
            self.memory.update(zip(number, tables.rows, strict=True))
        self.shards = tuple(self.memory)

    def rows(self, ids: ShardInput) -> list[Tensor]:
        """Per group, (B_all, D_group) pooled columns, or (n, w) rows without pooling."""
        starts = [0, *accumulate(ids.group_ids)]
        slots = [0, *accumulate(self.group_slots)]
        looked_up = []
        for group, module in enumerate(self.modules):
            span = slice(starts[group], starts[group + 1])
            lengths = ids.lengths[slots[group] : slots[group + 1]]
            weights = None if ids.weights is None else ids.weights[span]
            looked_up.append(module(ids.ids[span], lengths, weights))
        return looked_up

    def scripted(self) -> tuple[nn.ModuleList, list[int]]:
        """The same modules for TorchScript, and the number of this rank's slots in each."""
        return nn.ModuleList(self.modules), self.group_slots


class ServedReplicas(ReplicatedLookup):
    """The replicated tables of a module in an inference kernel.

    Args, where they are not those of :class:`ReplicatedLookup`:
        layouts: of the replicated tables, in module order; all of them are looked up.
        formats: of each table, by its name in the plan.
        pooled: sum each bag; else each table is looked up separately, a row per id.

    Attributes:
        memory: of each table (rows, b) uint8, see :class:`ServedTables`.
    """

    def __init__(
        self,
        layouts: Sequence[TableLayout],
        slot_tables: Sequence[int],
        formats: Mapping[str, WeightFormat],
        context: ModelContext,
        device: torch.device,
        *,
        pooled: bool,
    ) -> None:
        super().__init__((), (), context, device)
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
        self.memory = [rows for module in self.modules for rows in module.rows]

    def __call__(self, ids: Tensor, lengths: Tensor, weights: Tensor | None, counts: Sequence[int]) -> Tensor:
        """(B, D) float32 pooled columns of the local batch, from (N,), (S, B) and (N,); the kernel needs no counts."""
        weights = None if weights is None else weights.to(torch.float32)
        pooled: Tensor = self.modules[0](ids, lengths, weights)
        return pooled

    def rows(self, table: int, ids: Tensor) -> Tensor:
        """(N, dim) float32 rows of one table, one per id."""
        lengths = torch.full((1, 1), ids.numel(), dtype=torch.int32, device=ids.device)
        rows: Tensor = self.modules[table](ids, lengths, None)
        return rows

    def scripted(self, slot_tables: Sequence[int], *, pooled: bool) -> nn.Module:
        """The lookup for TorchScript: of all the tables, or without pooling of the one in ``slot_tables``."""
        return self.modules[0] if pooled else self.modules[slot_tables[0]]

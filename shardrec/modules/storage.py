"""Where a sharded collection's tables are: in kernels of this rank that train, unless it is given another storage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import nn

from shardrec.exchange.collectives import Collectives
from shardrec.exchange.gradients import Gradients
from shardrec.exchange.input import InputExchange, Prepared, SentIds
from shardrec.exchange.route import Slot
from shardrec.layout import Shard, TableLayout
from shardrec.lookup.groups import LookupGroup, LookupTable
from shardrec.lookup.replicated import ReplicatedLookup
from shardrec.lookup.shards import ShardLookup
from shardrec.modules.table import ShardedTable

__all__ = ["Storage"]


class Storage:
    """Makes the lookups and the tables of one collection."""

    portable: ClassVar[bool] = True
    """Whether TorchScript can have the collection in a program that runs without shardrec."""

    trains: ClassVar[bool] = True
    """Whether the tables have parameters."""

    def shards(
        self,
        groups: Sequence[LookupGroup],
        slots: Sequence[Slot],
        collectives: Collectives,
        device: torch.device,
        *,
        pooled: bool,
    ) -> ShardLookup:
        """The lookup of this rank's shards; arguments are those of :class:`ShardLookup`."""
        return ShardLookup(groups, slots, collectives, device, pooled=pooled)

    def replicas(
        self,
        tables: Sequence[LookupTable],
        slot_tables: Sequence[int],
        gradients: Gradients,
        device: torch.device,
        *,
        pooled: bool,
    ) -> ReplicatedLookup:
        """The lookup of replicated tables; arguments are those of :class:`ReplicatedLookup`."""
        return ReplicatedLookup(tables, slot_tables, gradients, device)

    def table(
        self,
        layout: TableLayout,
        parameters: Mapping[Shard | None, nn.Parameter],
        group: dist.ProcessGroup | None,
        dtype: torch.dtype,
        *,
        fused: bool,
    ) -> ShardedTable:
        """A table; arguments are those of :class:`ShardedTable`."""
        return ShardedTable(layout, parameters, group, dtype, fused=fused)

    def ask(self, input: InputExchange, prepared: Prepared, sent: SentIds) -> None:
        """The rows that a batch asked for are exchanged next; nothing to do where its ids have travelled."""

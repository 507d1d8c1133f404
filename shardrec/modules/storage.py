"""Where a sharded collection's tables are: in kernels of this rank that train, unless it is given another storage."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from shardrec.lookup.replicated import ReplicatedLookup
from shardrec.lookup.shards import ShardLookup
from shardrec.modules.table import ShardedTable
from shardrec.step.records import InFlight


@dataclass(frozen=True, kw_only=True)
class Storage:
    """What makes the lookups and the tables of a collection.

    Args:
        shards: the lookup of this rank's shards, from the arguments of :class:`ShardLookup`.
        replicas: the lookup of replicated tables, from the arguments of :class:`ReplicatedLookup`.
        table: a table, from the arguments of :class:`ShardedTable`.
        trains: whether the tables have parameters.
        portable: whether TorchScript can have the collection in a program that runs without shardrec.
        before_rows: called just before a call's rows are exchanged. Embedding servers use it to attach the ids.
    """

    shards: Callable[..., ShardLookup] = ShardLookup
    replicas: Callable[..., ReplicatedLookup] = ReplicatedLookup
    table: Callable[..., ShardedTable] = ShardedTable
    trains: bool = True
    portable: bool = True
    before_rows: Callable[[InFlight], None] | None = None

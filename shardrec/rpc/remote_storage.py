"""The tables of a trainer's collection, on servers."""

from __future__ import annotations

from collections.abc import MutableMapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shardrec.checkpoint.parts import Rect
from shardrec.errors import ConfigError
from shardrec.layout import TableLayout
from shardrec.lookup.deferred import DeferredGradients
from shardrec.lookup.optimizers import FusedOptimizer
from shardrec.lookup.shards import ShardLookup
from shardrec.modules.storage import Storage
from shardrec.modules.table import ShardedTable
from shardrec.rpc.trainer_collectives import RemoteCollectives, words
from shardrec.step.records import InFlight


class RemoteTable(ShardedTable):
    """A table on servers, in a trainer's model: no parameters. Its state_dict entry is read from them."""

    def __init__(self, collectives: RemoteCollectives, *table: Any, has_optimizer: bool) -> None:
        super().__init__(*table, has_optimizer=has_optimizer)
        self._collectives = collectives

    def _save_to_state_dict(self, destination: MutableMapping[str, object], prefix: str, keep_vars: bool) -> None:
        layout = self.layout
        whole = torch.empty((layout.num_embeddings, layout.embedding_dim), dtype=self.dtype)
        self._collectives.wait_for_updates()
        for rank in layout.ranks:
            server = rank - self._collectives.trainers.world_size
            call = self._collectives.servers.call(server, "read", layout.name, "")
            for (top, bottom, left, right), values in call.wait():
                whole[top:bottom, left:right] = values
        destination[prefix + "weight"] = whole

    def write(self, value: Tensor) -> None:
        """Set the table's values on the servers. Every trainer calls this, and the first one sends them."""
        collectives, layout = self._collectives, self.layout
        collectives.wait_for_updates()
        for shard in () if collectives.rank else layout.shards:
            rect = Rect.of(shard)
            part = value[rect.row_start : rect.row_end, rect.col_start : rect.col_end]
            values = torch.empty(part.shape, dtype=self.dtype).copy_(part)  # in memory of its own, which RPC sends
            server = shard.rank - collectives.trainers.world_size
            collectives.servers.call_replicas(server, "write", layout.name, [*rect], values)


class RemoteShards(ShardLookup):
    """No shards of a trainer's own. The servers' learning rates, steps and counts of updates.

    Args:
        collectives: of the trainer.
        number: of the collection. The first one stands for all where servers do something for all.
        lookup: arguments of :class:`ShardLookup`.
        pooled: argument of :class:`ShardLookup`.
    """

    def __init__(self, collectives: RemoteCollectives, number: int, *lookup: Any, pooled: bool) -> None:
        super().__init__(*lookup, pooled=pooled)
        self._collectives = collectives
        self._number = number

    def step(self) -> None:
        """Have the servers update all tables with the gradients that backward has left. Every trainer calls it."""
        if self._number == 0:
            self._collectives.step()

    def deferred(self) -> list[DeferredGradients]:
        """What :meth:`step` will push."""
        return [] if self._number or not self._collectives.updates_at_step else [self._collectives.kept]

    def set_learning_rate(self, optimizer: FusedOptimizer, lr: float) -> None:
        """Use ``lr`` for the tables that were given ``optimizer``, from the next update on."""
        self._collectives.rates[optimizer] = lr

    def step_counts(self) -> dict[str, int]:
        """Per table, how many updates its fused optimizer has made. Asks the servers."""
        self._collectives.wait_for_updates()
        counts = super().step_counts()
        for server in range(len(self._collectives.servers)):
            for name, count in self._collectives.servers.call(server, "step_counts").wait().items():
                if name in counts:
                    counts[name] = max(counts[name], count)
        return counts


def remote_storage(collectives: RemoteCollectives, number: int) -> Storage:
    """Of a trainer's collection: the shards are on servers, replicated tables are its own."""

    def table(layout: TableLayout, *arguments: Any, **named: Any) -> ShardedTable:
        return (ShardedTable if layout.replicated else partial(RemoteTable, collectives))(layout, *arguments, **named)

    def add_request(call: InFlight) -> None:
        """Let a call's ids go with the lookup that is to come."""
        if call.learned_weights is not None:
            collectives.requests.clear()
            tables = ", ".join(repr(table) for _, table, _ in call.input.expect.tables)
            raise ConfigError(
                f"the ids of tables {tables} have weights that take a gradient, which servers do not send back. Detach "
                "the weights, or shard the tables by collectives"
            )
        assert call.parts is not None, "ids are packed before rows are looked up"
        bag_words = call.input.payload.bag_words(call.slot_sizes)
        of_ranks = zip(bag_words, call.counts, call.parts, strict=True)
        parts = [(number, [call.size, bags, *counts], words(pieces)) for bags, counts, pieces in of_ranks]
        collectives.requests.append(parts[collectives.trainers.world_size :])

    shards = partial(RemoteShards, collectives, number)
    return Storage(shards=shards, table=table, portable=False, before_rows=add_request)

"""The tables of a trainer's collection, on servers."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardrec.errors import ConfigError
from shardrec.exchange.collectives import Collectives
from shardrec.exchange.input import InputExchange, Prepared, SentIds
from shardrec.exchange.route import Slot
from shardrec.layout import Shard, TableLayout
from shardrec.lookup.groups import LookupGroup
from shardrec.lookup.optimizers import FusedOptimizer
from shardrec.lookup.shards import ShardLookup
from shardrec.modules.storage import Storage
from shardrec.modules.table import ShardedTable, load_table
from shardrec.rpc.collectives import RemoteCollectives, words

__all__ = ["RemoteStorage", "RemoteTable"]


class RemoteTable(ShardedTable):
    """A table on servers, in a trainer's model: no parameters; its state_dict entry is read from them.

    Args:
        layout: where the table lives.
        dtype: of the weights.
        collectives: of the trainer.
    """

    def __init__(self, layout: TableLayout, dtype: torch.dtype, collectives: RemoteCollectives) -> None:
        super().__init__(layout, {}, None, dtype)
        self._collectives = collectives

    def _save_to_state_dict(self, destination: MutableMapping[str, Any], prefix: str, keep_vars: bool) -> None:
        layout = self.layout
        whole = torch.empty((layout.num_embeddings, layout.embedding_dim), dtype=self.dtype)
        self._collectives.settle()
        for rank in layout.ranks:
            server = rank - self._collectives.trainers.world_size
            for (top, bottom, left, right), values in self._collectives.servers.call(server, "read", layout.name, ""):
                whole[top:bottom, left:right] = values
        destination[prefix + "weight"] = whole

    def write(self, value: Any) -> None:
        """Set the table's values on the servers; every trainer calls this, and the first one sends them.

        Args:
            value: (num_embeddings, embedding_dim).

        Raises:
            PlanError: if it has another shape.
        """
        collectives, layout = self._collectives, self.layout
        shards: dict[Shard | None, Tensor] = {
            shard: torch.empty((shard.rows, shard.cols), dtype=self.dtype)
            for shard in (() if collectives.rank else layout.shards)
        }
        load_table(layout, shards, value)
        collectives.settle()
        for shard, values in shards.items():
            assert shard is not None, "a table on servers is cut"
            rect = [shard.row_start, shard.row_end, shard.col_start, shard.col_end]
            server = shard.rank - collectives.trainers.world_size
            collectives.servers.tell(server, "write", layout.name, rect, values)


class RemoteShards(ShardLookup):
    """No shards of a trainer's own; the servers' learning rates and counts of updates.

    Args, beside those of :class:`ShardLookup`:
        servers: the trainer's collectives.
    """

    def __init__(self, servers: RemoteCollectives, *lookup: Any, pooled: bool) -> None:
        super().__init__(*lookup, pooled=pooled)
        self._servers = servers

    def set_learning_rate(self, optimizer: FusedOptimizer, lr: float) -> None:
        """Use ``lr`` for the tables that were given ``optimizer``, from the next update on."""
        self._servers.rates[optimizer] = lr

    def step_counts(self) -> dict[str, int]:
        """Per table, how many updates its fused optimizer has made; asks the servers."""
        self._servers.settle()
        counts = super().step_counts()
        for server in range(len(self._servers.servers)):
            for name, count in self._servers.servers.call(server, "step_counts").items():
                if name in counts:
                    counts[name] = max(counts[name], count)
        return counts


class RemoteStorage(Storage):
    """A trainer's: the shards are on servers, replicated tables are its own.

    Args:
        collectives: of the trainer.
        number: of the collection among those of the model.
    """

    portable = False  # a program needs the connection to the servers

    def __init__(self, collectives: RemoteCollectives, number: int) -> None:
        self._collectives = collectives
        self._number = number

    def shards(
        self,
        groups: Sequence[LookupGroup],
        slots: Sequence[Slot],
        collectives: Collectives,
        device: torch.device,
        *,
        pooled: bool,
    ) -> RemoteShards:
        return RemoteShards(self._collectives, groups, slots, collectives, device, pooled=pooled)

    def table(
        self,
        layout: TableLayout,
        parameters: Mapping[Shard | None, nn.Parameter],
        group: dist.ProcessGroup | None,
        dtype: torch.dtype,
        *,
        fused: bool,
    ) -> ShardedTable:
        if layout.replicated:
            return super().table(layout, parameters, group, dtype, fused=fused)
        return RemoteTable(layout, dtype, self._collectives)

    def ask(self, input: InputExchange, prepared: Prepared, sent: SentIds) -> None:
        """Let a batch's ids go with the lookup that is to come."""
        if prepared.differentiable:
            tables = ", ".join(repr(table) for _, table, _ in input.expect.tables)
            raise ConfigError(
                f"the ids of tables {tables} have weights that take a gradient, which servers do not send back; detach "
                "the weights, or shard the tables by collectives"
            )
        size, bag_words = prepared.lengths.size(1), input.payload.bag_words(prepared.slot_sizes)
        of_ranks = zip(bag_words, sent.counts, sent.parts, strict=True)
        parts = [(self._number, [size, bags, *counts], words(pieces)) for bags, counts, pieces in of_ranks]
        self._collectives.ask(parts[self._collectives.trainers.world_size :])

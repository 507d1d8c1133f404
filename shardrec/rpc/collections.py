"""A trainer's collections whose tables are on servers."""

from __future__ import annotations

from collections.abc import Iterable, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from shardrec.errors import ConfigError
from shardrec.exchange.blocks import BlocksInFlight, Stream
from shardrec.exchange.input import Prepared, SentIds
from shardrec.exchange.queue import ModelContext
from shardrec.layout import Shard, ShardingPlan
from shardrec.lookup.optimizers import FusedOptimizer
from shardrec.modules.bags import BagCall, ShardedEmbeddingBagCollection
from shardrec.modules.collection import ShardedCollection, Values
from shardrec.modules.sequences import SequenceCall, ShardedEmbeddingCollection
from shardrec.modules.table import ShardedTable, load_table
from shardrec.rpc.collectives import RemoteCollectives, words

__all__ = ["RemoteCollection", "RemoteEmbeddingBagCollection", "RemoteEmbeddingCollection"]


class RemoteTable(ShardedTable):
    """A table on servers, in a trainer's model: no parameters; its state_dict entry is read from them.

    Args:
        like: the table as the sharded collection made it.
        collectives: of the trainer.
    """

    def __init__(self, like: ShardedTable, collectives: RemoteCollectives) -> None:
        super().__init__(like.layout, {}, None, like.dtype)
        self._collectives = collectives

    def _save_to_state_dict(self, destination: MutableMapping[str, Any], prefix: str, keep_vars: bool) -> None:
        layout = self.layout
        whole = torch.empty((layout.num_embeddings, layout.embedding_dim), dtype=self.dtype)
        self._collectives.wait_for_updates()
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
        collectives.wait_for_updates()
        for shard, values in shards.items():
            assert shard is not None, "a table on servers is cut"
            rect = [shard.row_start, shard.row_end, shard.col_start, shard.col_end]
            server = shard.rank - collectives.trainers.world_size
            collectives.servers.tell(server, "write", layout.name, rect, values)


class _Asking:
    """The additional part of a call whose rows come from servers: its ids are sent with the exchange of the rows."""

    def outgoing(self: Any, inside: BlocksInFlight | None, stream: int) -> Stream:
        collection: RemoteCollection = self._collection
        collection.ask(self.prepared, self.sent)
        outgoing: Stream = super().outgoing(inside, stream)  # type: ignore[misc]
        return outgoing


class _RemoteBagCall(_Asking, BagCall):
    pass


class _RemoteSequenceCall(_Asking, SequenceCall):
    pass


class RemoteCollection(ShardedCollection):
    """The base of the remote collections.

    Args:
        module: the unsharded collection. Values that it has are sent to the servers; one on meta leaves the servers'
            as they are.
        plan: over the trainers and the servers, with shards on servers alone.
        context: of the model; its collectives are a trainer's.
        number: of the collection among those of the model.
        options: of the sharded collection.
    """

    portable = False  # it needs the connection to the servers

    def __init__(
        self,
        module: EmbeddingBagCollection | EmbeddingCollection,
        plan: ShardingPlan,
        *,
        context: ModelContext,
        number: int,
        **options: Any,
    ) -> None:
        self.__dict__["_unsharded"] = [module]  # in a list, or nn.Module would take it for a child
        super().__init__(module, plan, context=context, **options)
        del self.__dict__["_unsharded"]
        self.number = number

    @property
    def _servers(self) -> RemoteCollectives:
        collectives = self.context.collectives
        assert isinstance(collectives, RemoteCollectives), "a remote collection has a trainer's collectives"
        return collectives

    def ask(self, prepared: Prepared, sent: SentIds) -> None:
        """Let a batch's ids go with the lookup that is to come."""
        collectives = self._servers
        if prepared.differentiable:
            tables = ", ".join(map(repr, self.tables()))
            raise ConfigError(
                f"the ids of tables {tables} have weights that take a gradient, which servers do not send back; detach "
                "the weights, or shard the tables by collectives"
            )
        headers = self.input.requests(prepared, sent)
        first = collectives.trainers.world_size
        pairs = zip(headers[first:], sent.parts[first:], strict=True)
        collectives.ask([(self.number, header, words(pieces)) for header, pieces in pairs])

    def set_learning_rate(self, optimizer: FusedOptimizer, lr: float) -> None:
        """Use ``lr`` for the tables that were given ``optimizer``, from the next update on."""
        super().set_learning_rate(optimizer, lr)
        self._servers.rates[optimizer] = lr

    def step_counts(self) -> dict[str, int]:
        """Per table, how many updates its fused optimizer has made; asks the servers."""
        collectives = self._servers
        collectives.wait_for_updates()
        counts = super().step_counts()
        for server in range(len(collectives.servers)):
            for name, count in collectives.servers.call(server, "step_counts").items():
                if name in counts:
                    counts[name] = max(counts[name], count)
        return counts

    def _build_parameters(self, first_values: Iterable[tuple[str, Values]]) -> nn.ModuleDict:
        module = self.__dict__["_unsharded"][0]
        weights = {key.split(".")[1]: weight for key, weight in module.named_parameters()}
        self.first_values = {name: weight.detach() for name, weight in weights.items() if not weight.is_meta}
        modules = super()._build_parameters(first_values)
        for name, table in modules.items():
            if not self.table_layouts[name].replicated:
                modules[name] = RemoteTable(table, self._servers)  # type: ignore[arg-type]
        return modules

    def send_first_values(self) -> None:
        """Send the values that the unsharded collection had."""
        for name, table in self.tables().items():
            if isinstance(table, RemoteTable) and name in self.first_values:
                table.write(self.first_values[name])
        self.first_values = {}


class RemoteEmbeddingBagCollection(RemoteCollection, ShardedEmbeddingBagCollection):
    """An EmbeddingBagCollection whose tables are on embedding servers.

    Takes and returns what :class:`shardrec.modules.ShardedEmbeddingBagCollection` does: one lookup per server forward,
    for all the model's collections whose inputs are ready together, and one update per server in backward.
    :func:`shardrec.shard` with ``servers`` makes it.
    """

    def new_call(self, features: KeyedJaggedTensor) -> _RemoteBagCall:
        """A forward's call, whose ids are not under way yet."""
        return _RemoteBagCall(self, features)


class RemoteEmbeddingCollection(RemoteCollection, ShardedEmbeddingCollection):
    """An EmbeddingCollection whose tables are on embedding servers.

    Takes and returns what :class:`shardrec.modules.ShardedEmbeddingCollection` does; see
    :class:`RemoteEmbeddingBagCollection`.
    """

    def new_call(self, features: KeyedJaggedTensor) -> _RemoteSequenceCall:
        """A forward's call, whose ids are not under way yet."""
        return _RemoteSequenceCall(self, features)

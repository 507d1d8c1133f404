"""A sharded ``EmbeddingBagCollection``: the same input, keys and values, its tables over the ranks.

Shapes: B samples of this rank, D columns of the output (the unsharded module's), L lookups (a feature in a table).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from shardrec.awaitable import LazyAwaitable
from shardrec.errors import ConfigError
from shardrec.exchange.check import Batch, Expectation
from shardrec.exchange.collectives import collectives_of
from shardrec.exchange.input import InputExchange
from shardrec.exchange.output import OutputExchange
from shardrec.exchange.route import Lookup, build_route, output_pieces
from shardrec.exchange.step import StepContext
from shardrec.layout import Shard, ShardingPlan
from shardrec.lookup.groups import LookupTable, group_tables
from shardrec.lookup.optimizers import FusedOptimizer, fused_optimizer_of
from shardrec.lookup.replicated import ReplicatedLookup
from shardrec.lookup.shards import ShardLookup
from shardrec.modules.initial import first_values
from shardrec.modules.pooled import PooledEmbeddings
from shardrec.modules.table import ShardedTable

__all__ = ["ShardedEmbeddingBagCollection", "qualified_name"]


def qualified_name(path: str, table: str) -> str:
    """The name of a table in a plan: the path of its collection in the model, a dot, and the table's own name."""
    return f"{path}.{table}" if path else table


class ShardedEmbeddingBagCollection(nn.Module):
    """An EmbeddingBagCollection whose tables are cut over the ranks of a process group.

    Takes a KeyedJaggedTensor of the local batch and returns a lazily awaited KeyedTensor with the unsharded module's
    keys, in its order. One header, one payload and one output all-to-all forward and one all-to-all backward, whatever
    the plan. Gradients are means over the ranks, as DistributedDataParallel's are.

    Args:
        module: the unsharded collection, on the CPU, on ``device``, or on meta (then its values are drawn as
            ``EmbeddingBagCollection`` draws them). Optimizers given by ``apply_optimizer_in_backward`` are fused.
        plan: holds a layout for each table, under ``qualified_name(path, table)``.
        path: the module's path in the model; "" by itself.
        device: where the shards live; default: the CPU.
        group: the process group; default: the default group, or a single rank without one.
        context: shared by the sharded modules of a model; default: a new one.

    Raises:
        PlanError: if the plan does not fit the tables or the group.
        ConfigError: for a table type or an optimizer that cannot be sharded.
    """

    def __init__(
        self,
        module: EmbeddingBagCollection,
        plan: ShardingPlan,
        *,
        path: str = "",
        device: torch.device | str | None = None,
        group: dist.ProcessGroup | None = None,
        context: StepContext | None = None,
    ) -> None:
        super().__init__()
        self.device = torch.device(device or "cpu")
        self.context = context or StepContext(collectives_of(group), self.device)
        self._configs: list[EmbeddingBagConfig] = module.embedding_bag_configs()
        self._is_weighted: bool = module.is_weighted()
        self._embedding_names: list[str] = list(module._embedding_names)
        tables = [_lookup_table(module, config, plan, path) for config in self._configs]
        self._optimizers = {
            config.name: table.optimizer
            for config, table in zip(self._configs, tables, strict=True)
            if table.optimizer is not None
        }
        self._build_lookups(tables)
        self._build_parameters(module, tables, group)

    def _build_lookups(self, tables: Sequence[LookupTable]) -> None:
        collectives = self.context.collectives
        groups = group_tables(tables, self.device)
        group_of = {layout.name: index for index, group in enumerate(groups) for layout in group.layouts}
        replicated = [table for table in tables if table.layout.replicated]
        number = {table.layout.name: index for index, table in enumerate(replicated)}
        lookups: list[Lookup] = []
        dims, own_features, own_tables = [], [], []
        for config, table in zip(self._configs, tables, strict=True):
            for feature in config.feature_names:
                name = table.layout.name
                lookups.append(
                    Lookup(
                        feature=feature,
                        layout=table.layout,
                        group=group_of.get(name, 0),
                        output=self._embedding_names[len(lookups)],
                        mean=config.pooling is PoolingType.MEAN,
                    )
                )
                dims.append(config.embedding_dim)
                if name in number:
                    own_features.append(feature)
                    own_tables.append(number[name])
        route = build_route(lookups, collectives.world_size, len(groups))
        expect = Expectation(
            tables=tuple((lookup.feature, lookup.layout.name, lookup.layout.num_embeddings) for lookup in lookups),
            weighted=self._is_weighted,
            device=self.device,
        )
        self._dims = dims
        self._lookups = tuple(lookups)
        self._own_features = tuple(own_features)
        self._input = InputExchange(route, expect, self.context)
        self._shards = ShardLookup(groups, route.slots[collectives.rank], collectives, self.device)
        self._replicas = ReplicatedLookup(replicated, own_tables, self.context, self.device) if replicated else None
        self._replica_number = number
        widths = [route.width(rank) for rank in range(collectives.world_size)]
        self._output = OutputExchange(widths, output_pieces(lookups, route), collectives)
        columns = [index for index, dim in enumerate(dims) for _ in range(dim)]
        self._column_lookup = torch.tensor(columns, dtype=torch.int64, device=self.device)
        self._positions: dict[tuple[str, ...], tuple[Tensor, Tensor]] = {}

    def _build_parameters(
        self, module: EmbeddingBagCollection, tables: Sequence[LookupTable], group: dist.ProcessGroup | None
    ) -> None:
        world_size = self.context.collectives.world_size
        sharding_group = (group or dist.group.WORLD) if world_size > 1 else None
        fused = {table.layout.name: table.optimizer is not None for table in tables}
        layouts = {config.name: table.layout for config, table in zip(self._configs, tables, strict=True)}
        self.embedding_bags = nn.ModuleDict()
        by_shard: dict[Shard, nn.Parameter] = {}
        for name, values in first_values(module):
            layout = layouts[name]
            parameters: dict[Shard | None, nn.Parameter] = {}
            if layout.replicated:
                assert self._replicas is not None, "a replicated table has a replicated lookup"
                parameters[None] = self._replicas.parameters[self._replica_number[layout.name]]
                with torch.no_grad():
                    parameters[None].copy_(values)
            for shard in layout.on_rank(self.context.collectives.rank):
                weight = self._shards.weight(shard)
                weight.copy_(values[shard.row_start : shard.row_end, shard.col_start : shard.col_end])
                parameters[shard] = by_shard[shard] = nn.Parameter(weight)
                if fused[layout.name]:
                    # torchrec.optim's filter for "has its own optimizer" looks for this attribute.
                    parameters[shard]._in_backward_optimizers = []  # type: ignore[attr-defined]
            self.embedding_bags[name] = ShardedTable(layout, parameters, sharding_group)
        self._shards.own_parameters(by_shard)

    def forward(self, features: KeyedJaggedTensor) -> LazyAwaitable[KeyedTensor]:
        """Look up the local batch.

        Args:
            features: the batch of this rank: int32 or int64 ids of the tables' features, in any order; further keys
                are ignored. Batch sizes may differ between ranks and may be 0.

        Returns:
            Lazily awaited KeyedTensor of (B, D) float32.

        Raises:
            InputError: on every rank at the same step, if the batch of any is faulty.
            PeerError: if another rank is gone.
        """
        mode = "on" if torch.is_grad_enabled() else "off"
        dense = self.context.dense_signature
        agreement = f"gradients {mode}" + (f", other inputs {dense}" if dense else "")
        incoming = self._input.start(features, agreement)
        shard_input = self._input.finish(incoming)
        token, outgoing = self._output.start(self._shards(shard_input), shard_input.batch_sizes)
        return PooledEmbeddings(
            exchange=self._output,
            token=token,
            pending=outgoing,
            replicated=self._look_up_replicas(incoming.batch),
            lengths=self._bag_lengths(incoming.batch),
            keys=self._embedding_names,
            dims=self._dims,
        )

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """The configs of the unsharded collection."""
        return self._configs

    def is_weighted(self) -> bool:
        """Whether the input carries a weight per id."""
        return self._is_weighted

    def fused_optimizers(self) -> dict[str, FusedOptimizer]:
        """The fused optimizer of each table that has one, by the table's own name; alike on every rank."""
        return dict(self._optimizers)

    def fused_state(self, table: str, state: str) -> dict[Shard | None, Tensor]:
        """This rank's parts of a fused optimizer's state, as views: (rows, cols), or (rows,) if kept per row."""
        module = self.embedding_bags[table]
        assert isinstance(module, ShardedTable), "embedding_bags holds ShardedTables"
        parts: dict[Shard | None, Tensor] = {}
        for shard in module.locals:
            if shard is not None:
                parts[shard] = self._shards.states(shard)[state]
            else:
                assert self._replicas is not None, "a replica has a replicated lookup"
                parts[shard] = self._replicas.states(self._replica_number[module.layout.name])[state]
        return parts

    def step_counts(self) -> dict[str, int]:
        """Per table, by its name in the plan, how many updates its fused optimizer has made (for Adam's bias)."""
        replicas = self._replicas.step_counts() if self._replicas is not None else {}
        return self._shards.step_counts() | replicas

    def load_step_counts(self, counts: Mapping[str, int]) -> None:
        """Set what :meth:`step_counts` gave."""
        self._shards.load_step_counts(counts)
        if self._replicas is not None:
            self._replicas.load_step_counts(counts)

    def _look_up_replicas(self, batch: Batch) -> Tensor | None:
        if self._replicas is None:
            return None
        index = self._key_positions(batch.keys)[0]
        lengths = batch.lengths.index_select(0, index)
        _, ids, weights = torch.ops.fbgemm.permute_2D_sparse_data(
            index.to(torch.int32), batch.lengths, batch.values, batch.weights, None
        )
        return self._replicas(ids, lengths, weights)

    def _bag_lengths(self, batch: Batch) -> Tensor | None:
        """(B, D) bag length behind each mean-pooled column, at least 1; 1 for sums; None without mean pooling."""
        if not any(lookup.mean for lookup in self._lookups):
            return None
        lengths = batch.lengths.index_select(0, self._key_positions(batch.keys)[1]).to(torch.float32).clamp_(min=1)
        for index, lookup in enumerate(self._lookups):
            if not lookup.mean:
                lengths[index] = 1.0
        return lengths.index_select(0, self._column_lookup).t()

    def _key_positions(self, keys: tuple[str, ...]) -> tuple[Tensor, Tensor]:
        """Where the replicated lookups' features, and all lookups' features, are among the keys."""
        positions = self._positions.get(keys)
        if positions is None:
            place = {key: index for index, key in enumerate(keys)}
            own = [place[feature] for feature in self._own_features]
            every = [place[lookup.feature] for lookup in self._lookups]
            positions = (torch.tensor(own, device=self.device), torch.tensor(every, device=self.device))
            self._positions[keys] = positions
        return positions

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Kernels own the weights' memory, so a sharded module stays where and what it is."""
        probe = torch.empty(0, device=self.device)
        moved: Any = fn(probe)
        if moved.device.type != probe.device.type or moved.dtype != probe.dtype:
            raise ConfigError(
                f"a sharded collection on {self.device} cannot be moved or cast ({moved.device}, {moved.dtype}); pass "
                "device= to shardrec.shard, and cast the unsharded model before"
            )
        return self


def _lookup_table(
    module: EmbeddingBagCollection, config: EmbeddingBagConfig, plan: ShardingPlan, path: str
) -> LookupTable:
    name = qualified_name(path, config.name)
    if config.data_type is not DataType.FP32:
        raise ConfigError(f"table {name!r} is {config.data_type}; sharded tables are FP32 so far: set data_type=FP32")
    plan.check_tables({name: (config.num_embeddings, config.embedding_dim)}, partial=True)
    weight = module.embedding_bags[config.name].weight
    return LookupTable(layout=plan.by_name[name], optimizer=fused_optimizer_of(weight, name))

"""What a checkpoint holds of a sharded model: weights, fused optimizer states and the dense optimizer, by name.

Each entry is a plain tensor that every rank has alike, or a ShardedTensor; so ``torch.distributed.checkpoint`` can cut
it anew for another plan or number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import ShardedTensor

from shardrec.layout import Shard, TableLayout
from shardrec.modules.collection import ShardedCollection
from shardrec.modules.model import ShardedModel
from shardrec.modules.replicated_model import ReplicatedModel
from shardrec.modules.table import ShardedTable, as_one_tensor

__all__ = [
    "TableState",
    "dense_parameters",
    "is_first_replica",
    "sharded_collections",
    "table_parameters",
    "table_states",
]


@dataclass(frozen=True, kw_only=True)
class TableState:
    """A tensor as large as a table (or its rows), of which this rank holds parts.

    Args:
        layout: where the table lives.
        parts: this rank's parts, views; empty where the rank holds no shard.
        rowwise: one value per row.
        group: the process group; None on one rank.
        dtype: of the tensor, alike on every rank.
    """

    layout: TableLayout
    parts: Mapping[Shard | None, Tensor]
    rowwise: bool
    group: dist.ProcessGroup | None
    dtype: torch.dtype

    def as_one_tensor(self) -> Tensor | ShardedTensor:
        """The tensor as the value of a state_dict."""
        return as_one_tensor(self.layout, self.parts, self.group, rowwise=self.rowwise, dtype=self.dtype)


def sharded_collections(model: ShardedModel) -> dict[str, ShardedCollection]:
    """The sharded collections by path."""
    return {path: module for path, module in model.module.named_modules() if isinstance(module, ShardedCollection)}


def is_first_replica(model: ShardedModel) -> bool:
    """Whether this rank's copy of the tables is the one that counts where copies are not averaged."""
    return not isinstance(model, ReplicatedModel) or model.replica_groups.replica == 0


def _tables(model: ShardedModel) -> Iterator[tuple[str, ShardedTable]]:
    for path, module in model.module.named_modules():
        if isinstance(module, ShardedTable):
            yield path, module


def table_parameters(model: ShardedModel) -> dict[str, TableState]:
    """Each table's weight, by its state_dict key."""
    return {
        f"{path}.weight": TableState(
            layout=table.layout,
            parts={shard: parameter.detach() for shard, parameter in table.locals.items()},
            rowwise=False,
            group=table.group,
            dtype=table.dtype,
        )
        for path, table in _tables(model)
    }


def table_states(model: ShardedModel) -> dict[str, TableState]:
    """Each fused optimizer state, by ``"<path of the table>.<state>"``, alike on every rank."""
    paths = {id(table): path for path, table in _tables(model)}
    found = {}
    for collection in sharded_collections(model).values():
        tables = collection.tables()
        for name, optimizer in collection.fused_optimizers().items():
            for state in optimizer.states:
                found[f"{paths[id(tables[name])]}.{state}"] = TableState(
                    layout=tables[name].layout,
                    parts=collection.fused_state(name, state),
                    rowwise=optimizer.rowwise,
                    group=tables[name].group,
                    dtype=torch.float32,
                )
    return found


def dense_parameters(model: ShardedModel) -> dict[str, nn.Parameter]:
    """The parameters that are not tables, by name."""
    tables = {id(parameter) for _, table in _tables(model) for parameter in table.parameters()}
    return {name: parameter for name, parameter in model.named_parameters() if id(parameter) not in tables}


def dense_buffers(model: ShardedModel) -> dict[str, Tensor]:
    """The persistent buffers, by their state_dict key."""
    known = {f"{path}.weight" for path, _ in _tables(model)} | set(dense_parameters(model))
    return {
        name: value
        for name, value in model.state_dict().items()
        if name not in known and isinstance(value, torch.Tensor)
    }

"""The tensors of a sharded model: weights, fused optimizer states, dense parameters and buffers, by name.

Each rank of the first replica writes its shards of cut tables. Tensors that every rank has (replicated tables, the
dense part, buffers) are written by rank 0: a BatchNorm's statistics differ between ranks, and a checkpoint has rank
0's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from shardrec.checkpoint.ids import dynamic_tables
from shardrec.checkpoint.parts import HeldTensor, Part, Rect, held
from shardrec.errors import ConfigError
from shardrec.layout import Shard
from shardrec.modules.sharded_model import ShardedModel
from shardrec.modules.table import ShardedTable
from shardrec.replicas.replicated_model import ReplicatedModel

__all__ = ["ParameterInfo", "model_tensors", "parameter_infos", "table_tensors"]


@dataclass(frozen=True, kw_only=True)
class ParameterInfo:
    """A parameter of this rank.

    Args:
        name: its state_dict key.
        tensor: the tensor of which it is a part.
        is_table: whether it is a table, or a shard of one.
        is_fused: whether a fused optimizer updates it in backward, so that no other one does.
    """

    name: str
    tensor: HeldTensor
    is_table: bool = False
    is_fused: bool = False


def parameter_infos(model: ShardedModel) -> dict[int, ParameterInfo]:
    """The description of each parameter of this rank, by the parameter's ``id``."""
    _reshard(model)
    infos = {}
    collections = model.sharded_collections
    fused = {id(collection.tables()[name]) for collection in collections for name in collection.fused_optimizers()}
    for path, table in _tables(model):
        for shard, parameter in table.locals.items():
            tensor = _of_table(model, table, {shard: parameter.detach()}, table.dtype)
            name = f"{path}.weight"
            infos[id(parameter)] = ParameterInfo(name=name, tensor=tensor, is_table=True, is_fused=id(table) in fused)
    for name, parameter in model.named_parameters():
        if id(parameter) not in infos:
            infos[id(parameter)] = ParameterInfo(name=name, tensor=held(parameter, saved=_is_lead(model)))
    return infos


def model_tensors(model: ShardedModel, *, to_write: bool = False) -> dict[str, HeldTensor]:
    """All tensors but those of an ordinary optimizer, by name; the names are the same on every rank. They are to be
    read before the next forward, or if ``to_write``, written.

    Raises:
        ConfigError: if the model's state_dict has an entry that is not a tensor.
    """
    tensors = table_tensors(model, to_write=to_write)
    for table in dynamic_tables(model):
        tensors |= table.held()
    tensors |= {f"model.{name}": held(value, saved=_is_lead(model)) for name, value in _dense_values(model)}
    return tensors


def table_tensors(model: ShardedModel, *, to_write: bool = False) -> dict[str, HeldTensor]:
    """Of these, the tables and the states of their fused optimizers."""
    tensors: dict[str, HeldTensor] = {}
    paths: dict[int, str] = {}
    for path, table in _tables(model):
        paths[id(table)] = path
        tensors[f"model.{path}.weight"] = _of_table(model, table, table.tensors(to_write=to_write), table.dtype)
    for collection in model.sharded_collections:
        for name, optimizer in collection.fused_optimizers().items():
            table = collection.tables()[name]
            for state in optimizer.states:
                values, rowwise = collection.fused_state(name, state), state in optimizer.row_states
                tensors[f"fused.{paths[id(table)]}.{state}"] = _of_table(
                    model, table, values, torch.float32, rowwise=rowwise
                )
            if collection.averages:
                average, step = (collection.fused_state(name, state) for state in ("average", "average_step"))
                path = f"average.{paths[id(table)]}"
                tensors[f"{path}.weight"] = _of_table(model, table, average, torch.float32)
                tensors[f"{path}.step"] = _of_table(model, table, step, torch.int32, rowwise=True)
    return tensors


def _dense_values(model: ShardedModel) -> Iterator[tuple[str, Tensor]]:
    """What the modules that are not tables put into a state_dict, by key."""
    _reshard(model)
    for path, module in model.module.named_modules(remove_duplicate=False):
        values: dict[str, object] = {}
        if not isinstance(module, ShardedTable):
            module._save_to_state_dict(values, f"{path}." if path else "", keep_vars=False)
        for name, value in values.items():
            if not isinstance(value, Tensor):
                raise ConfigError(
                    f"the state_dict has a {type(value).__name__} under {name!r}, and a checkpoint holds tensors; "
                    f"register it as a buffer of {type(module).__name__}, or keep it in extra="
                )
            yield name, value


def _tables(model: ShardedModel) -> Iterator[tuple[str, ShardedTable]]:
    for path, module in model.module.named_modules():
        if isinstance(module, ShardedTable):
            yield path, module


def _of_table(
    model: ShardedModel,
    table: ShardedTable,
    tensors: dict[Shard | None, Tensor],
    dtype: torch.dtype,
    *,
    rowwise: bool = False,
) -> HeldTensor:
    """A table's weights or states. Of a state kept per row, column stripes hold equal copies, and the first counts."""
    shape = (table.layout.num_embeddings, table.layout.embedding_dim)[: 1 if rowwise else 2]
    first = not isinstance(model, ReplicatedModel) or model.replica_groups.replica == 0
    parts = []
    for shard, values in tensors.items():
        rect, saved = Rect.whole(shape), _is_lead(model)
        if shard is not None:
            rect, saved = Rect.of(shard), first and not (rowwise and shard.col_start)
        if rowwise:
            rect = rect._replace(col_start=0, col_end=1)
        parts.append(Part(rect=rect, values=values, saved=saved))
    return HeldTensor(shape=shape, dtype=dtype, parts=tuple(parts), rows_of=table.layout.name)


def _reshard(model: ShardedModel) -> None:
    """After a forward without a backward, FSDP2's modules hold whole parameters, which are no part of the model."""
    for module in model.module.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _is_lead(model: ShardedModel) -> bool:
    return model.group is None or dist.get_rank(model.group) == 0

"""The tensors of a sharded model: weights, fused optimizer states, dense parameters and buffers, by name.

Each rank of the first replica writes its shards of cut tables. Tensors that every rank has (replicated tables, the
dense part, buffers) are written by rank 0: a BatchNorm's statistics differ between ranks, and a checkpoint has rank
0's.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from shardrec.checkpoint.parts import HeldTensor, Part, Rect, held
from shardrec.errors import ConfigError
from shardrec.modules.fsdp import let_go_of_whole_parameters
from shardrec.modules.inventory import Kind, RowState, dense_values, row_states
from shardrec.modules.sharded_model import ShardedModel
from shardrec.replicas.replicated_model import ReplicatedModel


@dataclass(frozen=True, kw_only=True)
class ParameterInfo:
    """A parameter of this rank.

    Args:
        name: its state_dict key.
        tensor: the tensor that it is a part of.
        is_table: whether it is a table, or a shard of one.
        is_fused: whether a fused optimizer updates it in backward, so that no other one does.
    """

    name: str
    tensor: HeldTensor
    is_table: bool = False
    is_fused: bool = False


def parameter_infos(model: ShardedModel) -> dict[int, ParameterInfo]:
    """The description per parameter of this rank, by the parameter's ``id``."""
    let_go_of_whole_parameters(model)
    infos = {}
    collections = model.sharded_collections
    fused = {id(collection.tables()[name]) for collection in collections for name in collection.fused_optimizers()}
    for path, table in model.named_tables().items():
        for shard, parameter in table.locals.items():
            weights = {shard: parameter.detach()}
            state = RowState(kind=Kind.WEIGHT, table=table, name="weight", tensors=weights, dtype=table.dtype)
            name = f"{path}.weight"
            infos[id(parameter)] = ParameterInfo(
                name=name, tensor=_of_rows(model, state), is_table=True, is_fused=id(table) in fused
            )
    for name, parameter in model.named_parameters():
        if id(parameter) not in infos:
            infos[id(parameter)] = ParameterInfo(name=name, tensor=held(parameter, saved=is_lead(model)))
    return infos


def model_tensors(model: ShardedModel, *, to_write: bool = False) -> dict[str, HeldTensor]:
    """All tensors but those of an ordinary optimizer, by name. The names are the same on every rank. They are to be
    read before the next forward, or if ``to_write``, written.

    Raises:
        ConfigError: if the model's state_dict has an entry that is not a tensor.
    """
    tensors = table_tensors(model, to_write=to_write)
    let_go_of_whole_parameters(model)
    for name, module, value in dense_values(model.module):
        if not isinstance(value, Tensor):
            raise ConfigError(
                f"the state_dict has a {type(value).__name__} under {name!r}, and a checkpoint holds tensors. "
                f"Register it as a buffer of {type(module).__name__}, or keep it in extra="
            )
        tensors[f"model.{name}"] = held(value, saved=is_lead(model))
    return tensors


def table_tensors(model: ShardedModel, *, to_write: bool = False) -> dict[str, HeldTensor]:
    """Of these, the values of tables' rows: weights, states of their fused optimizers, averages, dynamic ids."""
    paths = {id(table): path for path, table in model.named_tables().items()}
    states = (state for collection in model.sharded_collections for state in row_states(collection, to_write=to_write))
    return {f"{state.kind.value}.{paths[id(state.table)]}.{state.name}": _of_rows(model, state) for state in states}


def _of_rows(model: ShardedModel, state: RowState) -> HeldTensor:
    """If column stripes have equal values, the first counts."""
    layout, columns = state.table.layout, state.columns
    shape = (layout.num_embeddings, columns or layout.embedding_dim)[: 1 if columns == 1 else 2]
    first = not isinstance(model, ReplicatedModel) or model.replica_groups.replica == 0
    parts = []
    for shard, values in state.tensors.items():
        rect, saved = Rect.whole(shape), is_lead(model)
        if shard is not None:
            rect, saved = Rect.of(shard), first and not (columns and shard.col_start)
        if columns:
            rect = rect._replace(col_start=0, col_end=columns)
        parts.append(Part(rect=rect, values=values, saved=saved))
    rows_of = f"{layout.name}.{state.name}" if state.own_rows else layout.name
    return HeldTensor(shape=shape, dtype=state.dtype, parts=tuple(parts), rows_of=rows_of)


def is_lead(model: ShardedModel) -> bool:
    """Whether this rank writes what every rank has."""
    return model.group is None or dist.get_rank(model.group) == 0

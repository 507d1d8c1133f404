"""What a sharded model holds: weights, fused optimizer states, dense parameters and buffers, by name.

Cut tables are written by the ranks of the first replica, each its shards. Whatever every rank has (replicated tables,
the dense part, buffers) is rank 0's, by definition: a BatchNorm's statistics differ between ranks, and a checkpoint has
rank 0's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from shardrec.checkpoint.parts import HeldTensor, Part, Rect, held
from shardrec.errors import ConfigError
from shardrec.layout import Shard
from shardrec.modules.collection import ShardedCollection
from shardrec.modules.model import ShardedModel
from shardrec.modules.replicated_model import ReplicatedModel
from shardrec.modules.table import ShardedTable

__all__ = ["Place", "model_tensors", "parameter_places", "sharded_collections"]


@dataclass(frozen=True, kw_only=True)
class Place:
    """What a parameter of this rank is.

    Args:
        name: its state_dict key.
        shape: of the whole.
        part: this rank's; None where it has nothing of it.
        is_table: it is a table, or a shard of one.
        is_fused: an optimizer fused into backward updates it, so that no other one does.
    """

    name: str
    shape: tuple[int, ...]
    part: Part | None
    is_table: bool
    is_fused: bool


def sharded_collections(model: ShardedModel) -> list[ShardedCollection]:
    """The sharded collections of a model."""
    return [module for module in model.module.modules() if isinstance(module, ShardedCollection)]


def parameter_places(model: ShardedModel) -> dict[int, Place]:
    """The place of each parameter of this rank, by id."""
    places = {}
    collections = sharded_collections(model)
    fused = {id(one.tables()[name]) for one in collections for name in one.fused_optimizers()}
    for name, table in _tables(model):
        shape = (table.layout.num_embeddings, table.layout.embedding_dim)
        for shard, parameter in table.locals.items():
            part = _part(model, table, shard, parameter.detach())
            places[id(parameter)] = Place(name=name, shape=shape, part=part, is_table=True, is_fused=id(table) in fused)
    for name, parameter in model.named_parameters():
        if id(parameter) not in places:
            whole = held(parameter, saved=_is_lead(model))
            places[id(parameter)] = Place(
                name=name, shape=whole.shape, part=next(iter(whole.parts), None), is_table=False, is_fused=False
            )
    return places


def model_tensors(model: ShardedModel) -> dict[str, HeldTensor]:
    """Everything but an ordinary optimizer, by name; the names are alike on every rank.

    Raises:
        ConfigError: if the model's state_dict has an entry that is no tensor.
    """
    found: dict[str, HeldTensor] = {}
    paths: dict[int, str] = {}
    for name, table in _tables(model):
        paths[id(table)] = name.removesuffix(".weight")
        found[f"model.{name}"] = HeldTensor(
            shape=(table.layout.num_embeddings, table.layout.embedding_dim),
            dtype=table.dtype,
            parts=tuple(_part(model, table, shard, weight.detach()) for shard, weight in table.locals.items()),
        )
    for collection in sharded_collections(model):
        for name, optimizer in collection.fused_optimizers().items():
            table = collection.tables()[name]
            layout = table.layout
            shape = (layout.num_embeddings,) if optimizer.rowwise else (layout.num_embeddings, layout.embedding_dim)
            for state in optimizer.states:
                parts = [_part(model, table, *one) for one in collection.fused_state(name, state).items()]
                found[f"fused.{paths[id(table)]}.{state}"] = HeldTensor(
                    shape=shape, dtype=torch.float32, parts=tuple(parts)
                )
    for name, value in _dense_values(model):
        found[f"model.{name}"] = held(value, saved=_is_lead(model))
    return found


def _dense_values(model: ShardedModel) -> Iterator[tuple[str, Tensor]]:
    """What the modules that are not tables put into a state_dict, by key."""
    for path, module in model.module.named_modules(remove_duplicate=False):
        if isinstance(module, FSDPModule):
            module.reshard()
        values: dict[str, Any] = {}
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
            yield f"{path}.weight", module


def _part(model: ShardedModel, table: ShardedTable, shard: Shard | None, values: Tensor) -> Part:
    """A part of a table, or of a state that is kept per row: of that, column stripes hold equal copies."""
    if shard is None:
        return Part(rect=Rect.whole(values.shape), values=values, saved=_is_lead(model))
    rect, first = Rect.of(shard), not isinstance(model, ReplicatedModel) or model.replica_groups.replica == 0
    if values.dim() == 1:
        return Part(rect=rect._replace(col_start=0, col_end=1), values=values, saved=first and shard.col_start == 0)
    return Part(rect=rect, values=values, saved=first)


def _is_lead(model: ShardedModel) -> bool:
    return model.group is None or dist.get_rank(model.group) == 0

"""A dense optimizer's part of a checkpoint: its states by parameter name, so that they fit another plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from shardrec.checkpoint.state import TableState, is_first_replica, table_parameters
from shardrec.errors import ConfigError
from shardrec.layout import Shard
from shardrec.modules.model import ShardedModel
from shardrec.modules.table import ShardedTable, as_one_tensor

__all__ = ["OptimizerTargets", "load_settings", "optimizer_values", "settings_of"]


@dataclass(frozen=True, kw_only=True)
class _Place:
    """What a parameter is: its state_dict name and, for a table, which shard of it."""

    name: str
    table: TableState | None
    shard: Shard | None


def _places(model: ShardedModel) -> dict[int, _Place]:
    """The place of each parameter of this rank, by id."""
    places = {id(parameter): _Place(name=name, table=None, shard=None) for name, parameter in model.named_parameters()}
    states = table_parameters(model)
    for path, module in model.module.named_modules():
        if isinstance(module, ShardedTable):
            name = f"{path}.weight"
            for shard, parameter in module.locals.items():
                places[id(parameter)] = _Place(name=name, table=states[name], shard=shard)
    return places


def optimizer_values(model: ShardedModel, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    """A dense optimizer's states as ``"optimizer.<parameter>.<state>"``; those of cut tables as sharded tensors."""
    if optimizer is None:
        return {}
    places = _places(model)
    values: dict[str, Any] = {}
    parts: dict[tuple[str, str, torch.dtype], dict[Shard | None, Tensor]] = {}
    for parameter, states in optimizer.state.items():
        place = places.get(id(parameter))
        if place is None:
            continue
        for key, value in states.items():
            tensor = value if isinstance(value, Tensor) else torch.tensor(float(value))
            if place.table is not None and tensor.shape == parameter.shape:
                parts.setdefault((place.name, key, tensor.dtype), {})[place.shard] = tensor
            else:
                values[f"optimizer.{place.name}.{key}"] = tensor
    tables = table_parameters(model)
    parts = _with_other_ranks(model.group, parts)
    for (name, key, dtype), tensors in parts.items() if is_first_replica(model) else ():
        table = tables[name]
        values[f"optimizer.{name}.{key}"] = as_one_tensor(table.layout, tensors, table.group, dtype=dtype)
    return values


def _with_other_ranks(
    group: dist.ProcessGroup | None, parts: dict[tuple[str, str, torch.dtype], dict[Shard | None, Tensor]]
) -> dict[tuple[str, str, torch.dtype], dict[Shard | None, Tensor]]:
    """Add an empty entry for what only other ranks hold: making a sharded tensor takes every rank, in one order."""
    if group is None:
        return parts
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, list(parts), group=group)
    return {entry: parts.get(entry, {}) for entry in sorted({e for entries in gathered for e in entries}, key=str)}


class OptimizerTargets:
    """Tensors to read a dense optimizer's stored states into.

    Args:
        model: whose parameters the optimizer has.
        optimizer: gets the states; None reads none.
        stored: metadata by name of what the checkpoint holds.

    Attributes:
        values: whole tensors to read into, by name.
    """

    def __init__(self, model: ShardedModel, optimizer: torch.optim.Optimizer | None, stored: Mapping[str, Any]) -> None:
        self._optimizer = optimizer
        self._wanted: list[tuple[str, nn.Parameter, str, _Place]] = []
        self.values: dict[str, Tensor] = {}
        if optimizer is None:
            return
        places = _places(model)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                place = places.get(id(parameter))
                if place is not None:
                    self._want(parameter, place, stored)

    def _want(self, parameter: nn.Parameter, place: _Place, stored: Mapping[str, Any]) -> None:
        prefix = f"optimizer.{place.name}."
        for name, meta in stored.items():
            if name.startswith(prefix) and isinstance(meta, TensorStorageMetadata):
                self._wanted.append((name, parameter, name.removeprefix(prefix), place))
                self.values.setdefault(name, torch.empty(meta.size, dtype=meta.properties.dtype))

    def store(self, values: Mapping[str, Any]) -> None:
        """Put what was read into the optimizer, cut for this rank."""
        for name, parameter, key, place in self._wanted:
            assert self._optimizer is not None, "states are read for an optimizer"
            value: Tensor = values[name]
            shard = place.shard
            if shard is not None and value.dim() == 2:
                value = value[shard.row_start : shard.row_end, shard.col_start : shard.col_end]
            scalar = value.dim() == 0
            self._optimizer.state[parameter][key] = value.clone() if scalar else value.clone().to(parameter.device)


def settings_of(optimizer: torch.optim.Optimizer | None) -> list[dict[str, Any]]:
    """The optimizer's settings per parameter group, as far as JSON can hold them."""
    if optimizer is None:
        return []
    keep = (int, float, str, bool, tuple, list, type(None))
    return [
        {key: value for key, value in group.items() if key != "params" and isinstance(value, keep)}
        for group in optimizer.param_groups
    ]


def load_settings(optimizer: torch.optim.Optimizer | None, saved: list[dict[str, Any]]) -> None:
    """Set what :func:`settings_of` gave.

    Raises:
        ConfigError: if the optimizer has another number of groups.
    """
    if optimizer is None or not saved:
        return
    if len(saved) != len(optimizer.param_groups):
        raise ConfigError(
            f"the checkpoint's optimizer has {len(saved)} parameter groups and this one {len(optimizer.param_groups)}; "
            "build the optimizer as it was when the checkpoint was saved"
        )
    for group, settings in zip(optimizer.param_groups, saved, strict=True):
        group.update({key: tuple(value) if isinstance(value, list) else value for key, value in settings.items()})

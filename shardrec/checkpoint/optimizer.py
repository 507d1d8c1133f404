"""An ordinary optimizer's part of a checkpoint: its states by parameter name, so that they fit another plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shardrec.checkpoint.files import DTYPES
from shardrec.checkpoint.manifest import Manifest, SavedTensor
from shardrec.checkpoint.parts import HeldTensor, Part, held, local_part
from shardrec.checkpoint.state import Place, parameter_places, sharded_collections
from shardrec.errors import ConfigError
from shardrec.modules.model import ShardedModel

__all__ = [
    "fused_faults",
    "fused_settings",
    "load_fused_settings",
    "load_settings",
    "optimizer_faults",
    "optimizer_groups",
    "optimizer_targets",
    "optimizer_tensors",
]

_OWN = ("params", "tables", "optimizer", "eps", "betas")
"""What a fused optimizer's group has from its construction."""


def optimizer_tensors(
    model: ShardedModel, optimizer: torch.optim.Optimizer | None
) -> tuple[dict[str, HeldTensor], dict[str, Any]]:
    """An ordinary optimizer's states as ``"optimizer.<parameter>.<state>"``: the tensors, and the Python numbers.

    Raises:
        ConfigError: for a state that cannot be cut for another plan, or is of another type.
    """
    tensors: dict[str, HeldTensor] = {}
    numbers: dict[str, Any] = {}
    places = parameter_places(model)
    for parameter, states in optimizer.state.items() if optimizer is not None else ():
        place = _place(places, parameter)
        for key, value in states.items():
            name = f"optimizer.{place.name}.{key}"
            if "." in key:
                raise ConfigError(f"the optimizer's state {key!r} of {place.name} has a dot in its name; rename it")
            if isinstance(value, Tensor):
                one = _state(place, parameter, value, name)
                # A rank may hold several shards of a table.
                parts = tensors[name].parts if name in tensors and value.shape == parameter.shape else ()
                tensors[name] = replace(one, parts=parts + one.parts)
            elif isinstance(value, (bool, int, float)):
                numbers[name] = value
            elif value is not None:
                raise ConfigError(
                    f"the optimizer's state {key!r} of {place.name} is a {type(value).__name__}; a checkpoint holds "
                    "tensors and numbers: save with another optimizer, or keep this one's state_dict yourself"
                )
    return tensors, numbers


def _place(places: Mapping[int, Place], parameter: Tensor) -> Place:
    place = places.get(id(parameter))
    if place is None:
        raise ConfigError(
            f"the optimizer has a parameter of shape {tuple(parameter.shape)} that the model lacks; build it from the "
            "sharded model's parameters()"
        )
    return place


def _state(place: Place, parameter: Tensor, value: Tensor, name: str) -> HeldTensor:
    if value.shape != parameter.shape:
        if value.dim() and place.is_table:
            raise ConfigError(
                f"{name} has shape {tuple(value.shape)} for a shard of shape {tuple(parameter.shape)}; a table's "
                "states that are neither one number nor of its shape cannot be cut for another plan: give the tables "
                "another optimizer"
            )
        # A table's holders all have it, and the first of them counts.
        return held(value, saved=place.part is not None and place.part.saved)
    if place.part is None:
        return HeldTensor(shape=place.shape, dtype=value.dtype, parts=())
    local = local_part(value, saved=place.part.saved)
    parts = () if local is None else (Part(rect=place.part.rect, values=local.values, saved=place.part.saved),)
    return HeldTensor(shape=place.shape, dtype=value.dtype, parts=parts)


def optimizer_groups(model: ShardedModel, optimizer: torch.optim.Optimizer | None) -> list[dict[str, Any]] | None:
    """Each parameter group's settings, as far as JSON can hold them, and this rank's parameters by name."""
    if optimizer is None:
        return None
    place_of = partial(_place, parameter_places(model))
    return [
        {
            "settings": _settings(group, ("params",)),
            "parameters": sorted({place.name for place in map(place_of, group["params"]) if not place.is_fused}),
        }
        for group in optimizer.param_groups
    ]


def _settings(group: Mapping[str, Any], without: tuple[str, ...]) -> dict[str, Any]:
    keep = (int, float, str, bool, tuple, list, type(None))
    values = {
        key: value.item() if isinstance(value, Tensor) and value.dim() == 0 else value for key, value in group.items()
    }
    return {key: value for key, value in values.items() if key not in without and isinstance(value, keep)}


def optimizer_faults(model: ShardedModel, optimizer: torch.optim.Optimizer | None, manifest: Manifest) -> list[str]:
    """Why the checkpoint's states are not this optimizer's, one sentence each."""
    if optimizer is None:
        return []
    if manifest.param_groups is None:
        return ["it was saved without an optimizer; load it without one, and build the optimizer anew"]
    if len(manifest.param_groups) != len(optimizer.param_groups):
        return [
            f"its optimizer has {len(manifest.param_groups)} parameter groups and this one "
            f"{len(optimizer.param_groups)}; build the optimizer as it was when the checkpoint was saved"
        ]
    known = {place.name for place in parameter_places(model).values()}
    found = []
    groups = optimizer_groups(model, optimizer) or []
    for number, (saved, group) in enumerate(zip(manifest.param_groups, groups, strict=True)):
        differing = sorted(known & set(saved["parameters"]) ^ set(group["parameters"]))
        if differing:
            found.append(
                f"parameter group {number} has {', '.join(differing[:5])} in one of the checkpoint and this optimizer "
                "only; build the optimizer as it was when the checkpoint was saved"
            )
    return found


def optimizer_targets(
    model: ShardedModel, optimizer: torch.optim.Optimizer | None, manifest: Manifest
) -> dict[str, HeldTensor]:
    """Make room in the optimizer for the checkpoint's states: where to read them into, by name.

    Memory that has the right shape is used again. States that the checkpoint lacks are dropped.
    """
    targets: dict[str, HeldTensor] = {}
    saved: dict[str, dict[str, Any]] = {}
    for name, one in (*manifest.tensors.items(), *manifest.numbers.items()):
        parameter_name, _, key = name.rpartition(".")
        saved.setdefault(parameter_name, {})[key] = one
    places = parameter_places(model)
    for group in optimizer.param_groups if optimizer is not None else ():
        on_device = bool(group.get("capturable") or group.get("fused"))
        for parameter in group["params"]:
            place = places[id(parameter)]
            old = optimizer.state.pop(parameter, {})  # type: ignore[union-attr]
            for key, one in saved.get(f"optimizer.{place.name}", {}).items():
                value = one
                if isinstance(one, SavedTensor):
                    device = parameter.device if on_device or key != "step" else torch.device("cpu")
                    value = _room(parameter, place, one, old.get(key), device)
                    name = f"optimizer.{place.name}.{key}"
                    target = _state(place, parameter, value, name)
                    # A rank may hold several shards of a table.
                    parts = targets[name].parts if name in targets else ()
                    targets[name] = replace(target, parts=parts + target.parts)
                optimizer.state[parameter][key] = value  # type: ignore[union-attr]
    return targets


def _room(parameter: Tensor, place: Place, saved: SavedTensor, old: Any, device: torch.device) -> Tensor:
    dtype = DTYPES[saved.dtype]
    shape = parameter.shape if saved.shape == place.shape else torch.Size(saved.shape)
    if isinstance(old, Tensor) and (old.shape, old.dtype, old.device) == (shape, dtype, device):
        return old
    if shape == parameter.shape:
        return torch.empty_like(parameter, dtype=dtype, device=device, requires_grad=False)
    return torch.empty(shape, dtype=dtype, device=device)


def load_settings(optimizer: torch.optim.Optimizer | None, manifest: Manifest) -> None:
    """Set the parameter groups' settings to the checkpoint's."""
    if optimizer is not None:
        for group, saved in zip(optimizer.param_groups, manifest.param_groups or (), strict=True):
            _update(group, saved["settings"])


def _update(group: dict[str, Any], settings: Mapping[str, Any]) -> None:
    for key, value in settings.items():
        if isinstance(group.get(key), Tensor):
            group[key].fill_(value)
        else:
            group[key] = tuple(value) if isinstance(value, list) else value


def fused_settings(model: ShardedModel) -> dict[str, dict[str, Any]]:
    """Per table with a fused optimizer, what a schedule changes of it: the learning rate, and what schedulers add."""
    if model._fused is None:
        return {
            collection.tables()[name].layout.name: {"lr": optimizer.lr, "initial_lr": optimizer.lr}
            for collection in sharded_collections(model)
            for name, optimizer in collection.fused_optimizers().items()
        }
    return {table: _settings(group, _OWN) for group in model._fused.param_groups for table in group["tables"]}


def fused_faults(model: ShardedModel, manifest: Manifest) -> list[str]:
    """Why the checkpoint's settings do not fit the model's fused optimizers, one sentence each."""
    if fused_settings(model) == manifest.fused_settings:
        return []
    return [
        f"tables {', '.join(group['tables'])} share an optimizer here, and not in the checkpoint; give the tables "
        "optimizers as they were when it was saved"
        for group in model.fused_optimizer.param_groups
        if any(one != _saved_settings(group, manifest)[0] for one in _saved_settings(group, manifest))
    ]


def load_fused_settings(model: ShardedModel, manifest: Manifest) -> None:
    """Set what :func:`fused_settings` gave."""
    if fused_settings(model) == manifest.fused_settings:
        return
    for group in model.fused_optimizer.param_groups:
        for settings in _saved_settings(group, manifest):
            _update(group, settings)
    model.fused_optimizer.push()


def _saved_settings(group: Mapping[str, Any], manifest: Manifest) -> list[Mapping[str, Any]]:
    return [manifest.fused_settings[table] for table in group["tables"] if table in manifest.fused_settings]

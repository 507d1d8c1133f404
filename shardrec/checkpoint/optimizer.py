"""Optimizers in a checkpoint: states of ordinary ones by parameter name, so that they fit another plan; settings."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizer, OptimizerWrapper

from shardrec.checkpoint.data_files import DTYPES
from shardrec.checkpoint.manifest import Manifest, ParamGroup, SavedTensor, Settings
from shardrec.checkpoint.parts import HeldTensor, Part, Rect, held
from shardrec.checkpoint.state import ParameterInfo, is_lead, parameter_infos
from shardrec.errors import ConfigError
from shardrec.modules.in_backward import dense_in_backward
from shardrec.modules.inventory import Kind
from shardrec.modules.optim import FusedOptimizers
from shardrec.modules.sharded_model import ShardedModel

Optimizer = torch.optim.Optimizer

_IN_BACKWARD, _SETTINGS = f"{Kind.IN_BACKWARD.value}.", f"{Kind.SETTINGS.value}."


def optimizer_state(model: ShardedModel, optimizer: Optimizer | None) -> tuple[dict[str, HeldTensor], dict[str, float]]:
    """States of an ordinary optimizer as ``"optimizer.<parameter>.<state>"``, of optimizers in backward of the dense
    part as ``"backward.<owner>.<state>"``, and of wrappers around the fused optimizer as
    ``"settings.<wrapper>.<state>"``: the tensors, and the Python numbers.

    Raises:
        ConfigError: for a state that cannot be cut for another plan, or is of another type.
    """
    tensors: dict[str, HeldTensor] = {}
    numbers: dict[str, float] = {}
    _refuse_fused(optimizer)
    for kept in _kept(model, optimizer):
        for key, value in kept.states.get(kept.parameter, {}).items():
            name = f"{kept.owner}.{key}"
            if isinstance(value, Tensor) and "." not in key:
                _add(tensors, name, _state(kept.info, kept.parameter, value, name))
            elif isinstance(value, (bool, int, float)) and "." not in key:
                numbers[name] = value
            elif value is not None:
                raise ConfigError(
                    f"the optimizer's state {key!r} of {kept.info.name} is a {type(value).__name__}. A checkpoint "
                    "holds tensors and numbers, under names without dots: save with another optimizer"
                )
    return tensors, numbers


@dataclass(frozen=True, kw_only=True)
class _Kept:
    """A parameter whose states an optimizer keeps, or a wrapper around it: then the parameter is the wrapper's own.

    Args:
        owner: the first part of the states' names.
        parameter: under which they are kept.
        info: of it.
        states: of the optimizer, by parameter.
        group: of the optimizer. Empty for a wrapper's parameter.
    """

    owner: str
    parameter: nn.Parameter
    info: ParameterInfo
    states: dict[Any, Any]
    group: Mapping[str, Any]


def _kept(model: ShardedModel, optimizer: Optimizer | None, later: Collection[str] = ()) -> Iterator[_Kept]:
    """The parameters of the optimizers that are not fused, and those of wrappers around all optimizers. ``later`` names
    wrappers around the fused optimizer that may come later."""
    infos, trained = parameter_infos(model), set[nn.Parameter]()
    optimizers: list[tuple[str, Optimizer]] = [] if optimizer is None else [("", optimizer)]
    optimizers += [(f"{_IN_BACKWARD}{owner}", each) for owner, each in dense_in_backward(model).items()]
    for owner, each in optimizers:
        for group in each.param_groups:
            trained.update(group["params"])
            for parameter in group["params"]:
                info = _parameter_info(infos, parameter)
                owner_of = owner or f"optimizer.{info.name}"
                yield _Kept(owner=owner_of, parameter=parameter, info=info, states=each.state, group=group)
    wrappers = list[tuple[str, nn.Parameter, Optimizer]]()
    if isinstance(optimizer, KeyedOptimizer):
        keyed = ((f"optimizer.{name}", parameter, optimizer) for name, parameter in optimizer.params.items())
        wrappers += (entry for entry in keyed if entry[1] not in trained)
    fused = model.fused_optimizer if later and model.has_fused_tables else model.made_fused_optimizer
    if fused is not None:
        wrappers += ((f"{_SETTINGS}{name}", parameter, fused) for name, parameter in fused.wrappers(later).items())
    for owner, parameter, each in wrappers:
        part = Part(rect=Rect.whole((0,)), values=parameter, saved=is_lead(model))
        info = ParameterInfo(name=owner, tensor=HeldTensor(shape=(0,), dtype=parameter.dtype, parts=(part,)))
        yield _Kept(owner=owner, parameter=parameter, info=info, states=each.state, group={})


def _refuse_fused(optimizer: Optimizer | None) -> None:
    inner = optimizer
    while isinstance(inner, OptimizerWrapper):
        inner = inner._optimizer
    if isinstance(inner, (CombinedOptimizer, FusedOptimizers)):
        raise ConfigError(
            f"the optimizer is a {type(optimizer).__name__}. The states of model.fused_optimizer go with the model: "
            "give the ordinary optimizer of the other parameters, or None"
        )


def _parameter_info(infos: Mapping[int, ParameterInfo], parameter: Tensor) -> ParameterInfo:
    info = infos.get(id(parameter))
    if info is None:
        raise ConfigError(
            f"the optimizer has a parameter of shape {tuple(parameter.shape)} that the model lacks. Build it from the "
            "sharded model's parameters()"
        )
    return info


def _add(tensors: dict[str, HeldTensor], name: str, tensor: HeldTensor) -> None:
    """Add a part to a state. A rank may hold several shards of a table, with equal numbers: the first counts."""
    known = tensors[name].parts if name in tensors else ()
    rects = {part.rect for part in known}
    added = tuple(replace(part, saved=part.saved and part.rect not in rects) for part in tensor.parts)
    tensors[name] = replace(tensor, parts=known + added)


def _state(info: ParameterInfo, parameter: Tensor, value: Tensor, name: str) -> HeldTensor:
    if value.shape == parameter.shape:
        # The same part of the state as of the parameter.
        parts = zip(info.tensor.parts, held(value, saved=False).parts, strict=True)
        return replace(
            info.tensor, dtype=value.dtype, parts=tuple(replace(part, values=own.values) for part, own in parts)
        )
    if value.dim() and info.is_table:
        raise ConfigError(
            f"{name} has shape {tuple(value.shape)} for a shard of shape {tuple(parameter.shape)}. A table's states "
            "that are neither one number nor of its shape cannot be cut for another plan: give the tables another "
            "optimizer"
        )
    # All that hold a part of the parameter have it, and the first of them counts.
    return held(value, saved=any(part.saved for part in info.tensor.parts))


def optimizer_groups(model: ShardedModel, optimizer: Optimizer | None) -> list[ParamGroup] | None:
    """Each parameter group's settings, as far as JSON can hold them, and this rank's parameters by name."""
    if optimizer is None:
        return None
    _refuse_fused(optimizer)
    place_of = partial(_parameter_info, parameter_infos(model))
    return [
        ParamGroup(
            settings=_settings(group, ("params",)),
            parameters=sorted({info.name for info in map(place_of, group["params"]) if not info.is_fused}),
        )
        for group in optimizer.param_groups
    ]


def fused_settings(model: ShardedModel) -> dict[str, Settings]:
    """Per table with a fused optimizer, the settings that schedules change: learning rate and schedulers' own. Of
    optimizers in backward of the dense part, all settings."""
    settings = {
        f"{_IN_BACKWARD}{owner}": _settings(each.param_groups[0], ("params",))
        for owner, each in dense_in_backward(model).items()
    }
    made = model.made_fused_optimizer
    if made is None:
        return settings | {
            collection.tables()[name].layout.name: {"lr": optimizer.lr}
            for collection in model.sharded_collections
            for name, optimizer in collection.fused_optimizers().items()
        }
    excluded = ("params", "tables", "optimizer", "eps", "betas", "weight_decay")
    return settings | {table: _settings(group, excluded) for group in made.param_groups for table in group["tables"]}


def _groups(
    model: ShardedModel, optimizer: Optimizer | None, manifest: Manifest
) -> Iterator[tuple[str, dict[str, Any], list[Settings]]]:
    """The groups of all optimizers that train a model, named, and what the checkpoint has for each: one entry per
    table. Those of tables only if the checkpoint has other settings."""
    mine, saved = fused_settings(model), manifest.fused_settings
    if any(mine.get(name) != saved.get(name) for name in {*mine, *saved} if not name.startswith(_IN_BACKWARD)):
        for group in model.fused_optimizer.param_groups:
            tables = group["tables"]
            yield (
                f"the fused optimizer of {', '.join(tables)}",
                group,
                [saved[name] for name in tables if name in saved],
            )
    for owner, each in dense_in_backward(model).items():
        known = saved.get(f"{_IN_BACKWARD}{owner}")
        name = f"the {type(each).__name__} in backward of {owner}"
        yield name, each.param_groups[0], [] if known is None else [known]
    groups = [] if optimizer is None else optimizer.param_groups
    for number, (group, of_group) in enumerate(zip(groups, manifest.param_groups or (), strict=False)):
        yield f"parameter group {number}", group, [of_group["settings"]]


def _settings(group: Settings, without: tuple[str, ...]) -> Settings:
    keep = (int, float, str, bool, tuple, list, type(None))
    values = {
        key: value.item() if isinstance(value, Tensor) and value.dim() == 0 else value for key, value in group.items()
    }
    return {key: value for key, value in values.items() if key not in without and isinstance(value, keep)}


def optimizer_faults(model: ShardedModel, optimizer: Optimizer | None, manifest: Manifest) -> list[str]:
    """The reasons why the checkpoint does not fit these optimizers, one sentence each."""
    as_saved = "build the optimizers as they were when the checkpoint was saved"
    faults = list[str]()
    for name, group, saved_settings in _groups(model, optimizer, manifest):
        if any(settings != saved_settings[0] for settings in saved_settings):
            faults.append(f"tables {', '.join(group['tables'])} share an optimizer here only; {as_saved}")
        faults += [fault for settings in saved_settings for fault in _setting_faults(name, group, settings)]
    for owner, each in dense_in_backward(model).items():
        has_some = each.state or each.param_groups[0]["lr"] != each.defaults["lr"]
        if has_some and f"{_IN_BACKWARD}{owner}" not in manifest.fused_settings:
            faults.append(
                f"it lacks states and settings of the {type(each).__name__} in backward of {owner}, which "
                f"has some. {as_saved}"
            )
    known_owners = tuple(f"{_IN_BACKWARD}{owner}." for owner in dense_in_backward(model))
    if model.ranks.world_size > 1:  # tables may have no shard here
        known_owners += tuple(f"{_IN_BACKWARD}{path}.weight." for path in model.named_tables())
    surplus = [name for name in manifest.tensors if name.startswith(_IN_BACKWARD) and not name.startswith(known_owners)]
    faults += [f"it has {surplus[0]}, and the model no such optimizer in backward; {as_saved}"] if surplus else []
    groups = optimizer_groups(model, optimizer)
    if groups is None or optimizer is None:
        return faults
    saved = manifest.param_groups
    if saved is None:
        return [*faults, "it was saved without an optimizer. Load it without one"]
    if len(saved) != len(groups):
        return [*faults, f"its optimizer has {len(saved)} parameter groups and this one {len(groups)}; {as_saved}"]
    infos = {info.name: info for info in parameter_infos(model).values()}
    known = set(infos)
    for name, tensor in manifest.tensors.items():
        info = infos.get(name.removeprefix("optimizer.").rpartition(".")[0])
        if name.startswith("optimizer.") and info and info.is_table and tensor.shape not in ((), info.tensor.shape):
            faults.append(f"{name} has shape {tensor.shape} for a table of shape {info.tensor.shape}; {as_saved}")
    for number, (theirs, ours) in enumerate(zip(saved, groups, strict=True)):
        differing = sorted(known & set(theirs["parameters"]) ^ set(ours["parameters"]))
        if differing:
            faults.append(f"its parameter group {number} and this optimizer's differ in {differing[0]}; {as_saved}")
    return faults


def _setting_faults(owner: str, group: Settings, settings: Settings) -> list[str]:
    """The saved settings that a parameter group does not accept."""
    return [
        f"its {key} of {owner} is {value!r}. Set another value, or load an older checkpoint"
        for key, value in settings.items()
        if key in ("params", "tables", "optimizer") or not _fits(group.get(key), value)
    ]


def _fits(setting: object, saved: object) -> bool:
    """Whether a saved value can replace a setting; in both, None stands for torch's choice."""
    if setting is None or (saved is None and isinstance(setting, bool)):
        return not isinstance(saved, dict)
    if isinstance(setting, (tuple, list)):
        return isinstance(saved, list) and len(saved) == len(setting) and all(map(_fits, setting, saved))
    if isinstance(setting, (bool, str)):
        return isinstance(saved, type(setting))
    if isinstance(saved, bool) or not isinstance(saved, (int, float)):
        return False
    return abs(saved) <= sys.float_info.max or bool(saved == setting)


def load_settings(model: ShardedModel, optimizer: Optimizer | None, manifest: Manifest) -> None:
    """Set the settings of all optimizers to the checkpoint's."""
    for _, group, saved_settings in _groups(model, optimizer, manifest):
        for settings in saved_settings:
            _update(group, settings)
    if model.made_fused_optimizer is not None:
        model.made_fused_optimizer.push()


def _update(group: dict[str, Any], settings: Settings) -> None:
    for key, value in settings.items():
        if isinstance(group.get(key), Tensor):
            group[key].fill_(value)
        else:
            group[key] = tuple(value) if isinstance(value, list) else value


def state_targets(model: ShardedModel, optimizer: Optimizer | None, manifest: Manifest) -> dict[str, HeldTensor]:
    """Allocate the checkpoint's states in the optimizer, and return them by name, to be read into. Memory that has the
    right shape is reused. States that are not in the checkpoint are dropped.
    """
    targets: dict[str, HeldTensor] = {}
    saved: dict[str, dict[str, SavedTensor | float]] = {}
    by_name: dict[str, SavedTensor | float] = {**manifest.tensors, **manifest.numbers}
    for name, saved_value in by_name.items():
        owner, _, key = name.rpartition(".")
        saved.setdefault(owner, {})[key] = saved_value
    later = [owner.removeprefix(_SETTINGS) for owner in saved if owner.startswith(_SETTINGS)]
    for kept in _kept(model, optimizer, later):
        owner, parameter, settings = kept.owner, kept.parameter, manifest.fused_settings
        lacks_owner = owner not in settings if owner.startswith(_IN_BACKWARD) else not settings
        if lacks_owner and not owner.startswith("optimizer."):
            continue  # of a checkpoint without these optimizers
        old = kept.states.pop(parameter, {})
        for key, saved_value in saved.get(owner, {}).items():
            value: Any = saved_value
            if isinstance(saved_value, SavedTensor):
                # As torch's own load_state_dict places them.
                on_host = key == "step" and not (kept.group.get("capturable") or kept.group.get("fused"))
                device = "cpu" if on_host else parameter.device
                value = _room(parameter, kept.info, saved_value, old.get(key), device)
                _add(targets, f"{owner}.{key}", _state(kept.info, parameter, value, f"{owner}.{key}"))
            kept.states[parameter][key] = value
    return targets


def _room(
    parameter: Tensor, info: ParameterInfo, saved: SavedTensor, old: object, device: torch.device | str
) -> Tensor:
    dtype = DTYPES[saved.dtype]
    shape = parameter.shape if saved.shape == info.tensor.shape else torch.Size(saved.shape)
    if isinstance(old, Tensor) and (old.shape, old.dtype, old.device) == (shape, dtype, torch.device(device)):
        return old
    if shape == parameter.shape:
        return torch.empty_like(parameter, dtype=dtype, device=device, requires_grad=False)
    return torch.empty(shape, dtype=dtype, device=device)

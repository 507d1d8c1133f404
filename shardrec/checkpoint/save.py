"""Save and load a sharded model, at any number of ranks and under any plan, all or nothing.

A checkpoint is a folder that ``torch.distributed.checkpoint`` wrote, plus ``shardrec.json`` with the plan, the counts
that Adam's bias correction needs, the dense optimizer's settings and whatever the caller adds. It is written under
another name and renamed when every rank is done, so a folder with the right name is complete.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

from shardrec.checkpoint.optimizer import OptimizerTargets, load_settings, optimizer_values, settings_of
from shardrec.checkpoint.state import (
    TableState,
    dense_buffers,
    dense_parameters,
    is_first_replica,
    sharded_collections,
    table_parameters,
    table_states,
)
from shardrec.errors import ConfigError
from shardrec.modules.model import ShardedModel
from shardrec.modules.replicated_model import ReplicatedModel
from shardrec.modules.table import load_table

__all__ = ["load_checkpoint", "save_checkpoint"]

_MANIFEST = "shardrec.json"
_FORMAT = 1


def save_checkpoint(
    path: str | Path,
    model: ShardedModel,
    optimizer: torch.optim.Optimizer | None = None,
    extra: Mapping[str, Any] | None = None,
) -> None:
    """Write the model, its fused optimizers' states and a dense optimizer. Every rank calls it.

    Replicas are synchronised first, so that training goes on from the checkpoint as it does here. What is not averaged
    (an ordinary optimizer's states of tables; with ``sync_optimizer=False`` the fused ones') is replica 0's.

    Args:
        path: folder to write; an older checkpoint of that name is replaced once the new one is complete.
        model: from :func:`shardrec.shard`.
        optimizer: an ordinary optimizer over (some of) the model's parameters.
        extra: JSON-compatible data of the caller, such as the step; rank 0's is written.
    """
    target = Path(path)
    partial = target.with_name(target.name + ".partial")
    group = model.group
    if isinstance(model, ReplicatedModel):
        # Then it does not matter which of the ranks that hold a shard writes it.
        model.sync_replicas()
    averaged = isinstance(model, ReplicatedModel) and model.replica_options.sync_optimizer
    lead = group is None or dist.get_rank(group) == 0
    if lead:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    _barrier(group)
    values: dict[str, Any] = {}
    for name, weights in table_parameters(model).items():
        values[f"model.{name}"] = weights.as_one_tensor()
    if is_first_replica(model) or averaged:
        values |= {f"fused.{name}": state.as_one_tensor() for name, state in table_states(model).items()}
    values |= {f"model.{name}": parameter.detach() for name, parameter in dense_parameters(model).items()}
    values |= {f"model.{name}": buffer for name, buffer in dense_buffers(model).items()}
    values |= optimizer_values(model, optimizer)
    dcp.save(values, checkpoint_id=partial, process_group=group, no_dist=group is None)
    manifest = {
        "format": _FORMAT,
        "plan": model.plan.to_json(),
        "step_counts": _step_counts(model, group),
        "param_groups": settings_of(optimizer),
        "extra": dict(extra or {}),
    }
    if lead:
        (partial / _MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
        _replace(partial, target)
    _barrier(group)


def load_checkpoint(
    path: str | Path, model: ShardedModel, optimizer: torch.optim.Optimizer | None = None
) -> dict[str, Any]:
    """Read what :func:`save_checkpoint` wrote, for this model's plan and number of ranks. Every rank calls it.

    Args:
        path: the folder.
        model: a sharded model with the same tables and dense part; its plan may differ from the saved one.
        optimizer: gets the saved dense optimizer's state and settings, if one was saved.

    Returns:
        The caller's ``extra`` data.

    Raises:
        ConfigError: if the folder is no complete checkpoint, or not one of this model.
    """
    source = Path(path)
    manifest = _read_manifest(source)
    group = model.group
    stored = dcp.FileSystemReader(source).read_metadata().state_dict_metadata
    tables = {f"model.{name}": state for name, state in table_parameters(model).items()}
    tables |= {f"fused.{name}": state for name, state in table_states(model).items()}
    dense: dict[str, Tensor] = {f"model.{name}": value.detach() for name, value in dense_parameters(model).items()}
    dense |= {f"model.{name}": value for name, value in dense_buffers(model).items()}
    _check_names(source, stored, set(tables) | set(dense), model)
    states = OptimizerTargets(model, optimizer, stored)
    values: dict[str, Any] = {name: _table_target(state) for name, state in tables.items()} | dense
    values |= states.values
    dcp.load(values, checkpoint_id=source, process_group=group, no_dist=group is None)
    for name, state in tables.items():
        if isinstance(values[name], Tensor):
            load_table(state.layout, state.parts, values[name])
    states.store(values)
    for collection in sharded_collections(model).values():
        collection.load_step_counts(manifest["step_counts"])
    load_settings(optimizer, manifest["param_groups"])
    if isinstance(model, ReplicatedModel):
        model.steps_since_sync = 0
    extra: dict[str, Any] = manifest["extra"]
    return extra


def _barrier(group: dist.ProcessGroup | None) -> None:
    if group is not None:
        dist.barrier(group)


def _replace(partial: Path, target: Path) -> None:
    old = target.with_name(target.name + ".old")
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        target.rename(old)
    partial.rename(target)
    shutil.rmtree(old, ignore_errors=True)


def _read_manifest(source: Path) -> dict[str, Any]:
    try:
        manifest: dict[str, Any] = json.loads((source / _MANIFEST).read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError) as error:
        raise ConfigError(
            f"{source} is not a complete shardrec checkpoint ({error}); give the folder that save_checkpoint wrote"
        ) from error
    if manifest.get("format") != _FORMAT:
        raise ConfigError(
            f"{source} has checkpoint format {manifest.get('format')!r}; this release reads format {_FORMAT}"
        )
    return manifest


def _check_names(source: Path, stored: Mapping[str, Any], wanted: set[str], model: ShardedModel) -> None:
    lacking = sorted(wanted - set(stored))
    surplus = sorted(name for name in stored if name.startswith(("model.", "fused.")) and name not in wanted)
    if lacking or surplus:
        parts = [f"it lacks {', '.join(lacking[:5])}"] if lacking else []
        parts += [f"it has {', '.join(surplus[:5])}, which the model lacks"] if surplus else []
        raise ConfigError(
            f"{source} is a checkpoint of another model than this {type(model.module).__name__} (or of other fused "
            f"optimizers): {'; '.join(parts)}"
        )
    shapes = {f"model.{name}": state.layout for name, state in table_parameters(model).items()}
    for name, layout in shapes.items():
        size = tuple(stored[name].size)
        if size != (layout.num_embeddings, layout.embedding_dim):
            raise ConfigError(
                f"{source}: {name} has shape {size} and the model's table "
                f"({layout.num_embeddings}, {layout.embedding_dim}); build the model with the saved sizes"
            )


def _table_target(state: TableState) -> Any:
    """A value for torch.distributed.checkpoint to read into: the parts themselves where it can cut for them."""
    if state.layout.replicated:
        return state.parts[None]
    if state.group is not None and not state.rowwise:
        return state.as_one_tensor()
    # A row's state has a copy in each column stripe, which a sharded tensor cannot say: read the whole, copy the parts.
    layout = state.layout
    size = (layout.num_embeddings,) if state.rowwise else (layout.num_embeddings, layout.embedding_dim)
    return torch.empty(size, dtype=state.dtype)


def _step_counts(model: ShardedModel, group: dist.ProcessGroup | None) -> dict[str, int]:
    """Per table the updates made, as the ranks that count them say."""
    counts: dict[str, int] = {}
    for collection in sharded_collections(model).values():
        counts |= collection.step_counts()
    if group is None or not counts:
        return counts
    highest = torch.tensor(list(counts.values()), device=model.context.device)
    dist.all_reduce(highest, dist.ReduceOp.MAX, group=group)
    return dict(zip(counts, highest.tolist(), strict=True))

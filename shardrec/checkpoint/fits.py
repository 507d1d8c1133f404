"""Whether a checkpoint fits a model and its optimizers: what a load refuses, a save refuses as well."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from shardrec.checkpoint.data_files import DTYPES
from shardrec.checkpoint.ids import Moves
from shardrec.checkpoint.manifest import Manifest, SavedTensor
from shardrec.checkpoint.optimizer import optimizer_faults
from shardrec.checkpoint.parts import HeldTensor
from shardrec.modules.sharded_model import ShardedModel


def misfits(
    manifest: Manifest,
    wanted: Mapping[str, HeldTensor],
    moves: Moves,
    model: ShardedModel,
    optimizer: torch.optim.Optimizer | None,
) -> list[str]:
    """The reasons why a checkpoint does not fit a model and its optimizers, one sentence each. A load asks for them
    before it changes anything, and a save before it writes anything.
    """
    saved = manifest.tensors
    lacking = sorted(name for name in set(wanted) - set(saved) if not moves.may_lack(name))
    surplus = sorted(
        name
        for name in saved
        if name.startswith(("model.", "fused.", "ids.")) and name not in wanted and not moves.may_lack(name)
    )
    faults = [f"it lacks {', '.join(lacking[:5])}"] if lacking else []
    faults += [f"it has {', '.join(surplus[:5])}, which the model lacks"] if surplus else []
    for name in set(wanted) & set(saved):
        faults += _differences(name, saved[name], wanted[name], any_rows=moves.has(name))
    return faults + optimizer_faults(model, optimizer, manifest)


def _differences(name: str, saved: SavedTensor, tensor: HeldTensor, *, any_rows: bool) -> list[str]:
    differences, dtype = [], DTYPES[saved.dtype]
    if saved.shape[any_rows:] != tensor.shape[any_rows:]:
        differences.append(
            f"{name} has shape {saved.shape} and the model's {tensor.shape}. Build the model with the saved sizes"
        )
    if dtype != tensor.dtype and not (dtype.is_floating_point and tensor.dtype.is_floating_point):
        differences.append(f"{name} is {dtype} and the model's {tensor.dtype}. Build the model with the saved type")
    return differences

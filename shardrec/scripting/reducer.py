"""Excludes parameters that differ between ranks from DistributedDataParallel around a scripted model."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

__all__ = ["ignore_in_reducer"]

_IGNORED = "_ddp_params_and_buffers_to_ignore"  # torch.nn.parallel.DistributedDataParallel reads it


def ignore_in_reducer(scripted: torch.jit.ScriptModule, model: nn.Module) -> None:
    """Mark the scripted model so that ``DistributedDataParallel(scripted)`` reduces the others only.

    Args:
        scripted: holds the parameters of ``model``, some under several names.
        model: what was scripted; the ``unreduced_parameters()`` of its modules, where they have such a method, are not
            averaged over the ranks.
    """
    modules: Iterable[Any] = model.modules()
    unreduced = {
        id(parameter)
        for module in modules
        if hasattr(module, "unreduced_parameters")
        for parameter in module.unreduced_parameters()
    }
    if not unreduced:
        return
    named = scripted.named_parameters(remove_duplicate=False)
    setattr(scripted, _IGNORED, [name for name, parameter in named if id(parameter) in unreduced])

"""What DistributedDataParallel is to leave alone of a scripted model: parameters that differ by rank."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, runtime_checkable

import torch
from torch import nn

__all__ = ["HasUnreducedParameters", "ignore_in_reducer"]

_IGNORED = "_ddp_params_and_buffers_to_ignore"  # torch.nn.parallel.DistributedDataParallel reads it


@runtime_checkable
class HasUnreducedParameters(Protocol):
    """A module with parameters whose gradients must not be averaged over the ranks."""

    def unreduced_parameters(self) -> Iterable[nn.Parameter]:
        """Those parameters."""


def ignore_in_reducer(scripted: torch.jit.ScriptModule, model: nn.Module) -> None:
    """Mark the scripted model so that ``DistributedDataParallel(scripted)`` reduces the others only.

    Args:
        scripted: holds the parameters of ``model``, some under several names.
        model: what was scripted.
    """
    unreduced = {
        id(parameter)
        for module in model.modules()
        if isinstance(module, HasUnreducedParameters)
        for parameter in module.unreduced_parameters()
    }
    if not unreduced:
        return
    named = scripted.named_parameters(remove_duplicate=False)
    setattr(scripted, _IGNORED, [name for name, parameter in named if id(parameter) in unreduced])

"""Optimizers that ``apply_optimizer_in_backward`` gave to parameters that are not tables.

[Note: hooks of optimizers in backward]
torch's function has an optimizer step in a hook of its parameter, and keeps parameter and hook in maps of its module,
where they keep each other alive. On several ranks the step must wait for the mean of the gradients: so the hooks are
removed, and :class:`shardrec.modules.dense.DenseReducer` makes the steps. An unsharded table is taken out of the maps,
for its optimizer is fused.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward

from shardrec.modules.table import ShardedTable

_MODULE: Any = import_module("torch.distributed.optim.apply_optimizer_in_backward")


def dense_in_backward(model: nn.Module) -> dict[str, torch.optim.Optimizer]:
    """The optimizers in backward of a sharded model's parameters, except tables', by the parameter's name. Of
    several that a parameter has, further ones as ``name#1`` and so on."""
    return {
        f"{name}#{number}" if number else name: optimizer
        for name, parameter in model.named_parameters()
        for number, optimizer in enumerate(getattr(parameter, "_in_backward_optimizers", ()))
    }


def copy_in_backward(parameter: nn.Parameter, copied: nn.Parameter) -> None:
    """Give a copy of a parameter optimizers of the same classes. Their states and settings are to be loaded."""
    given: Any = parameter
    if getattr(parameter, "_in_backward_optimizers", ()):
        for optimizer_class, settings in zip(given._optimizer_classes, given._optimizer_kwargs, strict=True):
            _apply_optimizer_in_backward(optimizer_class, [copied], settings)


def take_over_steps(parameter: nn.Parameter) -> bool:
    """Remove the hooks that step before the gradient is averaged. Whether the parameter has such optimizers."""
    for handle in _MODULE.param_to_optim_hook_handle_map.pop(parameter, ()):
        handle.remove()
    _MODULE.param_to_acc_grad_map.pop(parameter, None)
    return bool(getattr(parameter, "_in_backward_optimizers", ()))


def steps_in_backward() -> int:
    """Hooks of optimizers in backward in this process: another number where one was given since."""
    return len(_MODULE.param_to_optim_hook_handle_map)


def has_gradient_hooks(model: nn.Module) -> bool:
    """Whether a parameter of a sharded model, but of its tables, has an optimizer in backward or another hook on its
    gradient."""
    return any(
        getattr(parameter, "_in_backward_optimizers", ()) or parameter._post_accumulate_grad_hooks
        for module in model.modules()
        if not isinstance(module, ShardedTable)
        for parameter in module.parameters(recurse=False)
    )

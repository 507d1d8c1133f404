"""FSDP2 for the dense part: its collectives report a rank that is gone, and losses may differ between ranks."""

from __future__ import annotations

from collections.abc import Callable, Collection, MutableMapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter
from torch.distributed.tensor import DTensor, distribute_tensor

from shardrec.errors import ConfigError
from shardrec.exchange.peers import peers


class _AllGather(DefaultAllGather):
    """FSDP2's, which tells a rank that is gone."""

    def __call__(  # FSDP2 gives keywords
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        with peers(group, "parameter all-gather"):
            return super().__call__(output_tensor, input_tensor, group, async_op)


class _ReduceScatter(DefaultReduceScatter):
    """FSDP2's, which tells a rank that is gone."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> dist.Work:
        with peers(group, "gradient reduce-scatter"):
            return super().__call__(output_tensor, input_tensor, group, op, async_op)


class ShardedByFsdp:
    """A module that FSDP2 shards.

    FSDP2 omits parameters without a gradient from a rank's reduce-scatter, so ranks that differ in that would scatter
    different tensors. Missing gradients are filled with zeros before it, and the zeros are removed again if no rank has
    a gradient (:meth:`drop_unused`).

    Args:
        module: is sharded in place.
        group: of the ranks.
        ignored: parameters that stay as they are.
        device: of the others.

    Attributes:
        parameters: FSDP2's.
        filled: in this backward, those that had no gradient before it, either.
    """

    def __init__(
        self, module: nn.Module, group: dist.ProcessGroup, ignored: Collection[nn.Parameter], device: torch.device
    ) -> None:
        self._ignored = set(ignored)
        mesh = DeviceMesh.from_group(group, device.type)
        self._module: FSDPModule = fully_shard(module, mesh=mesh, ignored_params=self._ignored)
        self._module.set_custom_all_gather(_AllGather())
        self._module.set_custom_reduce_scatter(_ReduceScatter())
        self._is_reduced = True
        self.parameters: list[Any] = []
        self.filled: set[Any] = set()
        self._state: Any = self._module._get_fsdp_state()
        state = self._state
        # torch 2.13 has a list of groups, 2.11 one or none.
        groups = getattr(state, "_fsdp_param_groups", None) or filter(None, [state._fsdp_param_group])
        for parameters in groups:
            self.parameters += parameters.fsdp_params
            parameters.post_backward = partial(self._fill_unused, parameters, parameters.post_backward)

    def refuse_in_backward(self) -> None:
        """Raise a ConfigError if a parameter was given an optimizer in backward after it was sharded."""
        if any(getattr(parameter.sharded_param, "_in_backward_optimizers", ()) for parameter in self.parameters):
            refuse_in_backward(self._module, self._ignored)

    def recover(self) -> None:
        """A forward begins: have FSDP2 let go of a backward that raised.

        Raises:
            ConfigError: if this release of torch cannot.
        """
        if not self._state._state_ctx.post_backward_final_callback_queued or torch._C._current_graph_task_id() >= 0:
            return
        reset = getattr(self._module, "reset_iter_state", None)
        if reset is None:
            raise ConfigError(
                f"a backward of this model raised, and FSDP2 of torch {torch.__version__} cannot train on after it. "
                "Start again from the last checkpoint, or use dense='ddp'"
            )
        reset()

    def begin(self, *, reduce: bool) -> None:
        """A backward begins. It averages the gradients if ``reduce``."""
        self.filled.clear()
        if reduce != self._is_reduced:
            self._is_reduced = reduce
            self._module.set_requires_gradient_sync(reduce)

    def flags(self) -> list[bool]:
        """Per parameter, whether this rank has a gradient of it."""
        return [parameter not in self.filled for parameter in self.parameters]

    def drop_unused(self, flags: Sequence[float]) -> None:
        """Remove the zeros of parameters without a gradient on any rank.

        Args:
            flags: per parameter, how many ranks have a gradient of it.
        """
        for parameter, flag in zip(self.parameters, flags, strict=True):
            if not flag and parameter in self.filled:
                parameter.sharded_param.grad = None

    def _fill_unused(self, parameters: Any, post_backward: Callable[..., None], *unused: Any) -> None:
        for parameter in parameters.fsdp_params if parameters.reduce_grads else ():
            whole = getattr(parameter, "_unsharded_param", None)
            if whole is None or not whole.requires_grad or parameter.unsharded_accumulated_grad is not None:
                continue
            if whole.grad is None:
                whole.grad = torch.zeros_like(whole)
                if parameter.sharded_param.grad is None:
                    self.filled.add(parameter)
        post_backward(*unused)


def refuse_in_backward(module: Any, ignored: Collection[nn.Parameter]) -> None:
    """Raise a ConfigError if parameters, but those that FSDP leaves alone, have an optimizer in backward."""
    parameters = ((name, parameter) for name, parameter in module.named_parameters() if parameter not in ignored)
    names = [name for name, parameter in parameters if getattr(parameter, "_in_backward_optimizers", ())]
    if names:
        raise ConfigError(
            f"apply_optimizer_in_backward has given optimizers to {', '.join(names)}, which dense='fsdp' shards: their "
            "gradients reach no optimizer in backward. Train model.dense_parameters() with an ordinary one, or use "
            "dense='ddp'"
        )


def cut_whole_values(state_dict: MutableMapping[str, Any], model: nn.Module) -> None:
    """Replace whole values of parameters that FSDP2 has cut by this rank's parts."""
    parameters = dict(model.named_parameters())
    for key, value in state_dict.items():
        parameter = parameters.get(key)
        if isinstance(parameter, DTensor) and not isinstance(value, DTensor):
            mesh, placements = parameter.device_mesh, parameter.placements
            state_dict[key] = distribute_tensor(value.to(parameter.device), mesh, placements, src_data_rank=None)


def let_go_of_whole_parameters(model: nn.Module) -> None:
    """Let go of FSDP2's whole parameters, which stay after a forward without a backward and are not the model's."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()

"""``torch.amp.GradScaler`` and sharded models: all ranks skip the same steps, or the scaler is refused.

[Note: how a GradScaler sees the gradients of tables]
Every operation of a GradScaler on an optimizer begins with ``_unscale_grads_``, which multiplies the ``grad`` of each
parameter and looks for infinities, by one operator for all of them. It changes nothing before, and skips no step. So it
is wrapped: for an optimizer of a sharded model it raises if a backward has used the scaled gradients already, and what
it has seen is all-reduced, as DTensor does it. The gradients of the rows of tables with an optimizer belong to no
parameter: the tables' optimizer has a placeholder among its parameters. Its ``grad`` is a :class:`TableGradients`, and
the operator takes the rows' gradients instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache, wraps
from itertools import chain
from types import SimpleNamespace
from typing import Any, Self
from weakref import WeakMethod, WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

from shardrec.errors import ConfigError
from shardrec.exchange.peers import peers


class TableGradients(Tensor):
    """The ``grad`` of the placeholder. See [Note: how a GradScaler sees the gradients of tables]."""

    stands_for: Callable[[], Iterable[Tensor]]

    @classmethod
    def of(cls, stands_for: Callable[[], Iterable[Tensor]], device: torch.device) -> Self:
        """Stands for the float32 tensors on ``device`` that a method gives. It does not keep the method's object alive,
        of the parameter that has it: the garbage collector does not see that a parameter keeps its ``grad``."""
        made: Self = torch.zeros(1, dtype=torch.float32, device=device).as_subclass(cls)
        method = WeakMethod(stands_for)
        made.stands_for = lambda: bound() if (bound := method()) else ()
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch._amp_foreach_non_finite_check_and_unscale_:
            return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call,unused-ignore]
        gradients, found_inf, inverse_scale = args
        plain: list[Tensor] = []
        for gradient in gradients:
            plain += gradient.stands_for() if isinstance(gradient, cls) else [gradient]
        if plain:
            func(plain, found_inf, inverse_scale)
        return None


_MODELS: WeakValueDictionary[int, Any] = WeakValueDictionary()
"""All sharded models, in the order in which they were made, the same on every rank."""


def watch_scalers(model: nn.Module) -> None:
    """Have a GradScaler that is given an optimizer of a ShardedModel skip the same steps on all ranks, or raise."""
    _wrap_unscale()
    _MODELS[id(model)] = model


@cache
def _wrap_unscale() -> None:
    """Wrap the method of the class, and of its subclasses that have one of their own, such as FSDP's."""
    GradScaler.__init_subclass__ = classmethod(_wrap_own)  # type: ignore[assignment]
    classes: list[type[GradScaler]] = [GradScaler]
    for scaler_class in classes:
        _wrap_own(scaler_class)
        classes += scaler_class.__subclasses__()


def _wrap_own(scaler_class: Any) -> None:
    unscale = vars(scaler_class).get("_unscale_grads_")
    if unscale is None:
        return

    @wraps(unscale)
    def unscale_on_all_ranks(
        scaler: Any, optimizer: torch.optim.Optimizer, inverse_scale: Tensor, found_inf: Tensor, *options: Any
    ) -> dict[torch.device, Tensor]:
        models = [model for model in list(_MODELS.values()) if _trains(optimizer, model)]
        for fault in filter(None, (model.scaler_fault() for model in models)):
            raise ConfigError(f"a GradScaler is given an optimizer of this model, but {fault}")
        by_device: dict[torch.device, Tensor] = {}
        for part in _alike(optimizer):
            by_device |= unscale(scaler, part, inverse_scale, found_inf, *options)
        for group in filter(None, (model.group for model in models)):
            of_ranks = found_inf.new_zeros(1)
            for infinite in by_device.values():
                torch.maximum(of_ranks, infinite.to(of_ranks.device), out=of_ranks)
            with peers(group, "look for infinite gradients"):
                dist.all_reduce(of_ranks, dist.ReduceOp.MAX, group=group)
            for infinite in by_device.values():
                infinite.copy_(of_ranks.view(infinite.shape))
            by_device = by_device or {of_ranks.device: of_ranks}
        return by_device

    scaler_class._unscale_grads_ = unscale_on_all_ranks


def _alike(optimizer: torch.optim.Optimizer) -> list[Any]:
    """The optimizer in parts, each with gradients of one class: one operator does not take FSDP2's, those of shards and
    those of tables together."""
    parts: dict[type, list[Tensor]] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parts.setdefault(type(parameter.grad), []).append(parameter)
    if len(parts) < 2:
        return [optimizer]
    return [SimpleNamespace(param_groups=[{"params": part}]) for part in parts.values()]


def _trains(optimizer: torch.optim.Optimizer, model: Any) -> bool:
    """Whether the optimizer has a parameter of the model, or the placeholder of its tables' optimizer."""
    fused = model.made_fused_optimizer
    groups = [] if fused is None else fused.param_groups
    weights = set(map(id, chain(model.parameters(), *(group["params"] for group in groups))))
    trained = (parameter for group in optimizer.param_groups for parameter in group["params"])
    return optimizer is fused or any(id(parameter) in weights for parameter in trained)

"""``torch.amp.GradScaler`` and tables: one that looks at their row gradients on every rank, or is refused.

[Note: how a GradScaler sees the gradients of tables]
``GradScaler.unscale_`` multiplies the ``grad`` of each parameter of an optimizer and looks for infinities, by one
operator for all of them. The rows' gradients belong to no parameter. So the tables' optimizer has a placeholder among
its parameters, whose ``grad`` is a :class:`TableGradients`: the operator, given one, takes the rows' gradients in its
place, and what it has seen is all-reduced, as DTensor does it. So all ranks skip the same steps, and scale alike.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from types import FrameType
from typing import Any, Self
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim.optimizer import register_optimizer_step_pre_hook

from shardrec.errors import ConfigError
from shardrec.exchange.peers import peers

__all__ = ["SCALER_REMEDY", "TableGradients", "refuse_scalers"]

SCALER_REMEDY = (
    "tables that are updated in backward take the scaled gradients as they are: shard the model with "
    "shardrec.shard(..., update='step'), and give model.fused_optimizer to scaler.step, too"
)


class TableGradients(Tensor):
    """The ``grad`` of the placeholder; see [Note: how a GradScaler sees the gradients of tables]."""

    stands_for: Callable[[], Iterable[Tensor]]
    group: dist.ProcessGroup | None

    @classmethod
    def of(
        cls, stands_for: Callable[[], Iterable[Tensor]], device: torch.device, group: dist.ProcessGroup | None
    ) -> Self:
        """Stands for float32 tensors.

        Args:
            stands_for: gives them.
            device: theirs.
            group: the ranks that skip the same steps; None on one rank.
        """
        made: Self = torch.zeros(1, dtype=torch.float32, device=device).as_subclass(cls)
        made.stands_for, made.group = stands_for, group
        return made

    @classmethod
    def __torch_function__(
        cls,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is not torch._amp_foreach_non_finite_check_and_unscale_:
            return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call,unused-ignore]
        gradients, found_inf, inverse_scale = args
        plain: list[Tensor] = []
        for gradient in gradients:
            plain += gradient.stands_for() if isinstance(gradient, cls) else [gradient]
        if plain:
            func(plain, found_inf, inverse_scale)
        group = next(gradient.group for gradient in gradients if isinstance(gradient, cls))
        if group is not None:
            with peers(group, "look for infinite gradients"):
                dist.all_reduce(found_inf, dist.ReduceOp.MAX, group=group)
        return None


_MODELS: WeakSet[Any] = WeakSet()
"""Sharded models, whose tables may be updated in backward."""

_STEPS = frozenset(
    method.__code__
    for method in (GradScaler.step, GradScaler._maybe_opt_step)  # type: ignore[attr-defined,unused-ignore]
)


def refuse_scalers(model: nn.Module) -> None:
    """Have a GradScaler's ``step`` of an ordinary optimizer of a sharded model raise a ConfigError, if its tables are
    updated in backward."""
    _look_at_steps()
    _MODELS.add(model)


@cache
def _look_at_steps() -> None:
    register_optimizer_step_pre_hook(_refuse)


def _refuse(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    frame: FrameType | None = sys._getframe(1)
    for _ in range(4):  # of torch's wrapper around step, and of a scheduler's
        if frame is None:
            return
        if frame.f_code in _STEPS:
            scaler = frame.f_locals["self"]
            trained = {parameter for group in optimizer.param_groups for parameter in group["params"]}
            models = [m for m in _MODELS if m.has_fused_tables and not m.context.options.updates_at_step]
            if scaler.is_enabled() and any(not trained.isdisjoint(model.dense_parameters()) for model in models):
                raise ConfigError(f"a GradScaler steps this model's optimizer, but {SCALER_REMEDY}")
            return
        frame = frame.f_back

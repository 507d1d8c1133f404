"""``torch.amp.GradScaler`` and sharded models: all ranks skip the same steps, or the scaler is refused.

[Note: how a GradScaler sees the gradients of tables]
Whatever a GradScaler does with an optimizer begins with ``_unscale_grads_``, which multiplies the ``grad`` of each
parameter and looks for infinities, by one operator for all of them; it changes nothing before, and skips no step. So it
is wrapped: for an optimizer of a sharded model it raises if a backward has used the scaled gradients already, and what
it has seen is all-reduced where ranks have gradients of their own, as DTensor does it. The gradients of the rows of
tables with an optimizer belong to no parameter: the tables' optimizer has a placeholder among its parameters, whose
``grad`` is a :class:`TableGradients`, in whose place the operator takes the rows' gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, wraps
from itertools import chain
from typing import Any, Protocol, Self
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

from shardrec.errors import ConfigError
from shardrec.exchange.peers import peers

__all__ = ["TableGradients", "watch_scalers"]


class _Model(Protocol):
    """A :class:`shardrec.ShardedModel`."""

    group: dist.ProcessGroup | None

    @property
    def made_fused_optimizer(self) -> torch.optim.Optimizer | None: ...

    @property
    def has_ordinary_shards(self) -> bool: ...

    def parameters(self) -> Iterator[nn.Parameter]: ...

    def scaler_fault(self) -> str: ...


class TableGradients(Tensor):
    """The ``grad`` of the placeholder; see [Note: how a GradScaler sees the gradients of tables]."""

    stands_for: Callable[[], Iterable[Tensor]]

    @classmethod
    def of(cls, stands_for: Callable[[], Iterable[Tensor]], device: torch.device) -> Self:
        """Stands for float32 tensors.

        Args:
            stands_for: gives them.
            device: theirs.
        """
        made: Self = torch.zeros(1, device=device).as_subclass(cls)
        made.stands_for = stands_for
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
        return None


_MODELS: WeakValueDictionary[int, _Model] = WeakValueDictionary()
"""All sharded models, in the order in which they were made, the same on every rank."""


def watch_scalers(model: _Model) -> None:
    """Have a GradScaler that is given an optimizer of the model skip the same steps on all ranks, or raise.

    See [Note: how a GradScaler sees the gradients of tables].
    """
    _wrap_unscale()
    _MODELS[id(model)] = model


@cache
def _wrap_unscale() -> None:
    unscale = GradScaler._unscale_grads_  # type: ignore[attr-defined,unused-ignore]

    @wraps(unscale)
    def unscale_on_all_ranks(
        scaler: Any, optimizer: torch.optim.Optimizer, inverse_scale: Tensor, found_inf: Tensor, *options: Any
    ) -> dict[torch.device, Tensor]:
        trained = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        models = [model for model in list(_MODELS.values()) if _trains(model, optimizer, trained)]
        for fault in filter(None, (model.scaler_fault() for model in models)):
            raise ConfigError(f"a GradScaler is given an optimizer of this model, but {fault}")
        found: dict[torch.device, Tensor] = unscale(scaler, optimizer, inverse_scale, found_inf, *options)
        has_rows = any(isinstance(parameter.grad, TableGradients) for parameter in trained)
        for model in models:
            if model.group is None or not (has_rows or model.has_ordinary_shards):
                continue
            of_ranks = found_inf.new_zeros(1)
            for value in found.values():
                torch.maximum(of_ranks, value.to(of_ranks.device), out=of_ranks)
            with peers(model.group, "look for infinite gradients"):
                dist.all_reduce(of_ranks, dist.ReduceOp.MAX, group=model.group)
            for value in found.values():
                value.copy_(of_ranks.view(value.shape))
            found = found or {of_ranks.device: of_ranks}
        return found

    GradScaler._unscale_grads_ = unscale_on_all_ranks  # type: ignore[method-assign,unused-ignore]


def _trains(model: _Model, optimizer: torch.optim.Optimizer, trained: Iterable[Tensor]) -> bool:
    """Whether an optimizer has a parameter of the model, or the placeholder of its tables' optimizer."""
    fused = model.made_fused_optimizer
    groups = [] if fused is None else fused.param_groups
    own = map(id, chain(model.parameters(), *(group["params"] for group in groups)))
    return optimizer is fused or not {id(parameter) for parameter in trained}.isdisjoint(own)

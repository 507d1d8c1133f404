"""The ``grad`` of a shard: where torch is about to take its norm for the table's, it says so.

``torch.nn.utils.clip_grad_norm_``, which TorchRec's ``GradientClippingOptimizer`` calls, too, adds up the norms of the
gradients that a rank has. Of shards, these are others on each rank: each would scale its gradients by another factor,
and the copies of the dense part would drift apart.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad

from shardrec.errors import ConfigError

__all__ = ["ShardGradient", "mark_gradients"]

_NORMS = (torch._foreach_norm, torch.linalg.vector_norm)


class ShardGradient(Tensor):
    """A gradient like any other, except to ``torch.nn.utils.clip_grad_norm_``; results are plain Tensors."""

    @classmethod
    def __torch_function__(
        cls,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func in _NORMS and sys._getframe(1).f_globals is vars(clip_grad):
            raise ConfigError(
                "torch.nn.utils.clip_grad_norm_ would clip by another norm on each rank, since tables without an "
                "optimizer in backward are cut over the ranks: call shardrec.clip_grad_norm_(model, max_norm) before "
                "the optimizer's step, and leave norms out of TorchRec's GradientClippingOptimizer"
            )
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def mark_gradients(shards: Iterable[nn.Parameter]) -> None:
    """Have the gradients of the parameters of shards, one or several ranks', be :class:`ShardGradient`."""
    for parameter in shards:
        if parameter.requires_grad and not parameter._post_accumulate_grad_hooks:  # type: ignore[attr-defined]
            parameter.register_post_accumulate_grad_hook(_mark)


def _mark(parameter: Tensor) -> None:
    if parameter.grad is not None:
        parameter.grad = parameter.grad.as_subclass(ShardGradient)

"""The ``grad`` of a shard, which is an error where torch is about to take its norm for the whole table's.

``torch.nn.utils.clip_grad_norm_``, which TorchRec's ``GradientClippingOptimizer`` calls, adds up the norms of this
rank's gradients. Those of shards differ between ranks: each would scale by another factor, and dense copies drift.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad

from shardrec.errors import ConfigError


class ShardGradient(Tensor):
    """A gradient like any other, except to ``torch.nn.utils.clip_grad_norm_``. Results are plain Tensors."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_norm = func is torch._foreach_norm or func is torch.linalg.vector_norm
        if is_norm and sys._getframe(1).f_globals is vars(clip_grad):
            raise ConfigError(
                "torch.nn.utils.clip_grad_norm_ would clip by another norm on each rank, since tables without an "
                "optimizer in backward are cut over the ranks: call shardrec.clip_grad_norm_(model, max_norm) before "
                "the optimizer's step, and leave norms out of TorchRec's GradientClippingOptimizer"
            )
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def mark_gradients(shards: Iterable[nn.Parameter]) -> None:
    """Have the gradients of these parameters be :class:`ShardGradient`."""
    for parameter in shards:
        if parameter.requires_grad and not parameter._post_accumulate_grad_hooks:
            parameter.register_post_accumulate_grad_hook(_mark)


def _mark(parameter: Tensor) -> None:
    if parameter.grad is not None:
        parameter.grad = parameter.grad.as_subclass(ShardGradient)

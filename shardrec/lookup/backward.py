"""A lookup's gradient.

Shapes: S slots, B_all samples, N ids, D columns of all the slots.

[Note: one update in a backward]
A backward makes one update of a row, with the sum of the gradients of all its lookups, as of an ordinary parameter:
Adagrad and Adam make another step of two. If the running backward will reach further lookups of the same tables,
gradients are kept until the last one. A table that is looked up once is updated immediately.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd import function
from torch.autograd.function import FunctionCtx

Kept: TypeAlias = tuple[float, Tensor | None]
"""What the backward of a lookup takes beside its arguments and the gradient: the learning rate of a fused optimizer
when the lookup was made, and the output of a kernel with a backward of its own, or None."""


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """torch's decorator of the same name, without its eight Python calls where a backward is not differentiated."""
    refusing = function.once_differentiable(backward)

    def without_graph(ctx: FunctionCtx, *gradients: Tensor | None) -> Any:
        return refusing(ctx, *gradients) if torch.is_grad_enabled() else backward(ctx, *gradients)

    return without_graph


@dataclass(frozen=True, kw_only=True, slots=True)
class LookupGradient:
    """What one backward gives a bank: what was looked up, as :meth:`TableBank.look_up` takes it, and the gradient.

    Args:
        ids: (N,).
        lengths: (S, B_all).
        id_weights: (N,) or None.
        gradient: (B_all, D) float32 of the pooled output, or (N, w).
        lr: as in :data:`Kept`.
    """

    ids: Tensor
    lengths: Tensor
    id_weights: Tensor | None
    gradient: Tensor
    lr: float = 0.0

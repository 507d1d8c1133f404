"""A lookup as a node of autograd's graph, whose backward updates the tables or gives their parameters gradients.

Shapes: S slots, B_all samples, N ids, D columns of all the slots.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

__all__ = ["lookup_with_backward"]


def lookup_with_backward(
    look_up: Callable[..., Tensor],
    weight_gradient: Callable[[Tensor, Tensor, Tensor], Tensor | None],
    learn: Callable[[Tensor, Tensor, Tensor | None, Tensor], Sequence[Tensor | None]],
    ids: Tensor,
    lengths: Tensor,
    weights: Tensor | None,
    inputs: Sequence[Tensor],
    out: Tensor | None = None,
) -> Tensor:
    """What a lookup gives, with a backward.

    Args:
        look_up: of ids, lengths, weights and, if it is given, ``out``.
        weight_gradient: (N,) gradient of the weights, of ids, lengths and the result's gradient; called before
            ``learn``, for it is of the rows as they were looked up.
        learn: in backward, of ids, lengths, weights and the result's gradient; gives the gradients of ``inputs``.
        ids: (N,).
        lengths: (S, B_all).
        weights: (N,) or None.
        inputs: what takes part in the graph for the tables: their parameters, or a placeholder.
        out: (B_all, D) memory of the result.
    """
    # In a list, for a result that were an argument, too, would count as a view of it.
    out_list = [] if out is None else [out]
    rows: Tensor = _Lookup.apply(  # type: ignore[no-untyped-call]
        look_up, weight_gradient, learn, ids, lengths, weights, out_list, *inputs
    )
    return rows


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx,
        look_up: Callable[..., Tensor],
        weight_gradient: Callable[..., Tensor | None],
        learn: Callable[..., Sequence[Tensor | None]],
        ids: Tensor,
        lengths: Tensor,
        weights: Tensor | None,
        out_list: list[Tensor],
        *inputs: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(ids, lengths, weights)  # type: ignore[arg-type]
        # Not the place of the result, which knows this function and would never go.
        ctx.weight_gradient, ctx.learn = weight_gradient, learn  # type: ignore[attr-defined]
        return look_up(ids, lengths, weights, *out_list)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        ids, lengths, weights = ctx.saved_tensors
        of_weights = ctx.weight_gradient(ids, lengths, gradient) if ctx.needs_input_grad[5] else None
        return None, None, None, None, None, of_weights, None, *ctx.learn(ids, lengths, weights, gradient)

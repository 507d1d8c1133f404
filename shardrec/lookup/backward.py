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
    id_weight_gradient: Callable[[Tensor, Tensor, Tensor], Tensor | None],
    apply_gradient: Callable[[Tensor, Tensor, Tensor | None, Tensor], Sequence[Tensor | None]],
    ids: Tensor,
    lengths: Tensor,
    id_weights: Tensor | None,
    inputs: Sequence[Tensor],
    out: Tensor | None = None,
) -> Tensor:
    """Run a lookup as an autograd function.

    Args:
        look_up: called with ids, lengths, id_weights and, if it is given, ``out``; returns the result.
        id_weight_gradient: called with ids, lengths and the result's gradient; returns the (N,) gradient of
            ``id_weights``. Called before ``apply_gradient``, because it needs the rows as they were looked up.
        apply_gradient: called in backward with ids, lengths, id_weights and the gradient of the result; returns the
            gradients of ``inputs``.
        ids: (N,).
        lengths: (S, B_all).
        id_weights: (N,) or None.
        inputs: the tensors that represent the tables in the autograd graph: their parameters, or a placeholder.
        out: (B_all, D) memory of the result.
    """
    # In a list, because a result that is also an argument would count as a view of it.
    out_list = [] if out is None else [out]
    rows: Tensor = _Lookup.apply(  # type: ignore[no-untyped-call]
        look_up, id_weight_gradient, apply_gradient, ids, lengths, id_weights, out_list, *inputs
    )
    return rows


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx,
        look_up: Callable[..., Tensor],
        id_weight_gradient: Callable[..., Tensor | None],
        apply_gradient: Callable[..., Sequence[Tensor | None]],
        ids: Tensor,
        lengths: Tensor,
        id_weights: Tensor | None,
        out_list: list[Tensor],
        *inputs: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(ids, lengths, id_weights)  # type: ignore[arg-type]
        # Not ``out_list``: the result refers to this function, so the cycle would never be freed.
        ctx.id_weight_gradient, ctx.apply_gradient = id_weight_gradient, apply_gradient  # type: ignore[attr-defined]
        return look_up(ids, lengths, id_weights, *out_list)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        ids, lengths, id_weights = ctx.saved_tensors
        of_weights = ctx.id_weight_gradient(ids, lengths, gradient) if ctx.needs_input_grad[5] else None
        return None, None, None, None, None, of_weights, None, *ctx.apply_gradient(ids, lengths, id_weights, gradient)

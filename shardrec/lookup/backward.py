"""A lookup's gradient, and a lookup of parameters that take dense gradients as a node of autograd's graph.

Shapes: S slots, B_all samples, N ids, D columns of all the slots.

[Note: one update in a backward]
A backward makes one update of a row, with the sum of the gradients of all its lookups, as of an ordinary parameter:
Adagrad and Adam make another step of two. If the running backward will reach further lookups of the same tables,
gradients are kept until the last one. A table that is looked up once is updated immediately.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd import function
from torch.autograd.function import FunctionCtx

__all__ = ["Kept", "LookupGradient", "lookup_with_backward", "once_differentiable"]


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


def lookup_with_backward(
    look_up: Callable[[Tensor, Tensor, Tensor | None], Tensor],
    id_weight_gradient: Callable[[Tensor, Tensor, Tensor], Tensor | None],
    parameter_gradients: Callable[[Tensor, Tensor, Tensor | None, Tensor], Sequence[Tensor | None]],
    ids: Tensor,
    lengths: Tensor,
    id_weights: Tensor | None,
    parameters: Sequence[Tensor],
) -> Tensor:
    """Run a lookup as an autograd function.

    Args:
        look_up: called with ids, lengths and id_weights. Returns the result.
        id_weight_gradient: called with ids, lengths and the result's gradient. Returns the (N,) gradient of
            ``id_weights``.
        parameter_gradients: called in backward with ids, lengths, id_weights and the gradient of the result. Returns
            the gradients of ``parameters``.
        ids: (N,).
        lengths: (S, B_all).
        id_weights: (N,) or None.
        parameters: of the tables.
    """
    functions = look_up, id_weight_gradient, parameter_gradients
    rows: Tensor = _Lookup.apply(functions, ids, lengths, id_weights, *parameters)  # type: ignore[no-untyped-call]
    return rows


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx,
        functions: tuple[Callable[..., Any], ...],
        ids: Tensor,
        lengths: Tensor,
        id_weights: Tensor | None,
        *parameters: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(ids, lengths, id_weights)  # type: ignore[arg-type]
        look_up, *ctx.gradients = functions  # type: ignore[attr-defined]
        rows: Tensor = look_up(ids, lengths, id_weights)
        return rows

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        ids, lengths, id_weights = ctx.saved_tensors
        id_weight_gradient, parameter_gradients = ctx.gradients
        of_weights = id_weight_gradient(ids, lengths, gradient) if ctx.needs_input_grad[3] else None
        return None, None, None, of_weights, *parameter_gradients(ids, lengths, id_weights, gradient)

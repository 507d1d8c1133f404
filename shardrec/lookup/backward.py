"""A lookup as a node of autograd's graph, whose backward updates the tables or gives their parameters gradients.

Shapes: S slots, B_all samples, N ids, D columns of all the slots.

[Note: one update in a backward]
A backward makes one update of a row, with the sum of the gradients of all its lookups, as of an ordinary parameter:
Adagrad and Adam make another step of two. If the running backward will reach further lookups of the same tables,
gradients are kept until the last one; a table that is looked up once is updated at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

__all__ = ["JointBackward", "LookupGradient", "lookup_with_backward"]


@dataclass(frozen=True, kw_only=True)
class LookupGradient:
    """What one backward gives a bank: what was looked up, as :meth:`TableBank.look_up` takes it, and the gradient.

    Args:
        ids: (N,).
        lengths: (S, B_all).
        id_weights: (N,) or None.
        gradient: (B_all, D) float32 of the pooled output, or (N, w).
        values: what a kernel with a backward of its own gave; else None.
    """

    ids: Tensor
    lengths: Tensor
    id_weights: Tensor | None
    gradient: Tensor
    values: Tensor | None = None


class JointBackward:
    """Lookups of some tables; see [Note: one update in a backward].

    Args:
        together: update once in a backward; else after each lookup, for what adds gradients up itself.
    """

    def __init__(self, *, together: bool = True) -> None:
        self._together = together
        self._nodes: WeakSet[Any] = WeakSet()
        self._gradients: list[LookupGradient] = []

    def look_up(
        self,
        update: Callable[[list[LookupGradient]], None],
        look_up: Callable[..., Tensor],
        id_weight_gradient: Callable[[Tensor, Tensor, Tensor], Tensor | None],
        *lookup: Any,
        values: list[Tensor] | None = None,
    ) -> Tensor:
        """Run a lookup.

        Args:
            update: called with what the lookups were given.
            look_up: as :func:`lookup_with_backward` takes it, like the other arguments.
            id_weight_gradient: as :func:`lookup_with_backward` takes it.
            lookup: the arguments from ``ids`` on.
            values: to which ``look_up`` adds what a kernel with a backward of its own gave; None without such a kernel.
        """
        if torch._C._current_graph_task_id() == -1:
            self._gradients.clear()  # of a backward that raised
        rows = lookup_with_backward(look_up, id_weight_gradient, partial(self._apply, update), *lookup)
        if rows.grad_fn is not None:
            rows.grad_fn.values = values  # type: ignore[attr-defined]
            self._nodes.add(rows.grad_fn)
        return rows

    def _apply(
        self,
        update: Callable[[list[LookupGradient]], None],
        ids: Tensor,
        lengths: Tensor,
        id_weights: Tensor | None,
        gradient: Tensor,
    ) -> list[None]:
        node: Any = torch._C._current_autograd_node()
        node.backward = backward = torch._C._current_graph_task_id()
        is_last = not self._together or not any(
            getattr(other, "backward", -1) != backward and torch._C._will_engine_execute_node(other)
            for other in self._nodes
        )
        kept = gradient if is_last else gradient.clone()  # it may be the caller's memory, or the transport's
        (values,) = node.values or [None]
        self._gradients.append(
            LookupGradient(ids=ids, lengths=lengths, id_weights=id_weights, gradient=kept, values=values)
        )
        if is_last:
            gradients, self._gradients = self._gradients, []
            update(gradients)
        return [None]


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

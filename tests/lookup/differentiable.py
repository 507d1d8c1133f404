"""A bank's lookup as a function that autograd knows, whose backward updates at once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardrec.lookup.group_shards import TableBank

__all__ = ["looked_up"]


class _LookUp(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, bank: TableBank, ids: Tensor, lengths: Tensor, id_weights: Tensor | None, _: Tensor
    ) -> Tensor:
        rows, ctx.kept = bank.look_up_to_update(ids, lengths, None if id_weights is None else id_weights.detach())
        ctx.bank = bank
        ctx.save_for_backward(ids, lengths, id_weights)
        return rows

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        ids, lengths, id_weights = ctx.saved_tensors
        of_weights = ctx.bank.id_weight_gradient(ids, lengths, gradient) if ctx.needs_input_grad[3] else None
        ctx.bank.update(ids, lengths, id_weights, gradient, ctx.kept)
        return None, None, None, of_weights, None


def looked_up(bank: TableBank, ids: Tensor, lengths: Tensor, id_weights: Tensor | None) -> Tensor:
    """What the bank gives for the arguments of its ``look_up``, with a gradient."""
    rows: Tensor = _LookUp.apply(bank, ids, lengths, id_weights, torch.zeros(0, requires_grad=True))
    return rows

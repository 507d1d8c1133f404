"""The gradient of the ids' weights, sent from the ranks that looked the ids up to the rank that owns the weights.

Shapes: N ids of this rank's batch, N_sent ids that it sent (one per column stripe), n ids that this rank looked up.

::

    weights (N,) ── with the payload ──► (n,) of each rank ──► lookup
    gradient (N,), summed over stripes ◄── all-to-all ── (n,) put back in the order in which they came

This takes one more all-to-all in backward, if weights take a gradient. Such weights are computed on their own rank
(position weights, attention), so their gradient is not averaged: the division by the number of ranks in the output's
gradient (see :mod:`shardrec.exchange.pooled_output`) is reversed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from shardrec.exchange.collectives import Collectives, joined
from shardrec.exchange.payload import ShardInput
from shardrec.exchange.prepared_input import SentIds

__all__ = ["received_id_weights", "tied"]


def received_id_weights(weights: Tensor, sent: SentIds, shard_input: ShardInput, collectives: Collectives) -> Tensor:
    """``shard_input.weights`` (n,) as a function of the local batch's weights.

    Args:
        weights: (N,) of the local batch, which take a gradient.
        sent: the local batch as it was sent.
        shard_input: the ids to look up.
        collectives: the ones that exchanged the batch.
    """
    received: Tensor = _Received.apply(weights, sent, shard_input, collectives)  # type: ignore[no-untyped-call]
    return received


def tied(rows: Tensor, weights: Tensor) -> Tensor:
    """``rows``, whose backward reaches ``weights`` even if rows do not depend on them (a rank may have no shard)."""
    tied_rows: Tensor = _Tied.apply(rows, weights)  # type: ignore[no-untyped-call]
    return tied_rows


class _Received(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx, weights: Tensor, sent: SentIds, shard_input: ShardInput, collectives: Collectives
    ) -> Tensor:
        ctx.order, ctx.collectives = shard_input.order, collectives  # type: ignore[attr-defined]
        ctx.went_to, ctx.came_from = sent.counts, shard_input.counts  # type: ignore[attr-defined]
        ctx.positions = sent.positions  # type: ignore[attr-defined]
        ctx.like = weights.detach()[:0]  # type: ignore[attr-defined]
        ctx.count = weights.numel()  # type: ignore[attr-defined]
        assert shard_input.weights is not None, "they came with the ids"
        return shard_input.weights.view_as(shard_input.weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        collectives: Collectives = ctx.collectives
        assert ctx.positions is not None, "the positions of the ids were kept"
        if ctx.order is not None:
            gradient = torch.empty_like(gradient).index_copy_(0, ctx.order.to(torch.int64), gradient)
        came_from = [sum(counts) for counts in ctx.came_from]
        went_to = [sum(counts) for counts in ctx.went_to]
        parts = [[part] for part in gradient.contiguous().split(came_from)]
        back = joined(collectives.send(parts, went_to, "weight gradient").wait())
        total = back.new_zeros(ctx.count).index_add_(0, ctx.positions, back)
        return total.mul_(collectives.mean_over).to(ctx.like.dtype), None, None, None


class _Tied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, rows: Tensor, weights: Tensor) -> Tensor:
        ctx.weights = weights.detach()[:0]  # type: ignore[attr-defined]
        ctx.count = weights.numel()  # type: ignore[attr-defined]
        return rows.view_as(rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return gradient, ctx.weights.new_zeros(ctx.count)

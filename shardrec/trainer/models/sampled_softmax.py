"""The loss of sequence models: at each position the next item against N random ones, which a batch shares.

The logits (T, N) are by far the largest tensor of a step. They are made a block of positions at a time, which stays in
a core's cache, and the block's part of the gradients is computed before the next block takes its place.

Legend: T positions, N random items, D columns, C positions of a block.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_BLOCK_ELEMENTS = 1 << 19
"""Logits of a block: 2 MiB."""
_BITS_PER_NAT = 1 / math.log(2)
"""Logits of random items are in bits, because powers of 2 take half of the time of powers of e."""


def sampled_softmax_loss(
    encoded_TD: Tensor,
    next_TD: Tensor,
    others_ND: Tensor,
    next_T: Tensor,
    drawn_N: Tensor,
    weights_T: Tensor,
    log_q: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Softmax cross entropy of the next item at each position against random items other than it.

    Args:
        encoded_TD: what each position knows, float32.
        next_TD: the row of each position's next item.
        others_ND: rows of the random items.
        next_T: the next items, int64.
        drawn_N: the random items, int64.
        weights_T: of the positions in the mean.
        log_q: logs of the shares of next (T,) and random items (N,), which are subtracted from their logits.

    Returns:
        The weighted mean over the positions, in nats; 0 without positions.
    """
    if encoded_TD.device.type == "cpu" and torch.is_grad_enabled() and not torch.compiler.is_compiling():
        given = encoded_TD, next_TD, others_ND, next_T, drawn_N, weights_T, log_q
        blockwise: Tensor = _Blockwise.apply(*given)  # type: ignore[no-untyped-call]
        return blockwise
    logits_TN, logits_T = encoded_TD @ others_ND.t(), (encoded_TD * next_TD).sum(1)
    if log_q is not None:
        logits_T, logits_TN = logits_T - log_q[0], logits_TN - log_q[1]
    # Not -inf: the gradient of the logsumexp of nothing else is nan.
    logits_TN = logits_TN.masked_fill(next_T.unsqueeze(1) == drawn_N, torch.finfo(logits_TN.dtype).min)
    losses_T = F.softplus(logits_TN.logsumexp(1) - logits_T)
    loss: Tensor = (losses_T * weights_T).sum() / weights_T.sum().clamp(min=1)
    return loss


class _Blockwise(torch.autograd.Function):
    """The loss and, in its forward, the three gradients, which the backward scales."""

    @staticmethod
    def forward(
        ctx: Any,
        encoded_TD: Tensor,
        next_TD: Tensor,
        others_ND: Tensor,
        next_T: Tensor,
        drawn_N: Tensor,
        weights_T: Tensor,
        log_q: tuple[Tensor, Tensor] | None,
    ) -> Tensor:
        logits_T = (encoded_TD * next_TD).sum(1).float()
        logits_T = logits_T if log_q is None else logits_T - log_q[0]
        shares_T = weights_T.float() / weights_T.sum().clamp(min=1)
        # The few positions whose next item was drawn. To compare all pairs of ids costs as much as the exponentials.
        was_drawn_T = torch.isin(next_T, drawn_N)
        to_encoded_TD = torch.empty_like(encoded_TD)
        to_others_DN = torch.zeros_like(others_ND, dtype=torch.float32).t().contiguous()
        in_bits_ND = others_ND * _BITS_PER_NAT
        loss, scales = logits_T.new_zeros(()), []
        block = max(1, _BLOCK_ELEMENTS // max(1, drawn_N.numel()))
        for start in range(0, next_T.numel(), block):
            places = slice(start, start + block)
            encoded_CD, next_C = encoded_TD[places], next_T[places]
            logits_CN = (encoded_CD @ in_bits_ND.t()).float()
            if log_q is not None:
                logits_CN -= log_q[1] * _BITS_PER_NAT
            places_C = was_drawn_T[places].nonzero().squeeze(1)
            is_next = next_C[places_C].unsqueeze(1) == drawn_N
            # Not -inf: the softmax of nothing else is nan.
            logits_CN[places_C] = logits_CN[places_C].masked_fill(is_next, torch.finfo(torch.float32).min)
            largest_C = logits_CN.amax(1)
            sums_C = logits_CN.sub_(largest_C.unsqueeze(1)).exp2_().sum(1)
            above_C = (largest_C + sums_C.log2()) / _BITS_PER_NAT - logits_T[places]
            loss += (F.softplus(above_C) * shares_T[places]).sum()
            scale_C = above_C.sigmoid() * shares_T[places]  # the gradient of a logsumexp, less that of its logit
            logits_CN *= (scale_C / sums_C).unsqueeze(1)
            to_encoded_TD[places] = logits_CN @ others_ND - scale_C.unsqueeze(1) * next_TD[places]
            to_others_DN.addmm_(encoded_CD.t().float(), logits_CN)
            scales.append(scale_C)
        scale_T = torch.cat(scales) if scales else logits_T
        to_next_TD = encoded_TD * -scale_T.unsqueeze(1)
        ctx.save_for_backward(to_encoded_TD, to_next_TD.to(next_TD.dtype), to_others_DN.t().to(others_ND.dtype))
        return loss

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return *(saved * gradient for saved in ctx.saved_tensors), None, None, None, None

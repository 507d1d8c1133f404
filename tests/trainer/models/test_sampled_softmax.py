"""The loss by blocks of positions is that of whole tensors, and so are its gradients."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from shardrec.trainer.models import sampled_softmax
from shardrec.trainer.models.sampled_softmax import sampled_softmax_loss


def plain(
    encoded: Tensor, following: Tensor, others: Tensor, ids: Tensor, drawn: Tensor, weights: Tensor, log_q: object
) -> Tensor:
    """One row of logits a position, the next item's first, those that are the next item left out."""
    of_next, of_drawn = log_q if isinstance(log_q, tuple) else (0.0, 0.0)
    first = (encoded * following).sum(1) - of_next
    rest = torch.where(ids.unsqueeze(1) == drawn, -1e30, encoded @ others.t() - of_drawn)
    losses = F.cross_entropy(torch.cat([first.unsqueeze(1), rest], 1), torch.zeros_like(ids), reduction="none")
    return (losses * weights).sum() / weights.sum().clamp(min=1)


@given(
    positions=st.integers(0, 40),
    negatives=st.integers(1, 12),
    items=st.integers(1, 30),
    block=st.integers(1, 200),
    corrected=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_blocks_are_the_whole(
    positions: int, negatives: int, items: int, block: int, corrected: bool, seed: int
) -> None:
    draws = torch.Generator().manual_seed(seed)
    shapes = ((positions, 4), (positions, 4), (negatives, 4))
    tensors = [torch.randn(shape, generator=draws, dtype=torch.float32) for shape in shapes]
    ids = torch.randint(items, (positions,), generator=draws)
    drawn = torch.randint(items, (negatives,), generator=draws)
    weights = torch.randint(2, (positions,), generator=draws).float()
    log_q = (torch.randn(positions, generator=draws), torch.randn(negatives, generator=draws)) if corrected else None
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampled_softmax, "_BLOCK_ELEMENTS", block)
        for loss_of in (sampled_softmax_loss, plain):
            inputs = [tensor.clone().requires_grad_() for tensor in tensors]
            loss = loss_of(*inputs, ids, drawn, weights, log_q)
            (3 * loss).backward()
            found.append([loss.detach(), *(tensor.grad for tensor in inputs)])
    with torch.no_grad():  # by whole tensors
        found.append([sampled_softmax_loss(*tensors, ids, drawn, weights, log_q), *found[1][1:]])
    for values in found[::2]:
        torch.testing.assert_close(values, found[1], rtol=1e-4, atol=1e-5)


def test_in_bfloat16_the_loss_is_near() -> None:
    torch.manual_seed(0)
    inputs = [torch.randn(shape, requires_grad=True) for shape in ((50, 16), (50, 16), (20, 16))]
    ids, drawn, weights = torch.randint(30, (50,)), torch.randint(30, (20,)), torch.ones(50)
    exact = sampled_softmax_loss(*inputs, ids, drawn, weights)
    expected = torch.autograd.grad(exact, inputs)
    with torch.autocast("cpu", torch.bfloat16):
        loss = sampled_softmax_loss(*inputs, ids, drawn, weights)
    torch.testing.assert_close(loss, exact, rtol=0.02, atol=0.02)
    torch.testing.assert_close(torch.autograd.grad(loss, inputs), expected, rtol=0.1, atol=0.02)

"""Blocks whose slots have a batch size each: stripped and padded, forward and backward."""

from __future__ import annotations

from random import Random

import torch
from hypothesis import given

from shardrec.exchange.ragged import Ragged
from tests.plans import randoms


def random_ragged(rng: Random) -> Ragged:
    slots = rng.randrange(5)
    rows = rng.randrange(5)
    return Ragged(
        rows=rows, sizes=[rng.randint(0, rows) for _ in range(slots)], columns=[rng.randint(1, 3) for _ in range(slots)]
    )


@given(rng=randoms())
def test_what_is_stripped_is_what_is_there(rng: Random) -> None:
    ragged = random_ragged(rng)
    padded = torch.randn(ragged.rows, sum(ragged.columns))
    expected, start = [], 0
    for size, columns in ragged.shapes:
        expected += [padded[row, start + column] for row in range(size) for column in range(columns)]
        start += columns
    flat = ragged.strip(padded)
    assert flat.tolist() == [float(one) for one in expected]
    assert torch.equal(ragged.strip(ragged.pad(flat)), flat)
    lost = padded - ragged.pad(flat)
    assert torch.equal(lost * ragged.pad(torch.ones_like(flat)), torch.zeros_like(padded)), "only padding is lost"


@given(rng=randoms())
def test_the_gradient_is_the_transpose(rng: Random) -> None:
    ragged = random_ragged(rng)
    padded = torch.randn(ragged.rows, sum(ragged.columns), requires_grad=True)
    flat = ragged.strip(padded)
    gradient = torch.randn_like(flat)
    flat.backward(gradient)
    assert padded.grad is not None
    assert torch.equal(padded.grad, ragged.pad(gradient))

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardrec.trainer.data.zipf import AliasTables, zipf_probabilities


@pytest.mark.parametrize("exponent", [0.0, 1.0, 1.2])
def test_probabilities_follow_the_power_law(exponent: float) -> None:
    probabilities = zipf_probabilities(1000, exponent)
    assert np.isclose(probabilities.sum(), 1.0)
    assert np.allclose(probabilities[0] / probabilities, np.arange(1, 1001) ** exponent)


@given(weights=st.lists(st.integers(0, 20), min_size=1, max_size=12).filter(any))
def test_every_outcome_has_its_share_of_the_uniform_numbers(weights: list[int]) -> None:
    """An even grid over all 32-bit numbers stands for the integral over them: exact up to the grid's width."""
    probabilities = np.array(weights) / sum(weights)
    grid = (np.arange(1 << 16, dtype=np.uint32) << np.uint32(16)) + np.uint32(1 << 15)
    outcomes = AliasTables([probabilities]).draw(grid[:, None])[:, 0]
    counts = np.bincount(outcomes, minlength=len(weights))
    assert len(counts) == len(weights)
    # each slot has two borders, each off by at most one point of the grid
    assert np.abs(counts - probabilities * (1 << 16)).max() <= 2 * len(weights)
    assert (counts[probabilities == 0] <= 1).all()


def test_features_are_drawn_side_by_side_as_alone() -> None:
    left, right = zipf_probabilities(50, 1.1), zipf_probabilities(7, 0.9)
    uniform = np.random.default_rng(0).integers(0, 2**32, size=(1000, 2), dtype=np.uint32)
    both = AliasTables([left, right]).draw(uniform)
    assert (both[:, :1] == AliasTables([left]).draw(uniform[:, :1])).all()
    assert (both[:, 1:] == AliasTables([right]).draw(uniform[:, 1:])).all()

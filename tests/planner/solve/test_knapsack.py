"""The knapsacks in C++ are those in Python, to the last bit, of one size and of two."""

from __future__ import annotations

from random import Random
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings

from shardrec.planner.native import library
from shardrec.planner.solve import knapsack as module
from shardrec.planner.solve import plane as of_two_sizes
from shardrec.planner.solve.knapsack import knapsacks
from shardrec.planner.solve.plane import plane
from tests.plans import randoms


@pytest.mark.skipif(library() is None, reason="no compiled functions")
@settings(max_examples=100, deadline=None)
@given(rng=randoms())
def test_compiled_knapsacks_are_those_of_python(rng: Random) -> None:
    kinds, most = rng.choice([0, 1, 3, 12]), rng.choice([7, 40, 111, 256])
    weights = np.array(sorted(rng.randint(1, most + 2) for _ in range(kinds)), dtype=np.int64)
    # Some by weight, so that sums are alike but for their rounding.
    values = np.array([rng.choice([0.0, 0.1 * weight, rng.random()]) for weight in weights.tolist()])
    counts = rng.choice([None, np.array([rng.randint(0, 5) for _ in range(kinds)], dtype=np.int64)])
    ends = sorted(rng.randint(0, kinds) for _ in range(rng.randint(1, 3)))
    start = rng.choice([None, 0.3 * (np.arange(most + 1) // 5)])
    best, pieces = knapsacks(weights, values, most, ends, counts, start)
    with patch.object(module, "library", return_value=None):
        wanted, others = knapsacks(weights, values, most, ends, counts, start)
    np.testing.assert_array_equal(best, wanted)
    for number in range(len(ends)):
        for size in {0, most, rng.randint(0, most), rng.randint(0, most)}:
            assert pieces(size, number).tolist() == others(size, number).tolist()


@pytest.mark.parametrize("size", [0, -1])
def test_pieces_of_no_size_are_refused(size: int) -> None:
    """There is no number of them that fits; in C++ it was a division by zero."""
    with pytest.raises(ValueError, match=f"{size} steps"):
        knapsacks(np.array([2, size]), np.array([1.0, 1.0]), 10, [2])
    with pytest.raises(ValueError, match=f"load {size}"):
        plane([(2, 1, -1), (size, 1, -1)], np.array([1.0, 1.0]), 10, 3)


@pytest.mark.skipif(library() is None, reason="no compiled functions")
@settings(max_examples=100, deadline=None)
@given(rng=randoms())
def test_a_compiled_plane_is_that_of_python(rng: Random) -> None:
    many, most, memory = rng.choice([0, 1, 3, 12, 40]), rng.choice([7, 40, 111, 256]), rng.choice([1, 3, 20])
    some = {(rng.randint(1, most + 2), max(0, rng.randint(-memory, memory + 1)), -1) for _ in range(many)}
    kinds = rng.choice([sorted, list])(some)
    # Some by load, so that sums are alike but for their rounding.
    worth = [(0.0, 0.1 * size, 0.1 * size + 0.3 * heavy, rng.random()) for size, heavy, _ in kinds]
    values = np.array([rng.choice(some) for some in worth])
    best, pieces = plane(kinds, values, most, memory)
    with patch.object(of_two_sizes, "library", return_value=None):
        wanted, others = plane(kinds, values, most, memory)
    np.testing.assert_array_equal(best, wanted)
    for room in [(most, memory), *((rng.randint(0, most), rng.randint(0, memory)) for _ in range(5))]:
        found = pieces(*room)
        # In the same order, too: programmes are made from it.
        assert list(found.items()) == list(others(*room).items())
        assert sum(size * count for (size, _, _), count in found.items()) <= room[0]
        assert sum(heavy * count for (_, heavy, _), count in found.items()) <= room[1]

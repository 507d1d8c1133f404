"""The ways to fill a rank: all that there are, and the same from C++ as from Python."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations_with_replacement, permutations
from random import Random
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings

from shardrec.planner.native import library
from shardrec.planner.solve import fillings as module
from shardrec.planner.solve.encode import Floats
from shardrec.planner.solve.fillings import Kind, fillings
from shardrec.planner.solve.knapsack import knapsack
from shardrec.planner.solve.sizes import GRID
from tests.plans import randoms


@settings(max_examples=100, deadline=None)
@given(rng=randoms())
def test_all_ways_that_may_be_of_use_are_listed(rng: Random) -> None:
    memory = rng.choice([0, 3, 60])
    kinds = sorted(
        {
            (rng.randint(GRID // 8, GRID), rng.randint(0, memory), rng.choice([-1, -1, 0, 1]))
            for _ in range(rng.randint(1, 4))
        }
    )
    room, sizes = rng.randint(GRID // 8, GRID), [size for size, _, _ in kinds]
    value = np.zeros(GRID + 1)
    worth = {size: rng.random() * size for size in sizes}
    for size in range(1, GRID + 1):
        value[size] = max([value[size - 1], *(worth[s] + value[size - s] for s in sizes if s <= size)])
    budget = rng.choice([0.0, 0.1, 0.5, 1.0]) * value[room]
    every = [
        way
        for many in range(room // sizes[0] + 1)
        for way in combinations_with_replacement(kinds[::-1], many)
        if sum(size for size, _, _ in way) <= room and sum(heavy for _, heavy, _ in way) <= memory and possible(way)
    ]
    wanted = [
        way
        for way in every
        if value[room] - sum(value[size] for size, _, _ in way) <= budget + 1e-9
        and not any(other != way and covers(other, way) for other in every)
    ]
    assert sorted(
        fillings(kinds, of(kinds, value), float(value[room]), room, memory, budget + 1e-9, 10_000) or []
    ) == sorted(wanted)
    assert (
        len(wanted) < 2
        or fillings(kinds, of(kinds, value), float(value[room]), room, memory, budget + 1e-9, len(wanted) - 1) is None
    )


def of(kinds: Sequence[Kind], value: Floats) -> list[float]:
    return [float(value[size]) for size, _, _ in kinds]


def possible(way: tuple[Kind, ...]) -> bool:
    """Whether a rank may have these pieces: of a table that is cut by rows, one."""
    tables = [table for _, _, table in way if table >= 0]
    return len(tables) == len(set(tables))


def covers(way: tuple[Kind, ...], other: tuple[Kind, ...]) -> bool:
    """Whether each piece of the other has one of its own that is as large."""
    return len(way) >= len(other) and any(
        all(
            mine[0] >= its[0] and mine[1] >= its[1] and its[2] in (-1, mine[2])
            for mine, its in zip(some, other, strict=False)
        )
        for some in permutations(way)
    )


@pytest.mark.skipif(library() is None, reason="no compiled functions")
@settings(max_examples=100, deadline=None)
@given(rng=randoms())
def test_compiled_fillings_are_those_of_python(rng: Random) -> None:
    room, memory = rng.choice([0, 20, 60]), rng.choice([0, 2, 60])
    sizes = sorted(rng.sample(range(2, 40), rng.choice([0, 1, 4, 8])))
    kinds = sorted({(rng.choice(sizes), rng.randint(0, memory), rng.choice([-1, -1, 0, 1])) for _ in sizes})
    # Some by weight, so that sums are alike but for their rounding.
    worth = np.array([rng.choice([0.1 * size, rng.random() * size]) for size in sizes])
    value, _ = knapsack(np.array(sizes, dtype=np.int64), worth, 60)
    budget, many = rng.choice([0.0, 0.1, 0.5]) * float(value[room]), 1000
    with patch.object(module, "library", return_value=None):
        every = fillings(kinds, of(kinds, value), float(value[room]), room, memory, budget, many)
        most = rng.choice([many, 3, max(1, len(every or ())), max(1, len(every or ()) - 1)])
        wanted = fillings(kinds, of(kinds, value), float(value[room]), room, memory, budget, most)
    # Whether there is room at first for all of them or not.
    with patch.object(module, "_NUMBERS", rng.choice([1, 1000])):
        assert fillings(kinds, of(kinds, value), float(value[room]), room, memory, budget, most) == wanted

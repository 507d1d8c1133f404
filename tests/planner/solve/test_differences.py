"""By how much the shares of two hosts differ, against trying everything, and the best pieces where some are alone."""

from __future__ import annotations

from itertools import combinations_with_replacement, product
from random import Random
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings

from shardrec.planner.native import library
from shardrec.planner.solve import differences
from shardrec.planner.solve import plane as plane_
from shardrec.planner.solve.differences import Differences
from shardrec.planner.solve.plane import Pieces, Plane
from shardrec.planner.solve.sizes import GRID
from tests.plans import randoms


def _random_problem(rng: Random, most_tables: int) -> tuple[Any, list[int], list[tuple[int, float, int]]]:
    """Tables of a kind, options of each kind, and the option, share and number of parts."""
    sizes = [rng.randint(1, 2) for _ in range(rng.randint(1, most_tables))]
    options = [rng.randint(1, 3) for _ in sizes]
    parts = [(option, rng.choice([0.0, rng.random() * 0.2]), rng.randint(1, 2)) for option in range(sum(options))]
    parts = [part for part in parts if rng.random() < 0.7]
    alike = SimpleNamespace(
        sizes=np.array(sizes),
        starts=np.cumsum([0, *options[:-1]]),
        base=np.zeros(sum(options)),
        part_option=np.array([part[0] for part in parts], dtype=np.int64),
        part_share=np.array([part[1] for part in parts]),
        part_count=np.array([part[2] for part in parts]),
    )
    return cast(Any, alike), options, parts


def _random_prices(rng: Random, options: int) -> Any:
    return np.array([rng.random() * rng.choice([0.01, 0.1]) for _ in range(options)])


@settings(max_examples=60, deadline=None)
@given(rng=randoms())
def test_no_difference_costs_less(rng: Random) -> None:
    alike, options, parts = _random_problem(rng, most_tables=2)
    sizes, starts = alike.sizes.tolist(), alike.starts.tolist()
    price = _random_prices(rng, sum(options))
    most = rng.choice([1, 3])
    found = Differences(alike, most).least(price)
    tables = [
        range(start, start + many)
        for start, many, size in zip(starts, options, sizes, strict=True)
        for _ in range(size)
    ]
    for chosen in product(*tables):
        there = [(share, count) for option in chosen for of, share, count in parts if of == option and share > 0]
        shared = sum(any(of == option and share > 0 for of, share, _ in parts) for option in chosen)
        for on_first in product(*(range(count + 1) for _, count in there)):
            apart = sum(share * (count - 2 * first) for (share, count), first in zip(there, on_first, strict=True))
            # Rooms are rounded down, so that they differ by less than a step more or less.
            for between in (int(np.floor(abs(apart) * GRID)), int(np.ceil(abs(apart) * GRID))):
                if between <= GRID:
                    assert found[min(shared, most), between] <= price[list(chosen)].sum() + 1e-9


@pytest.mark.skipif(library() is None, reason="the planner's C++ was not built")
@settings(max_examples=60, deadline=None)
@given(rng=randoms())
def test_differences_are_the_same_without_compiled_functions(rng: Random) -> None:
    alike, options, _ = _random_problem(rng, most_tables=6)
    price = _random_prices(rng, sum(options))
    price[[rng.random() < 0.1 for _ in price]] = np.inf
    found = Differences(alike, rng.choice([1, 3]))
    wanted = found.least(price)
    with patch.object(differences, "library", return_value=None):
        np.testing.assert_array_equal(found.least(price), wanted)


def _random_pieces(rng: Random) -> tuple[Pieces, Any]:
    most, memory = rng.randint(5, 20), rng.choice([0, 3])
    kinds = sorted(
        {(rng.randint(2, most), rng.randint(0, memory), rng.choice([-1, -1, 0, 1])) for _ in range(rng.randint(1, 5))}
    )
    return Pieces(kinds, most, memory), np.array([rng.random() * size for size, _, _ in kinds])


@settings(max_examples=60, deadline=None)
@given(rng=randoms())
def test_no_pieces_are_worth_more(rng: Random) -> None:
    pieces, values = _random_pieces(rng)
    plane, kinds = Plane(pieces, values), pieces.kinds
    worth = {kind: float(plane.alone.get(kind[2], plane.free)[kind[:2]]) for kind in kinds}
    size, heavy = rng.randint(0, pieces.most), rng.randint(0, pieces.memory)
    best = 0.0
    for many in range(size // 2 + 1):
        for way in combinations_with_replacement(kinds, many):
            tables = [table for _, _, table in way if table >= 0]
            fits = sum(each[0] for each in way) <= size and sum(each[1] for each in way) <= heavy
            if fits and len(tables) == len(set(tables)):
                best = max(best, sum(worth[kind] for kind in way))
    assert abs(plane.value[size, heavy] - best) < 1e-6
    chosen = plane.way(size, heavy)
    assert sum(kind[0] * many for kind, many in chosen.items()) <= size
    assert all(many == 1 for kind, many in chosen.items() if kind[2] >= 0)
    assert abs(sum(worth[kind] * many for kind, many in chosen.items()) - best) < 1e-6


@pytest.mark.skipif(library() is None, reason="the planner's C++ was not built")
@settings(max_examples=60, deadline=None)
@given(rng=randoms())
def test_pieces_are_the_same_without_compiled_functions(rng: Random) -> None:
    pieces, values = _random_pieces(rng)
    wanted = Plane(pieces, values)
    with patch.object(plane_, "library", return_value=None):
        found = Plane(pieces, values)
    np.testing.assert_array_equal(found.value, wanted.value)
    np.testing.assert_array_equal(found.worth, wanted.worth)
    for size, heavy in product(range(pieces.most + 1), range(pieces.memory + 1)):
        assert found.way(size, heavy) == wanted.way(size, heavy)

"""The bounds of rooms, the plans of patterns, and the search where a problem is too large to be solved as a whole."""

from __future__ import annotations

from itertools import product
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings

from shardrec.planner.solve import SolveLimits, exact, solve
from shardrec.planner.solve.encode import encode
from shardrec.planner.solve.knapsack import GRID, knapsack, knapsacks
from shardrec.planner.solve.patterns import PatternProgramme
from shardrec.planner.solve.rebuild import Rebuilder
from tests.planner.problems import best_cost, check, random_problem
from tests.plans import randoms


@settings(max_examples=30, deadline=None)
@given(rng=randoms())
def test_knapsack_is_the_best_of_all_multisets(rng: Random) -> None:
    kinds = rng.randint(1, 3)
    weights = np.array(sorted(rng.sample(range(GRID // 6, GRID + 1), kinds)))
    values = np.array([rng.choice([0.0, 1.0, 2.5, 4.0]) for _ in range(kinds)])
    best, pieces = knapsack(weights, values, GRID)
    for size in (0, GRID // 2, rng.randint(0, GRID), GRID):
        multisets = product(*(range(size // int(weight) + 1) for weight in weights))
        wanted = max(float(values @ counts) for counts in map(np.array, multisets) if weights @ counts <= size)
        assert best[size] == pytest.approx(wanted)
        found = pieces(size)
        assert weights @ found <= size
        assert float(values @ found) == pytest.approx(wanted)


@settings(max_examples=30, deadline=None)
@given(rng=randoms())
def test_knapsacks_use_no_more_pieces_than_there_are(rng: Random) -> None:
    kinds, most = rng.randint(1, 3), 40
    weights = np.array([rng.randint(4, most) for _ in range(kinds)])
    values = np.array([rng.choice([0.0, 1.0, 2.5, 4.0]) for _ in range(kinds)])
    there = np.array([rng.randint(0, 4) for _ in range(kinds)])
    ends = sorted({rng.randint(0, kinds), kinds})
    best, pieces = knapsacks(weights, values, most, ends, there)
    for number, end in enumerate(ends):
        for size in (0, rng.randint(0, most), most):
            multisets = map(np.array, product(*(range(int(count) + 1) for count in there[:end])))
            wanted = max(float(values[:end] @ each) for each in multisets if weights[:end] @ each <= size)
            found = pieces(size, number)
            assert best[number, size] == pytest.approx(wanted)
            assert float(values @ found) == pytest.approx(wanted)
            assert (found <= there).all()
            assert weights @ found <= size


@settings(max_examples=15, deadline=None)
@given(rng=randoms())
def test_patterns_and_rebuilding_make_real_plans(rng: Random) -> None:
    encoded = encode(random_problem(rng, most_tables=12, ranks=rng.choice([2, 4])))
    room = 2.0 * float(encoded.total_load.max(initial=1.0) + 1)
    programme = PatternProgramme(encoded, np.full(encoded.ranks, room), encoded.sizes)
    filled = programme.solve(np.inf, dives=20, nodes=20, stop=lambda: False, seconds=5.0)
    packing = None if filled.counts is None else programme.packed(filled, None)
    if packing is None:
        return
    assert (packing.counts[encoded.group_options[0].start : encoded.group_options[-1].stop] >= 0).all()
    assert packing.base >= filled.bound - 1e-6
    found = [Rebuilder(encoded, np.linspace(0, 1, GRID + 1)).run(packing, 60, lambda: False) for _ in range(2)]
    if found[0] is not None and found[1] is not None:
        assert found[0].cost < packing.cost
        assert found[0].fits()
        assert np.array_equal(found[0].loads, found[1].loads), "the same every time"
        counts = found[0].counts
        sums = [int(counts[span.start : span.stop].sum()) for span in encoded.group_options]
        assert sums == encoded.sizes.tolist()


@settings(max_examples=25, deadline=None)
@given(rng=randoms())
def test_the_search_without_the_exact_programme(rng: Random) -> None:
    problem = random_problem(rng, most_tables=3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exact, "_MOST_VARIABLES", 0)
        solution = solve(problem, SolveLimits(gap=0.01, effort=4))
    best = best_cost(problem)
    if solution is not None:
        check(problem, solution)
        assert solution.bound <= best * (1 + 1e-6) + 1e-9, "the bound is not one"
        assert solution.cost >= best * (1 - 1e-9)

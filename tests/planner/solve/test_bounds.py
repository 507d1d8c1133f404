"""The bounds of rooms, the plans of patterns, and the search where a problem is too large to be solved as a whole."""

from __future__ import annotations

from itertools import product
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings

from shardrec.planner.solve import Option, Part, Piece, Problem, SolveLimits, exact, solve
from shardrec.planner.solve.curve import Curve
from shardrec.planner.solve.encode import Encoded, encode
from shardrec.planner.solve.knapsack import GRID, knapsack, knapsacks
from shardrec.planner.solve.packing import Packing
from shardrec.planner.solve.patterns import PatternProgramme
from shardrec.planner.solve.problem import host_places
from shardrec.planner.solve.rebuild import Rebuilder
from shardrec.planner.solve.relax import Relaxation
from shardrec.planner.solve.room import RoomBound
from shardrec.planner.solve.sizes import GRID as STEPS
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


def random_packing(rng: Random, encoded: Encoded) -> Packing | None:
    """Any options, any places; None where they do not fit."""
    counts = np.zeros(len(encoded.options), dtype=np.int64)
    for size, span in zip(encoded.sizes.tolist(), encoded.group_options, strict=True):
        for _ in range(size):
            counts[rng.choice(span)] += 1
    packing = Packing(encoded, counts)
    for option in np.flatnonzero(counts).tolist():
        for block, count in encoded.option_blocks[option]:
            for _ in range(count * int(counts[option])):
                packing.put(block, rng.randrange(len(encoded.blocks[block].names)))
    return packing if packing.fits() else None


@settings(max_examples=60, deadline=None)
@given(rng=randoms())
def test_no_packing_has_less_on_every_rank_than_the_bound_of_its_room(rng: Random) -> None:
    """Whatever the options and places: a room that holds the pieces has a bound that the packing keeps."""
    encoded = encode(random_problem(rng, most_tables=6))
    rooms = RoomBound(encoded)
    for _ in range(5):
        packing = random_packing(rng, encoded)
        room = 0.0 if packing is None else float(packing.loads.max()) - packing.base
        if packing is not None and room > 0:
            bound, value = rooms.solve(room, np.inf)
            assert bound <= packing.base + 1e-9 * (1 + packing.cost)
            assert value[-1] == pytest.approx(1.0)
            assert (np.diff(value) >= -1e-12).all()


def test_parts_of_a_host_share_its_room() -> None:
    """Two tables that put 1 on each rank of a host, two hosts, room for 1.5: a third table does not fit that way."""
    places = host_places(2, 2)
    by_host = Option(label="host", everywhere=Piece(), parts=(Part(pieces=(Piece(load=1.0),) * 2, places=places),))
    everywhere = Option(label="all", everywhere=Piece(load=5.0))
    tables = {f"t{number}": (by_host, everywhere) for number in range(3)}
    encoded = encode(Problem(ranks=4, capacity=(np.inf,), tables=tables))
    bound, _ = RoomBound(encoded).solve(1.5, np.inf)
    assert bound == pytest.approx(5.0, rel=1e-2)


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


@settings(max_examples=60, deadline=None)
@given(rng=randoms())
def test_no_packing_has_less_on_every_rank_than_the_curve_says(rng: Random) -> None:
    """Whatever the options and places, and whichever room was priced: the bound for a packing's room holds for it."""
    encoded = encode(random_problem(rng, most_tables=6))
    found = [packing for packing in (random_packing(rng, encoded) for _ in range(6)) if packing is not None]
    if not found or max(packing.cost for packing in found) <= 0:
        return
    curve = Curve(encoded, 1.01 * max(packing.cost for packing in found), Relaxation(encoded).limits())
    for packing in found:
        room = int((float(packing.loads.max()) - packing.base) / curve.step)
        curve.price(min(room + rng.randint(0, 20), STEPS), np.inf)
        for each in found:
            room = int((float(each.loads.max()) - each.base) / curve.step)
            assert curve.curve[room] <= each.base + 1e-9 * (1 + each.cost)
            assert curve.lift(each.cost, 2, lambda: False) <= each.cost * (1 + 1e-9)
    assert (np.diff(np.clip(curve.curve, 0.0, 1e9)) <= 1e-12).all(), "less room, more on every rank"


def test_a_part_is_on_one_host_only() -> None:
    """Two tables, each on a host of two with 3 besides on one rank: not half of one twice on half a host."""
    places = tuple(place for host in host_places(2, 2) for place in (host, host[::-1]))
    part = Part(pieces=(Piece(load=4.0), Piece(load=1.0)), places=places)
    free = Part(pieces=(Piece(load=3.0),), places=tuple((rank,) for rank in range(4)))
    tables = {
        "bound": (Option(label="", everywhere=Piece(), parts=(part,)),),
        **{
            f"t{number}": (
                Option(label="", everywhere=Piece(), parts=(free,)),
                Option(label="all", everywhere=Piece(load=5.0)),
            )
            for number in range(4)
        },
    }
    encoded = encode(Problem(ranks=4, capacity=(np.inf,), tables=tables))
    rooms = Curve(encoded, 20.0, Relaxation(encoded).limits())
    # Room for one piece of 3 on each rank but that with 4: one of the four tables is on all ranks.
    rooms.price(int(5.0 / rooms.step), np.inf)
    assert rooms.curve[int(5.0 / rooms.step)] == pytest.approx(5.0, rel=1e-2)


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

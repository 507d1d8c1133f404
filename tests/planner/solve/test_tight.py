"""Ways to fill ranks in time and memory at once: knapsacks of two quantities, dives, and plans where memory binds."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import product
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings

from shardrec.planner.solve import Option, Part, Piece, Problem, SolveLimits, solve
from shardrec.planner.solve.dive import dive
from shardrec.planner.solve.encode import Encoded, encode
from shardrec.planner.solve.joint import JointProgramme, unbound
from shardrec.planner.solve.packing import Packing, demand
from shardrec.planner.solve.problem import anywhere, host_places
from shardrec.planner.solve.relax import Relaxation
from shardrec.planner.solve.settle import settled
from shardrec.planner.solve.tight import many_tables, tight_plans
from shardrec.planner.solve.vectors import VectorKnapsack
from tests.planner.problems import check
from tests.plans import randoms

FULL = 100.0
KINDS = ((48.0, 22.0), (19.0, 1.0), (4.0, 21.0), (3.9, 43.0), (2.0, 0.6), (1.9, 0.1))
"""Time and memory of pieces: much of the one, much of the other, little of both."""


def planted(rng: Random, ranks: int, hosts: int = 0) -> Problem:
    """Tables that nearly fill all ranks, in time and memory, if put where they were made.

    Args:
        rng: draws them.
        ranks: how many.
        hosts: tables with a part on each rank of a host.
    """
    spots = anywhere(ranks)
    tables: dict[str, tuple[Option, ...]] = {}
    for rank in range(ranks):
        # Ranks of hosts of four have less room where a table is on all of them.
        left = np.array([FULL, FULL]) - np.array([5.0, 8.0]) * (rank // 4 < hosts)
        pieces = []
        while (fit := [kind for kind in KINDS if (left >= kind).all()]) and rng.random() < 0.96:
            pieces.append(rng.choice(fit))
            left -= pieces[-1]
        # Two more take what is left, to the next half, that there are not too many kinds.
        pieces += [tuple(np.floor(left) / 2)] * 2
        for load, memory in pieces:
            options = [_option("one", load, memory, spots, 1)]
            options.append(_option("two", load * 0.53, memory * 0.502, spots, 2))
            options.append(_option("four", load * 0.3, memory * 0.252, spots, 4))
            tables[f"t{len(tables)}"] = tuple(options)
    for number in range(hosts):
        pieces = (Piece(load=5.0, memory=(8.0,)),) * 4
        part = Part(pieces=pieces, places=host_places(ranks // 4, 4))
        host = Option(label="host", everywhere=Piece(), parts=(part,))
        tables[f"host{number}"] = (_option("far", 2 * FULL, 1.0, spots, 1), host)
    return Problem(ranks=ranks, capacity=(FULL * 1.01,), tables=tables)


def crowded(rng: Random, ranks: int) -> Problem:
    """Some hundred small tables for a rank, and large ones of much memory or much time, that nearly fill the memory."""
    spots = anywhere(ranks)
    kinds = [((12.0, 1.0), 2), ((2.0, 24.0), 2), ((0.6, 0.3), 40), ((0.5, 0.4), 40), ((1.1, 0.2), 20)]
    tables: dict[str, tuple[Option, ...]] = {}
    used = 0.0
    for (load, memory), count in kinds:
        for _ in range(ranks * count + (rng.randint(-3, 3) if count > 2 else 0)):
            options = [_option("one", load, memory, spots, 1), _option("two", load * 0.6, memory * 0.502, spots, 2)]
            options.append(Option(label="all", everywhere=Piece(load=load / (ranks + 1), memory=(memory,))))
            tables[f"t{len(tables)}"] = tuple(options)
            used += memory
    return Problem(ranks=ranks, capacity=(1.02 * used / ranks,), tables=tables)


def _option(label: str, load: float, memory: float, spots: tuple[tuple[int, ...], ...], count: int) -> Option:
    part = Part(pieces=(Piece(load=load, memory=(memory,)),), places=spots, count=count)
    return Option(label=label, everywhere=Piece(load=1e-3 * count, memory=(1e-5 * count,)), parts=(part,))


def check_packing(encoded: Encoded, packing: Packing, rest: Counter[int] | None = None) -> None:
    """All tables have an option, all parts are there or left over, loads and memory are the sums of what is there."""
    groups = np.bincount(encoded.option_group, packing.counts, len(encoded.groups))
    assert groups.tolist() == encoded.sizes.tolist()
    there = Counter({block: int(at.sum()) for block, at in packing.at.items()}) + (rest or Counter())
    assert +there == +Counter(demand(encoded, packing.counts))
    other = Packing(encoded, packing.counts)
    for block, at in packing.at.items():
        assert at.min() >= 0
        for place in np.flatnonzero(at).tolist():
            other.put(block, place, int(at[place]))
    np.testing.assert_allclose(packing.loads, other.loads)
    np.testing.assert_allclose(packing.memory, other.memory)


@settings(max_examples=30, deadline=None)
@given(rng=randoms())
def test_knapsack_is_the_best_of_all_where_sizes_are_whole_steps(rng: Random) -> None:
    kinds, count = rng.randint(1, 4), rng.randint(1, 3)
    room = np.array([rng.randint(1, 8) for _ in range(count)])
    sizes = np.array([[rng.randint(0, 4) for _ in range(count)] for _ in range(kinds)], dtype=np.float64)
    sizes[sizes.sum(axis=1) == 0, 0] = 1.0
    values = np.array([rng.random() * 5 for _ in range(kinds)])
    left = np.array([rng.choice([0.0, rng.random()]) for _ in range(count)])
    knapsack = VectorKnapsack(sizes, values, left, np.ones(count), room)
    ways, worth = knapsack.ways(room.astype(np.float64), 1000)
    spare = room - ways @ sizes
    assert (spare >= 0).all()
    np.testing.assert_allclose(worth, ways @ values + spare @ left)
    best = max(
        float(counts @ values + (room - counts @ sizes) @ left)
        for counts in map(np.array, product(range(9), repeat=kinds))
        if (counts @ sizes <= room).all()
    )
    assert worth[0] == pytest.approx(best) == knapsack.value(room[None].astype(np.float64))[0]


@settings(max_examples=60, deadline=None)
@given(rng=randoms())
def test_ways_fit_with_true_sizes(rng: Random) -> None:
    kinds = rng.randint(1, 12)
    sizes = np.array([[rng.uniform(0.001, 0.6), rng.uniform(0.0, 0.6)] for _ in range(kinds)])
    values, left = sizes @ (1.0, 0.5) * rng.uniform(0.9, 1.4), np.array([0.8, 0.1])
    steps = np.array([10, 30])
    knapsack = VectorKnapsack(sizes, values, left, 1.0 / steps, steps)
    room = np.array([rng.uniform(0.2, 1.0), rng.uniform(0.2, 1.0)])
    ways, worth = knapsack.ways(room, 50)
    assert (ways @ sizes <= room + 1e-9).all()
    np.testing.assert_allclose(worth, ways @ values + (room - ways @ sizes) @ left)
    assert (np.diff(worth) <= 0).all()


@settings(max_examples=4, deadline=None)
@given(rng=randoms())
def test_dives_put_each_piece_into_a_way_or_leave_it_over(rng: Random) -> None:
    encoded = encode(planted(rng, 4))
    kept = Packing(encoded, np.zeros(len(encoded.options), dtype=np.int64))
    programme = JointProgramme(encoded, 101.0, np.full(1, 0.02), np.zeros(1), kept, unbound(encoded))
    programme.generate(lambda: False)
    taken = np.bincount(encoded.option_group, programme.chosen(), len(encoded.groups))
    assert float((encoded.sizes - taken).sum()) == pytest.approx(programme.left_out(), abs=1e-6)
    packing, rest = dive(programme, lambda: False)
    check_packing(encoded, packing, rest)
    assert (packing.loads - packing.base <= 101.0 * (1 + 1e-9)).all()
    assert packing.fits(), "ways fit memory"


def test_a_dive_that_is_stopped_leaves_the_others_over() -> None:
    encoded = encode(planted(Random(1), 8))
    kept = Packing(encoded, np.zeros(len(encoded.options), dtype=np.int64))
    programme = JointProgramme(encoded, 101.0, np.full(1, 0.02), np.zeros(1), kept, unbound(encoded))
    programme.generate(lambda: True)
    packing, rest = dive(programme, lambda: True)
    check_packing(encoded, packing, rest)


@settings(max_examples=8, deadline=None)
@given(rng=randoms())
def test_settling_places_all_and_tells_whether_it_fits(rng: Random) -> None:
    encoded = encode(planted(rng, 8))
    counts = np.zeros(len(encoded.options), dtype=np.int64)
    for size, span in zip(encoded.sizes.tolist(), encoded.group_options, strict=True):
        counts[span.start] = size
    packing = Packing(encoded, counts)
    rest = Counter(demand(encoded, counts))
    for block in list(rest):
        for _ in range(rng.randint(0, rest[block])):
            packing.put(block, rng.randrange(encoded.ranks))
            rest[block] -= 1
    before = packing.copy()
    assert settled(packing, +rest, 1.02 * FULL, 300) == packing.fits()
    check_packing(encoded, packing)
    assert sum(int(at.sum()) for at in before.at.values()) + sum(rest.values()) == sum(demand(encoded, counts).values())


def test_settling_finds_the_swap_that_greedy_packing_misses() -> None:
    """Two ranks with memory for 10: 6 + 4 and 5 + 5 fit; the largest first ends with 6, 5 and 5, 4."""
    spots = anywhere(2)
    tables = {f"t{n}": (_option("one", 1.0, m, spots, 1),) for n, m in enumerate((6.0, 5.0, 5.0, 4.0))}
    encoded = encode(Problem(ranks=2, capacity=(10.001,), tables=tables))
    counts = encoded.sizes.copy()
    packing = Packing(encoded, counts)
    by_memory = sorted(demand(encoded, counts), key=lambda block: -encoded.blocks[block].memory[0, 0])
    for block, rank in zip((by_memory[0], by_memory[1], by_memory[1], by_memory[2]), (0, 0, 1, 1), strict=True):
        packing.put(block, rank)
    assert not packing.fits()
    assert settled(packing, {}, 3.0, 10)
    assert packing.fits()


def test_plans_are_near_what_was_planted() -> None:
    encoded = encode(planted(Random(1), 8, hosts=1))
    relaxation = Relaxation(encoded)
    first = relaxation.intervals(1e-3)[0]
    (packing,) = tight_plans(encoded, relaxation, first, SolveLimits(effort=10), lambda: False)
    check_packing(encoded, packing)
    assert packing.fits()
    assert packing.cost <= 1.02 * FULL
    assert packing.counts[[option.label == "host" for option in encoded.options]].tolist() == [1]
    (again,) = tight_plans(encoded, relaxation, first, SolveLimits(effort=10), lambda: False)
    assert again.counts.tolist() == packing.counts.tolist() and again.loads.tolist() == packing.loads.tolist()


@settings(max_examples=10, deadline=None)
@given(rng=randoms())
def test_plans_of_crowded_ranks_are_near_the_bound(rng: Random) -> None:
    encoded = encode(crowded(rng, 4))
    assert many_tables(encoded) and encoded.sizes.sum() > 40 * encoded.ranks
    relaxation = Relaxation(encoded)
    first = relaxation.intervals(1e-3)[0]
    found = list(tight_plans(encoded, relaxation, first, SolveLimits(), lambda: False))
    for packing in found:
        check_packing(encoded, packing)
        assert packing.fits()
    assert min(packing.cost for packing in found) <= 1.02 * first.bound


def test_nothing_is_tried_when_there_is_no_time() -> None:
    encoded = encode(planted(Random(0), 8))
    relaxation = Relaxation(encoded)
    first = relaxation.intervals(1e-2)[0]
    assert list(tight_plans(encoded, relaxation, first, SolveLimits(), lambda: True)) == []
    endless = replace(first, high=np.inf)
    assert list(tight_plans(encoded, relaxation, endless, SolveLimits(), lambda: False)) == []


def test_it_is_for_many_tables() -> None:
    problem = planted(Random(0), 8)
    few = dict(list(problem.tables.items())[:10])
    assert many_tables(encode(problem))
    each = {
        f"{name}{n}": (replace(option, label=f"{n}"),) for n, (name, (option, *_)) in enumerate(problem.tables.items())
    }
    assert not many_tables(encode(Problem(ranks=8, capacity=problem.capacity, tables=each))), "no two are alike"
    assert not many_tables(encode(Problem(ranks=8, capacity=(np.inf,), tables=problem.tables)))
    assert not many_tables(encode(Problem(ranks=8, capacity=problem.capacity, tables=few)))
    assert not many_tables(encode(Problem(ranks=8, capacity=(0.0,), tables=problem.tables)))


def test_the_solver_closes_what_was_planted() -> None:
    """Without ways in time and memory, its plan is at 113."""
    problem = planted(Random(1), 16, hosts=1)
    solution = solve(problem, SolveLimits(gap=0.02, effort=10))
    assert solution is not None
    check(problem, solution)
    assert solution.cost <= 1.02 * FULL

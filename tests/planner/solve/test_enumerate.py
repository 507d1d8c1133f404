"""Enumeration: its bound holds whatever the problem, closes what fractions cannot, and lists all the ways there are."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import numpy as np
import pytest
from hypothesis import assume, given, settings

from shardrec.planner.solve import Option, Part, Piece, Problem, SolveLimits
from shardrec.planner.solve.alike import MEMORY, Alike
from shardrec.planner.solve.cells import Box
from shardrec.planner.solve.clock import Clock
from shardrec.planner.solve.encode import Encoded, Ints, encode
from shardrec.planner.solve.enumerate import choose, enumerated, undominated
from shardrec.planner.solve.packing import Packing
from shardrec.planner.solve.pricing import Pricing
from shardrec.planner.solve.problem import anywhere, host_places
from shardrec.planner.solve.relax import Relaxation
from shardrec.planner.solve.sizes import GRID
from tests.planner.problems import best_cost, random_problem
from tests.plans import randoms


def nearly(rng: Random, problem: Problem) -> Problem:
    """The same with other loads for each table, by a part in a thousand."""
    tables = {}
    for name, options in problem.tables.items():
        factor = 1 + rng.choice([0.0, 1e-5, 1e-3])
        tables[name] = tuple(scaled(option, factor) for option in options)
    return replace(problem, tables=tables)


def scaled(option: Option, factor: float) -> Option:
    def piece(old: Piece) -> Piece:
        return replace(old, load=old.load * factor)

    parts = tuple(replace(part, pieces=tuple(map(piece, part.pieces))) for part in option.parts)
    return replace(option, everywhere=piece(option.everywhere), parts=parts)


def whole(size: float, ranks: int, **more: float) -> Option:
    """One piece on any rank."""
    part = Part(pieces=(Piece(load=size),), places=anywhere(ranks))
    return Option(label="whole", everywhere=Piece(**more), parts=(part,))


def proven(problem: Problem, cost: float, gap: float, start: float = 0.0) -> tuple[float, float]:
    """The bound, and the least cost after packing what was chosen on the way."""
    encoded, best = encode(problem), [cost]

    def attempt(counts: Ints, placed: Packing | None) -> None:
        packing, demand = Packing(encoded, counts), demand_of(encoded, counts)
        if packing.fits() and packing.fill(demand.items()):
            best.append(packing.cost)
        if placed is not None:
            assert {block: int(at.sum()) for block, at in placed.at.items() if at.any()} == demand
            best.append(placed.cost)

    limits = SolveLimits(gap=gap, effort=15)
    rows = Relaxation(encoded).limits()
    bound = enumerated(encoded, rows, start, limits, lambda: min(best), attempt, Clock(), lambda: False)
    return bound, min(best)


def demand_of(encoded: Encoded, counts: Ints) -> dict[int, int]:
    demand: dict[int, int] = {}
    for option in np.flatnonzero(counts).tolist():
        for block, count in encoded.option_blocks[option]:
            demand[block] = demand.get(block, 0) + count * int(counts[option])
    return demand


def packed_at_random(rng: Random, encoded: Encoded) -> tuple[Packing, list[tuple[int, int]]]:
    """Options and places at random, whether they fit or not; and each part's kind and place."""
    counts = np.zeros(len(encoded.options), dtype=np.int64)
    for size, span in zip(encoded.sizes.tolist(), encoded.group_options, strict=True):
        for _ in range(size):
            counts[rng.choice(span)] += 1
    packing, put = Packing(encoded, counts), []
    for block, count in demand_of(encoded, counts).items():
        for _ in range(count):
            put.append((block, rng.randrange(len(encoded.blocks[block].names))))
            packing.put(*put[-1])
    return packing, put


@settings(max_examples=20, deadline=None)
@given(rng=randoms())
def test_the_bound_holds(rng: Random) -> None:
    problem = nearly(rng, random_problem(rng))
    best = best_cost(problem)
    assume(0 < best < np.inf)
    cost = best * rng.choice([1.0, 1.004, 1.2])
    bound, found = proven(problem, cost, rng.choice([0.0, 1e-3, 0.1]), rng.choice([0.0, best * 0.8]))
    assert bound <= best * (1 + 1e-5)
    assert found >= best * (1 - 1e-9)


@pytest.mark.parametrize("seed", [3, 4, 26, 28])
def test_a_bound_from_a_plan_that_is_far_off(seed: int) -> None:
    """Few pieces to a rank: fractions are far below the least cost, and what is between them has to be listed."""
    rng, tables = Random(seed), {}
    ranks = rng.choice([2, 3])
    for number in range(rng.randint(ranks + 1, 5)):
        size = rng.uniform(0.3, 1.0)
        half = Part(pieces=(Piece(load=size / 2 + 0.02),), places=anywhere(ranks), count=2)
        halves = Option(label="halves", everywhere=Piece(load=rng.uniform(0.01, 0.15)), parts=(half,))
        tables[f"t{number}"] = (whole(size, ranks), halves)
    problem = Problem(ranks=ranks, capacity=(np.inf,), tables=tables)
    best, gap = best_cost(problem), rng.choice([0.001, 0.01])
    bound, found = proven(problem, best * rng.choice([1.05, 1.15, 1.3]), gap)
    assert bound <= best * (1 + 1e-5)
    assert found >= best * (1 - 1e-9)


@settings(max_examples=60, deadline=None)
@given(rng=randoms())
def test_no_box_with_a_plan_is_closed(rng: Random) -> None:
    """For the rooms that a packing has, a target just above its cost."""
    encoded = encode(nearly(rng, random_problem(rng)))
    packing, put = packed_at_random(rng, encoded)
    counts, shares = packing.counts, np.zeros(encoded.ranks)
    for block, place in put:
        kind = encoded.blocks[block]
        if len(kind.names) == 2 and len(kind.loads) == 2 == encoded.ranks // 2:
            shares[kind.places[place]] += kind.loads.min()
    assume(packing.fits() and packing.cost > 0)
    alike = Alike.of(encoded, packing.cost * 1.01, Relaxation(encoded).limits())
    assert alike is not None
    of_hosts = shares[:: encoded.ranks // len(alike.ranks)]
    rooms = sorted(((packing.cost - packing.base - of_hosts) / (packing.cost * 1.01) * GRID).astype(int), reverse=True)
    tables = float(sum(counts[encoded.option_group == g] @ shared(encoded, g) for g in range(len(encoded.groups))))
    box = Box(tuple(rooms), tuple(int(room) + 1 for room in rooms), int(tables), tables)
    pricing = Pricing(alike)
    target = 1.001 / 1.01
    pricing.price(box, target - box.mean, closely=True)
    assert choose(pricing, box, target, 10.0).bound <= target + 1e-9
    assert pricing.bound(box)[0] + box.mean <= 1 / 1.01 + 1e-6


@settings(max_examples=60, deadline=None)
@given(rng=randoms())
def test_what_fits_beside_the_least_of_all_others_is_left(rng: Random) -> None:
    encoded = encode(nearly(rng, random_problem(rng)))
    packing, put = packed_at_random(rng, encoded)
    steps = np.zeros(encoded.ranks, dtype=np.int64)
    for block, place in put:
        kind = encoded.blocks[block]
        of_pieces = np.floor(kind.memory[:, 0] / encoded.capacity[0] * MEMORY * (1 - 1e-9))
        np.add.at(steps, kind.places[place], of_pieces.astype(np.int64))
    assume(packing.fits())
    alike = Alike.of(encoded, 10.0, Relaxation(encoded).limits())
    assert alike is not None
    able, memory = alike.beside(np.arange(len(alike.base)))
    used = {
        start + option - first
        for start, firsts in zip(alike.starts.tolist(), alike.first, strict=True)
        for first in firsts
        for option in encoded.group_options[encoded.option_group[first]]
        if packing.counts[option]
    }
    assert used <= set(able.tolist())
    assert steps.max() <= memory


@settings(max_examples=60, deadline=None)
@given(rng=randoms())
def test_an_option_is_left_out_if_another_of_the_table_is_no_worse_in_anything(rng: Random) -> None:
    encoded = encode(nearly(rng, random_problem(rng)))
    alike = Alike.of(encoded, 10.0, Relaxation(encoded).limits())
    assert alike is not None
    pricing = Pricing(alike)
    pricing.limits = {row: row for row in range(len(alike.limits)) if rng.random() < 0.5}
    some = sorted(rng.sample(range(len(alike.base)), rng.randint(1, len(alike.base))))

    def pieces(option: int) -> list[list[tuple[int, int]]]:
        parts = [-1, *np.flatnonzero(alike.part_option == option).tolist()]
        own = [item for item in pricing.items() if item[0] == option]
        return [sorted((k for _, p, k, n in own if p == part for _ in range(int(n))), reverse=True) for part in parts]

    def no_worse(one: int, other: int) -> bool:
        mine, its = pieces(one), pieces(other)
        shares = [
            [(alike.part_share[p], alike.part_count[p]) for p in np.flatnonzero(alike.part_option == o)]
            for o in (one, other)
        ]
        return (
            alike.group[one] == alike.group[other]
            and pricing.base[one] <= pricing.base[other]
            and shares[0] == shares[1]
            and all(
                len(a) <= len(b)
                and all(x <= y and v <= w and t <= u for (x, v, t), (y, w, u) in zip(a, b, strict=False))
                for a, b in zip(mine, its, strict=True)
            )
            and all(alike.rows[row, one] <= alike.rows[row, other] for row in pricing.limits)
        )

    kept = undominated(pricing, some)
    assert set(kept) <= set(some)
    for option in some:
        by = [other for other in kept if other != option and no_worse(other, option)]
        # Of those with equal loads on every rank, the order decides.
        assert all(pricing.base[other] == pricing.base[option] for other in by) if option in kept else by


def test_rows_on_every_rank_leave_no_memory_for_a_large_table() -> None:
    """Without either, fractions and ways would have both: half of each rank for rows, and the large table whole."""
    large = (heavy(1.0, 0.7, 2), Option(label="rows", everywhere=Piece(load=0.9, memory=(0.35,))))
    rows = (Option(label="rows", everywhere=Piece(load=0.1, memory=(0.5,))),)
    encoded = encode(Problem(ranks=2, capacity=(1.0,), tables={"large": large, "rows": rows}))
    alike = Alike.of(encoded, 2.0, Relaxation(encoded).limits())
    assert alike is not None
    able, memory = alike.beside(np.arange(3))
    assert (able.tolist(), memory) == ([1, 2], int(0.15 * MEMORY))
    assert alike.beside(np.array([0, 2])) == (pytest.approx([]), 0)


def shared(encoded: Encoded, group: int) -> Ints:
    """(options of the group,) whether some part has a least piece above 0 on each rank of one of two hosts."""
    found = []
    for option in encoded.group_options[group]:
        kinds = [encoded.blocks[block] for block, _ in encoded.option_blocks[option]]
        found.append(
            any(len(k.names) == 2 and len(k.loads) == 2 == encoded.ranks // 2 and k.loads.min() > 0 for k in kinds)
        )
    return np.array(found, dtype=np.int64)


def test_closes_what_fractions_leave_open() -> None:
    """Five pieces on four ranks: two are together, and 1.25 to a rank are not."""
    problem = Problem(ranks=4, capacity=(np.inf,), tables={f"t{n}": (whole(1.0 + n * 1e-4, 4),) for n in range(5)})
    bound, _ = proven(problem, 2.0002, 0.005)
    assert bound == pytest.approx(2.0002 / 1.005, rel=1e-4)


def test_finds_a_plan_where_it_cannot_close() -> None:
    cut = Option(
        label="cut",
        everywhere=Piece(load=0.1),
        parts=(Part(pieces=(Piece(load=0.5),), places=anywhere(2), count=2),),
    )
    problem = Problem(ranks=2, capacity=(np.inf,), tables={f"t{n}": (whole(1.0, 2), cut) for n in range(3)})
    bound, found = proven(problem, 2.0, 0.01)
    assert found == pytest.approx(1.6)
    assert bound == pytest.approx(1.6 / 1.01, rel=1e-5)


def test_shares_of_hosts_count() -> None:
    """Two parts are on one host: 1 each on its ranks, and 2 more on one."""
    part = Part(pieces=tuple(Piece(load=load) for load in (3.0, 1.0)), places=((0, 1), (1, 0), (2, 3), (3, 2)))
    on_host = Option(label="host", everywhere=Piece(), parts=(part,))
    problem = Problem(
        ranks=4, capacity=(np.inf,), tables={"a": (on_host,), "b": (on_host,), "c": (on_host,), "d": (whole(3.0, 4),)}
    )
    best = best_cost(problem)
    assert best == 4.0
    bound, _ = proven(problem, best, 0.005)
    assert bound == pytest.approx(4.0 / 1.005, rel=1e-5)


def test_nearly_equal_tables_are_one_group_of_the_least_loads() -> None:
    tables = {f"t{n}": (whole(load, 2, load=0.1),) for n, load in enumerate((1.0, 1.001, 1.2, 1.0005))}
    encoded = encode(Problem(ranks=2, capacity=(np.inf,), tables=tables))
    alike = Alike.of(encoded, 2.0, Relaxation(encoded).limits())
    assert alike is not None
    assert alike.sizes.tolist() == [3, 1]
    assert alike.load.tolist() == [0.5, 0.6]
    assert alike.original({0: 3, 1: 1}).tolist() == [1, 1, 1, 1]


def test_three_hosts_are_left_alone() -> None:
    part = Part(pieces=(Piece(load=1.0), Piece(load=1.0)), places=host_places(3, 2))
    problem = Problem(ranks=6, capacity=(np.inf,), tables={"a": (Option(label="", everywhere=Piece(), parts=(part,)),)})
    assert proven(problem, 1.0, 0.01) == (0.0, 1.0)


def test_ways_fit_memory() -> None:
    """Loads alone would have the heavy pieces together, as they are of equal load: one of each on a rank fits."""
    sizes = {"a": (3.0, 0.9), "b": (3.0, 0.9), "c": (3.01, 0.05), "d": (3.01, 0.05)}
    tables = {name: (heavy(load, memory, 2),) for name, (load, memory) in sizes.items()}
    encoded = encode(Problem(ranks=2, capacity=(1.0,), tables=tables))
    placed: list[Packing] = []

    def attempt(counts: Ints, packing: Packing | None) -> None:
        if packing is not None:
            placed.append(packing)

    def cost() -> float:
        return min([6.5, *(packing.cost for packing in placed)])

    rows = Relaxation(encoded).limits()
    bound = enumerated(encoded, rows, 0.0, SolveLimits(gap=0.01), cost, attempt, Clock(), lambda: False)
    assert placed
    assert all(packing.fits() for packing in placed)
    assert cost() == pytest.approx(6.01)
    assert bound == pytest.approx(6.01 / 1.01, rel=1e-4)


def heavy(size: float, memory: float, ranks: int) -> Option:
    """One piece on any rank, in one tier of memory."""
    part = Part(pieces=(Piece(load=size, memory=(memory,)),), places=anywhere(ranks))
    return Option(label="whole", everywhere=Piece(memory=(0.0,)), parts=(part,))


def test_pieces_are_on_the_host_of_their_part() -> None:
    """On average there is room; but host by host, the second part's pieces have to be with its share, and are too much.

    The part puts 1 on both ranks of a host and 3 more on one. Two of 4 and one of 2 have to be beside it: 4 is the
    least room that the other host has, and the rank beside the 4 of the part has 3 left for the 2.
    """
    places = ((0, 1), (1, 0), (2, 3), (3, 2))
    part = Part(pieces=(Piece(load=4.0), Piece(load=1.0)), places=places)
    on_host = Option(label="host", everywhere=Piece(), parts=(part,))
    problem = Problem(
        ranks=4,
        capacity=(np.inf,),
        tables={"a": (on_host,), "b": (whole(4.0, 4),), "c": (whole(4.0, 4),), "d": (whole(2.0, 4),)},
    )
    best = best_cost(problem)
    assert best == 4.0
    bound, found = proven(problem, 5.0, 0.005)
    assert found == pytest.approx(best)
    assert bound == pytest.approx(best / 1.005, rel=1e-4)

"""All combinations of options: what they rule out does not exist, and what they find is the best within the gap."""

from __future__ import annotations

from math import inf
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings

from shardrec.planner.solve import Option, Part, Piece, Problem, SolveLimits, combine, solve
from shardrec.planner.solve.combine import Combinations, Combined, combined
from shardrec.planner.solve.encode import Encoded, encode
from shardrec.planner.solve.packing import Packing
from shardrec.planner.solve.problem import anywhere, host_places
from shardrec.planner.solve.ways import Chosen, Fluid, Ways, undominated
from tests.planner.problems import best_cost, check, random_problem
from tests.plans import randoms

GAP = 0.01


def placed(rng: Random, encoded: Encoded, ways: Ways) -> tuple[Packing, list[tuple[int, Chosen]]]:
    """Any options, any places; of each table its group, and its option with the hosts of its parts."""
    counts = np.zeros(len(encoded.options), dtype=np.int64)
    picked = [
        (group, rng.choice(encoded.group_options[group]))
        for group, size in enumerate(encoded.sizes.tolist())
        for _ in range(size)
    ]
    for _, option in picked:
        counts[option] += 1
    packing, tables = Packing(encoded, counts), []
    for group, option in picked:
        split: list[tuple[int, ...]] = []
        for block, count in encoded.option_blocks[option]:
            kind, shares = encoded.blocks[block], [0] * ways.hosts
            for _ in range(count):
                place = rng.randrange(len(kind.names))
                packing.put(block, place)
                shares[int(kind.places[place, 0]) // ways.ranks] += 1
            split.append(tuple(shares) if ways.on_hosts(block) else ())
        tables.append((group, Chosen(option, tuple(split))))
    return packing, tables


def searched(problem: Problem) -> Combined | None:
    """All the combinations, where no table is small; None if there is nothing to search."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(combine, "_SMALL", 0.0)
        tables = Combinations(encode(problem), None)
        return tables.search(GAP, 100_000, lambda: False) if tables.useful else None


@settings(max_examples=150, deadline=None)
@given(rng=randoms())
def test_what_exists_is_possible(rng: Random) -> None:
    """Some of a packing's tables as they are, the others fluid; for its cost and in whole numbers of ways."""
    encoded = encode(random_problem(rng))
    ways = Ways(encoded)
    packing, tables = placed(rng, encoded, ways)
    if not packing.fits() or packing.cost <= 0:
        return
    rng.shuffle(tables)
    known = rng.randint(0, len(tables))
    fluid = []
    for group, _ in tables[known:]:
        options = list(encoded.group_options[group])
        fluid.append(Fluid(base=ways.base[options].min(axis=0), sizes=undominated(ways.total[options])))
    assert ways.possible([chosen for _, chosen in tables[:known]], fluid, packing.cost, whole=rng.random() < 0.5)


@settings(max_examples=60, deadline=None)
@given(rng=randoms())
def test_no_plan_costs_less_than_the_bound(rng: Random) -> None:
    problem = random_problem(rng, most_tables=3)
    found, least = searched(problem), best_cost(problem)
    if found is None:
        assert least in (0.0, inf)
        return
    assert found.bound <= least * (1 + 1e-5) + 1e-9
    if found.packing is not None:
        assert found.packing.fits()
        assert least <= found.packing.cost * (1 + 1e-9)
        check(problem, found.packing.solution(0.0, timed_out=False))


def test_nearly_all_plans_are_within_the_gap_of_the_best() -> None:
    """Packing what stays possible is a search, and may fail."""
    tried = within = 0
    for seed in range(50):
        problem = random_problem(Random(seed), most_tables=3)
        found, least = searched(problem), best_cost(problem)
        if found is not None and least < inf:
            tried += 1
            within += found.packing is not None and found.packing.cost <= least * (1 + GAP) * (1 + 1e-6)
    assert tried > 25
    assert within >= 0.97 * tried


@settings(max_examples=40, deadline=None)
@given(rng=randoms())
def test_bounds_hold_with_small_tables_a_start_and_little_work(rng: Random) -> None:
    problem = random_problem(rng, most_tables=3)
    encoded = encode(problem)
    start, _ = placed(rng, encoded, Ways(encoded))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(combine, "_SMALL", 0.5)
        patch.setattr(combine, "_MOST_SMALL", 10.0)
        best = start if start.fits() and start.cost > 0 else None
        found = combined(encoded, best, GAP, rng.choice([0, 3, 30, 100_000]), lambda: False)
    assert found.bound <= best_cost(problem) * (1 + 1e-5) + 1e-9


def halves(hosts: int, per_host: int) -> Problem:
    """Two large tables that fit only if each is on one half of the ranks, and some that fill what is left.

    Each is either on all ranks, which takes too long for both, or on half of them, which leaves room for the other on
    the other half. Moved alone, neither fits.
    """
    world = hosts * per_host
    half = world // 2

    def large(load: float) -> tuple[Option, ...]:
        on_all = Option(label="all", everywhere=Piece(load=load, memory=(45.0,)))
        if hosts > 1:
            parts = (Part(pieces=(Piece(load=load, memory=(90.0,)),) * half, places=host_places(hosts, half)),)
        else:
            parts = (Part(pieces=(Piece(load=load, memory=(90.0,)),), places=anywhere(world), count=half),)
        return on_all, Option(label="half", everywhere=Piece(load=0.1), parts=parts)

    def small(memory: float) -> tuple[Option, ...]:
        shared = Piece(load=0.3, memory=(memory / world + 0.1,))
        return (
            Option(
                label="one",
                everywhere=Piece(load=0.05),
                parts=(Part(pieces=(Piece(load=0.5, memory=(memory,)),), places=anywhere(world)),),
            ),
            Option(label="all", everywhere=shared),
        )

    tables = {"a": large(2.0), "b": large(2.5), **{f"s{number}": small(4.0 + number) for number in range(3)}}
    return Problem(ranks=world, capacity=(97.0,), tables=tables)


@pytest.mark.parametrize(("hosts", "per_host"), [(1, 4), (2, 2)])
def test_two_tables_that_have_to_move_together(hosts: int, per_host: int) -> None:
    problem = halves(hosts, per_host)
    encoded = encode(problem)
    found = combined(encoded, None, GAP, 10_000, lambda: False)
    assert found.packing is not None
    least = best_cost(problem)
    assert least <= found.packing.cost <= least * (1 + GAP) * (1 + 1e-6)
    assert found.packing.cost <= found.bound * (1 + GAP) * (1 + 1e-6)
    for option in np.flatnonzero(found.packing.counts).tolist():
        assert encoded.groups[encoded.option_group[option]][0] not in "ab" or encoded.options[option].label == "half"
    solution = solve(problem, SolveLimits(gap=GAP, effort=4))
    assert solution is not None
    assert solution.gap <= GAP * (1 + 1e-6)
    check(problem, solution)


def test_more_parts_than_ranks() -> None:
    option = Option(
        label="three",
        everywhere=Piece(memory=(0.0,)),
        parts=(Part(pieces=(Piece(load=1.0, memory=(1.0,)),), places=anywhere(2), count=3),),
    )
    ways = Ways(encode(Problem(ranks=2, capacity=(2.0,), tables={"a": (option,)})))
    three = [Chosen(0, ((),))]
    for whole in (False, True):
        assert ways.possible(three, [], 2.0, whole=whole)
        assert not ways.possible(three, [], 1.4, whole=whole)
    assert ways.possible(three, [], 1.9) is False  # a way holds one piece, or two
    assert ways.possible([], [Fluid(base=np.zeros(2), sizes=ways.total)], 1.5)


@pytest.mark.parametrize("seed", range(4))
def test_work_that_ends_anywhere_proves_nothing_wrong(seed: int) -> None:
    """Without any plan to cut it short, and with small tables, so that some of the work is done in two passes."""
    problem = random_problem(Random(seed), most_tables=3)
    encoded, least = encode(problem), best_cost(problem)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(combine, "_SMALL", 0.0)
        patch.setattr(Combinations, "_packed", lambda *arguments: None)
        for most in range(0, 100, 3):
            tables = Combinations(encoded, None)
            if tables.useful:
                tables._large, tables._small = tables._large[:1], tables._large[1:]
                assert tables.search(GAP, most, lambda: False).bound <= least * (1 + 1e-5) + 1e-9


def test_what_does_not_fit_is_not_gone_through() -> None:
    problem = halves(1, 4)
    tight = Problem(ranks=4, capacity=(40.0,), tables=problem.tables)
    assert not Combinations(encode(tight), None).useful
    many = Problem(ranks=4, capacity=(inf,), tables={f"t{number}": problem.tables["a"] for number in range(40)})
    assert combined(encode(many), None, GAP, 1000, lambda: False).packing is None


def test_undominated_rows() -> None:
    sizes = np.array([[1.0, 5.0], [2.0, 3.0], [2.0, 4.0], [3.0, 3.0], [4.0, 1.0], [1.0, 5.0]])
    assert undominated(sizes).tolist() == [[1.0, 5.0], [2.0, 3.0], [4.0, 1.0]]

"""The solver: nothing beats its bound, its plans fit, small problems are solved as by trying everything."""

from __future__ import annotations

import warnings
from dataclasses import replace
from math import inf
from random import Random

import pytest
from hypothesis import given, settings

from shardrec.errors import ConfigError
from shardrec.planner.solve import Gang, Item, Option, Problem, SolveLimits, exact, solve, solver
from shardrec.planner.solve.relax import Interval
from tests.planner.problems import anywhere, best_cost, check, random_problem
from tests.plans import randoms

EXACT = SolveLimits(gap=0.0)


@pytest.mark.some(1, of="small problems")
@given(rng=randoms())
def test_small_problems_are_solved_as_by_trying_everything(rng: Random) -> None:
    problem = random_problem(rng, most_tables=3)
    solution, best = solve(problem, EXACT), best_cost(problem)
    if solution is None:
        assert best == inf
        return
    check(problem, solution)
    assert solution.bound <= best * (1 + 1e-6) + 1e-9, "the bound is not one"
    assert solution.cost == pytest.approx(best)
    assert not solution.timed_out


@pytest.mark.some(1, of="small problems")
@pytest.mark.parametrize("most_groups", [1000, 0], ids=["linear programs", "mean load"])
@settings(max_examples=10, deadline=None)
@given(rng=randoms())
def test_small_problems_without_the_exact_program(most_groups: int, rng: Random) -> None:
    problem = random_problem(rng, most_tables=3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exact, "_MAX_VARIABLES", 0)
        patch.setattr(solver, "_MANY_GROUPS", most_groups)
        solution = solve(problem, SolveLimits(gap=0.01, effort=4))
    best = best_cost(problem)
    if solution is not None:
        check(problem, solution)
        assert solution.bound <= best * (1 + 1e-6) + 1e-9, "the bound is not one"
        assert solution.cost >= best * (1 - 1e-9)


def test_memory_alone_forbids_the_options_without_load() -> None:
    """Two tables whose options without any load fit one at a time: the bound is 0 and the least cost is not."""
    spots = anywhere(3)
    cheap = Option(
        label="cheap",
        everywhere=Item(memory=(1.0,)),
        gangs=(Gang(items=(Item(memory=(4.0,)),), places=spots, count=2),),
    )
    items = (Item(memory=(3.0,)), Item(load=1.0, memory=(6.0,)), Item(load=5.0))
    fixed = Option(label="fixed", everywhere=Item(load=0.5), gangs=(Gang(items=items, places=((0, 1, 2),)),))
    problem = Problem(ranks=3, capacity=(8.0,), tables={"a": (fixed, cheap), "b": (fixed, cheap)})
    solution = solve(problem, EXACT)
    assert solution is not None
    check(problem, solution)
    assert solution.cost == pytest.approx(5.5) == best_cost(problem)


@settings(max_examples=5, deadline=None)
@given(rng=randoms())
def test_larger_problems(rng: Random) -> None:
    problem = random_problem(rng, most_tables=30, ranks=rng.choice([2, 5, 8]))
    solution = solve(problem, SolveLimits(gap=0.02, effort=10))
    if solution is not None:
        check(problem, solution)
        assert solve(problem, SolveLimits(gap=0.02, effort=10)) == solution, "the same every time"


def items(ranks: int, *loads: float, capacity: float = inf, memory: float = 0.0) -> Problem:
    """One table of one free item for each load."""
    spots, nothing = anywhere(ranks), Item()
    tables = {
        f"t{number}": (
            Option(
                label="whole",
                everywhere=nothing,
                gangs=(Gang(items=(Item(load=load, memory=(memory,)),), places=spots),),
            ),
        )
        for number, load in enumerate(loads)
    }
    return Problem(ranks=ranks, capacity=(capacity,), tables=tables)


def test_the_bound_sees_more_than_the_average() -> None:
    """Three items of 6 on two ranks: 9 on average, 12 in truth."""
    solution = solve(items(2, 6, 6, 6), EXACT)
    assert solution is not None
    assert (solution.bound, solution.cost) == (pytest.approx(12, rel=1e-4), 12)


def test_longest_first_is_improved_on() -> None:
    """Longest first puts 3, 3, 2, 2, 2 on two ranks as 7 and 5."""
    solution = solve(items(2, 3, 3, 2, 2, 2), EXACT)
    assert solution is not None
    assert solution.cost == 6
    assert solution.gap <= 1e-4


def test_memory_may_force_what_time_would_not() -> None:
    solution = solve(items(2, 9, 1, 1, 1, capacity=2, memory=1), EXACT)
    assert solution is not None
    assert sorted(solution.loads) == [2, 10]


def test_what_does_not_fit_has_no_solution() -> None:
    assert solve(items(2, 1, 1, 1, capacity=1, memory=1)) is None
    assert solve(items(2, 1, 1, 1, capacity=1.5, memory=1)) is None, "on average it would"


def test_several_tiers() -> None:
    nothing = Item(memory=(0.0, 0.0))
    spots = anywhere(2)

    def held(load: float, *memory: float) -> Option:
        gang = Gang(items=(Item(load=load, memory=memory),), places=spots)
        return Option(label="", everywhere=nothing, gangs=(gang,))

    options = (held(1.0, 4.0, 0.0), held(5.0, 0.0, 4.0))
    problem = Problem(ranks=2, capacity=(4.0, 8.0), tables={"a": options, "b": options, "c": options})
    solution = solve(problem, EXACT)
    assert solution is not None
    assert sorted(solution.choice.values()) == [0, 0, 1]
    assert solution.cost == 6


def test_no_tables() -> None:
    solution = solve(Problem(ranks=3, capacity=(1.0,), tables={}))
    assert solution is not None
    assert solution.cost == 0


def test_a_time_limit_gives_the_best_so_far() -> None:
    rng = Random(0)
    problem = items(7, *(rng.random() for _ in range(60)))
    solution = solve(problem, SolveLimits(gap=0.0, seconds=1e-3))
    assert solution is not None
    check(problem, solution)
    assert solution.timed_out
    assert not solution.exhausted


def test_what_ended_the_search() -> None:
    rng = Random(0)
    problem = items(7, *(rng.random() for _ in range(60)))
    hasty = solve(problem, SolveLimits(gap=0.0, effort=1))
    assert hasty is not None
    assert hasty.exhausted
    assert not hasty.timed_out
    closed = solve(problem, SolveLimits(gap=0.5))
    assert closed is not None
    assert not closed.exhausted
    assert not closed.timed_out
    option = Option(label="t", everywhere=Item(memory=(2e9,)), gangs=())
    too_large = replace(problem, capacity=(1e9,), tables={"t": (option,)})
    assert solve(too_large, SolveLimits(seconds=1e-3)) is None, "a time limit finds no plan where there is none"


@pytest.mark.parametrize("wrong", [{"gap": -1.0}, {"effort": 0}, {"seconds": 0.0}])
def test_limits(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="limits need a gap"):
        replace(SolveLimits(), **wrong)


def test_a_bound_above_the_cost_is_a_fault() -> None:
    """It would end the search early, unseen in a report that has the lower of the two."""

    def too_high(*args: object, **options: object) -> list[Interval]:
        return [Interval(8.0, 1.0, 7.0, 1.0)]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(solver.Relaxation, "intervals", too_high)
        with pytest.warns(RuntimeWarning, match=r"the bound on plans' costs is 8.0, and a plan costs [67]"):
            solve(items(2, 3, 3, 2, 2, 2), EXACT)


def test_items_without_bytes_need_no_scale() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        solution = solve(items(2, 1, 2, capacity=1e12), EXACT)
    assert solution is not None
    assert solution.cost == 2

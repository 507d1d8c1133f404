"""Sets of parts on hosts: what fits, the bounds of rooms, whole numbers, and the search by them."""

from __future__ import annotations

from itertools import combinations_with_replacement, product
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings

from shardrec.planner.solve import Option, Part, Piece, Problem, SolveLimits, solve
from shardrec.planner.solve import hosts as programme
from shardrec.planner.solve.clock import Clock
from shardrec.planner.solve.encode import Encoded, Floats, encode
from shardrec.planner.solve.hosts import GRID, Hosts
from shardrec.planner.solve.hostsearch import HostSearch
from shardrec.planner.solve.inside import Inside
from shardrec.planner.solve.knapsack import knapsack
from shardrec.planner.solve.packing import Packing, demand
from shardrec.planner.solve.problem import anywhere, host_places
from shardrec.planner.solve.relax import Relaxation
from shardrec.planner.solve.sets import best_sets
from tests.planner.problems import check
from tests.plans import randoms

HOSTS, LOCAL = 4, 2


def random_problem(rng: Random, tables: int, capacity: float = np.inf) -> Problem:
    """Tables that go on one rank, on a rank of a host and a little on the other, on whole hosts, or on all ranks."""
    hosts = host_places(HOSTS, LOCAL)
    turned = tuple(place for host in hosts for place in (host, host[::-1]))
    made: dict[str, tuple[Option, ...]] = {}
    for number in range(tables):
        load, memory = rng.choice([2.0, 3.0, 3.1, 5.0]), (rng.choice([0.0, 1.0]),)
        pieces = (Piece(load=load, memory=memory), Piece(load=rng.choice([0.5, 1.0])))
        options = [Option(label="all", everywhere=Piece(load=rng.choice([1.0, 2.0, 2.5]), memory=memory))]
        options.append(Option(label="one", everywhere=Piece(load=0.1), parts=(_part(pieces[:1], anywhere(8)),)))
        options.append(Option(label="part", everywhere=Piece(load=0.2), parts=(_part(pieces, turned),)))
        both = _part((Piece(load=load / 2),) * 2, hosts, rng.choice([1, 2]))
        options.append(Option(label="both", everywhere=Piece(load=0.3), parts=(both,)))
        made[f"t{number}"] = tuple(rng.sample(options, rng.randint(2, 4)))
    return Problem(ranks=HOSTS * LOCAL, capacity=(capacity,), tables=made)


def _part(pieces: tuple[Piece, ...], places: tuple[tuple[int, ...], ...], count: int = 1) -> Part:
    return Part(pieces=pieces, places=places, count=count)


def random_packing(rng: Random, encoded: Encoded) -> Packing:
    counts = np.zeros(len(encoded.options), dtype=np.int64)
    for size, span in zip(encoded.sizes.tolist(), encoded.group_options, strict=True):
        for _ in range(size):
            counts[rng.choice(span)] += 1
    packing = Packing(encoded, counts)
    for block, count in demand(encoded, counts).items():
        for _ in range(count):
            if rng.random() < 0.5 or not packing.place_best(block):
                packing.put(block, rng.randrange(len(encoded.blocks[block].names)))
    return packing


def least_base(encoded: Encoded, room: float) -> float:
    """E at a room, by trying all the options, and all the places of their parts."""
    best = np.inf
    per_group = [
        list(combinations_with_replacement(span, size))
        for size, span in zip(encoded.sizes.tolist(), encoded.group_options, strict=True)
    ]
    for chosen in product(*per_group):
        counts = np.bincount([option for group in chosen for option in group], minlength=len(encoded.options))
        packing = Packing(encoded, counts)
        parts = [block for block, count in demand(encoded, counts).items() for _ in range(count)]
        if packing.base < best and _fit(packing, parts, packing.base + room):
            best = packing.base
    return best


def _fit(packing: Packing, parts: list[int], top: float) -> bool:
    if not parts:
        return True
    for place in range(len(packing.encoded.blocks[parts[0]].names)):
        packing.put(parts[0], place)
        fits = packing.cost <= top + 1e-9 and _fit(packing, parts[1:], top)
        packing.put(parts[0], place, -1)
        if fits:
            return True
    return False


def made(encoded: Encoded, most: float, small: float = 0.0) -> Hosts:
    return Hosts(encoded, most, Relaxation(encoded).limits(), small)


@settings(max_examples=40, deadline=None)
@given(rng=randoms())
def test_no_packing_has_less_on_every_rank_than_the_bound_of_its_room(rng: Random) -> None:
    encoded = encode(random_problem(rng, 5))
    packings = [random_packing(rng, encoded) for _ in range(6)]
    hosts = made(encoded, 1.01 * max(packing.cost for packing in packings), rng.choice([0.0, 0.2]))
    for packing in packings:
        room = int((float(packing.loads.max()) - packing.base) / hosts.step)
        bound = hosts.price(min(room + rng.randint(0, 20), GRID), np.inf, lambda: False)
        assert bound <= packing.base + 1e-9 * packing.cost
        # Also in the case that holds for it.
        load = float(rng.choice(encoded.base_load.tolist()))
        number = float(packing.counts[encoded.base_load >= load].sum())
        hosts.columns.restrict({load: rng.choice([(number, number), (-np.inf, number), (number, np.inf)])})
        assert hosts.price(min(room, GRID), np.inf, lambda: False) <= packing.base + 1e-9 * packing.cost
        hosts.columns.restrict({})


@settings(max_examples=20, deadline=None)
@given(rng=randoms())
def test_options_of_a_plan_are_no_further_above_the_least_prices_than_it_is_above_the_bound(rng: Random) -> None:
    encoded = encode(random_problem(rng, 5))
    packings = [random_packing(rng, encoded) for _ in range(6)]
    hosts = made(encoded, 1.01 * max(packing.cost for packing in packings))
    for packing in packings:
        room = min(int((float(packing.loads.max()) - packing.base) / hosts.step) + rng.randint(0, 20), GRID)
        bound, extra = hosts.price(room, np.inf, lambda: False), hosts.extra(room)
        assert np.all(np.minimum.reduceat(extra, [span.start for span in encoded.group_options]) == 0)
        used = packing.counts > 0
        assert packing.counts[used] @ extra[used] <= packing.base - bound + 1e-3 * hosts.most


@settings(max_examples=12, deadline=None)
@given(rng=randoms())
def test_bounds_and_whole_numbers_are_near_what_trying_everything_finds(rng: Random) -> None:
    encoded = encode(random_problem(rng, 3))
    hosts = made(encoded, 12.0)
    load = rng.choice([2.0, 3.0, 3.5, 4.1])
    room = int(load / hosts.step)
    best = least_base(encoded, load)
    assert hosts.price(room, np.inf, lambda: False) <= best + 1e-9
    packing = hosts.plan(room, np.inf, nodes=100, seconds=np.inf)
    assert (packing is None) <= np.isinf(best)
    if packing is not None:
        # A room of whole steps: the rounding of a few pieces.
        assert packing.cost <= packing.base + load + 10 * hosts.step
        assert packing.base <= best + 2e-3 * hosts.most
        counts = np.bincount(encoded.option_group, packing.counts, len(encoded.groups))
        assert counts.tolist() == encoded.sizes.tolist()


@settings(max_examples=12, deadline=None)
@given(rng=randoms())
def test_limits_of_columns_cut_off_no_plan(rng: Random) -> None:
    encoded = encode(random_problem(rng, 6))
    room = int(rng.choice([3.0, 4.1, 6.0]) / 12.0 * GRID)
    found = []
    for limited in (True, False):
        hosts = made(encoded, 12.0)
        hosts.price(room, np.inf, lambda: False)
        if not limited:
            hosts.columns.most_of_each = lambda most=hosts.columns.most_of_each: 1e3 * most()  # type: ignore[method-assign]
        packing = hosts.plan(room, np.inf, nodes=1000, seconds=np.inf)
        found.append(np.inf if packing is None else packing.base)
    # As near as whole numbers are looked for.
    assert found[0] == pytest.approx(found[1], abs=1e-3 * 12.0)


@settings(max_examples=25, deadline=None)
@given(rng=randoms())
def test_the_best_set_is_that_of_trying_all(rng: Random) -> None:
    encoded = encode(random_problem(rng, 4))
    inside = Inside(encoded, 0.1, 100, 0)
    room = rng.choice([31, 45, 60])
    price: Floats = np.array([rng.choice([0.0, 0.5, 1.0, 1.5]) for _ in inside.kinds])
    free, _ = knapsack(np.array([20, 31]), np.array([rng.choice([0.0, 0.3]), rng.choice([0.0, 0.6])]), 100)
    best = 0.0
    kinds = [number for number, ways in enumerate(inside.kinds) if ways.max() <= room]
    for count in range(room // 5):
        sets = list(combinations_with_replacement(kinds, count))
        fitting = 0
        for chosen in sets:
            for ways in product(*(inside.kinds[kind] for kind in chosen)):
                loads = np.sum(ways, axis=0) if ways else np.zeros(LOCAL, dtype=np.int64)
                if loads.max() <= room:
                    fitting += 1
                    best = max(best, float(price[list(chosen)].sum()) + float(free[room - loads].sum()))
        if not fitting or count == 3:
            break
    few = best_sets(inside, room, price, free, least=0.0, beam=3)
    assert few.most >= best - 1e-9
    if count < 3:
        assert best_sets(inside, room, price, free, least=best + 1e-6).most == pytest.approx(best + 1e-6)
        every = best_sets(inside, room, price, free, least=0.0, beam=10_000)
        assert every.values[0] == pytest.approx(best)
        for value, chosen, loads in zip(every.values, every.sets, every.loads, strict=True):
            own = price[chosen[chosen >= 0]].sum() + free[room - loads].sum()
            assert value == pytest.approx(own)


def packed(encoded: Encoded) -> Packing:
    counts = np.zeros(len(encoded.options), dtype=np.int64)
    for size, span in zip(encoded.sizes.tolist(), encoded.group_options, strict=True):
        counts[span[0]] = size
    packing = Packing(encoded, counts)
    assert packing.fill(demand(encoded, counts).items())
    return packing


@settings(max_examples=10, deadline=None)
@given(rng=randoms())
def test_the_search_proves_no_more_than_there_is(rng: Random) -> None:
    encoded = encode(random_problem(rng, 10))
    start = packed(encoded)
    relaxation = Relaxation(encoded)
    search = HostSearch(encoded, start, relaxation.intervals(0.01), relaxation.limits(), 0.0, relaxation.value, Clock())
    found = search.run(10, lambda: False, lambda: np.inf)
    best = min([start, *found], key=lambda packing: packing.cost)
    for packing in [*found, *(random_packing(rng, encoded) for _ in range(3))]:
        assert search.bound <= packing.cost * (1 + 1e-9)
    assert best.cost <= start.cost


def test_a_host_holds_what_fits_its_ranks() -> None:
    """Three parts of 3 on one rank and 1 on the other come to 6 on average, and one rank has 7."""
    places = tuple(place for host in host_places(4, 2) for place in (host, host[::-1]))
    part = Option(label="", everywhere=Piece(), parts=(_part((Piece(load=3.0), Piece(load=1.0)), places),))
    everywhere = Option(label="all", everywhere=Piece(load=9.0))
    problem = Problem(ranks=8, capacity=(np.inf,), tables={f"t{number}": (part, everywhere) for number in range(9)})
    hosts = made(encode(problem), 20.0)
    assert hosts.price(int(6.9 / hosts.step), np.inf, lambda: False) == pytest.approx(9.0, rel=1e-2)
    assert hosts.price(int(7.1 / hosts.step), np.inf, lambda: False) == pytest.approx(0.0, abs=1e-6)


def test_cases_close_what_fractions_leave_open() -> None:
    """Nine tables, room for eight and a half: one of them is on all ranks, not half of one."""
    places = tuple(place for host in host_places(4, 2) for place in (host, host[::-1]))
    part = Option(label="", everywhere=Piece(), parts=(_part((Piece(load=3.0), Piece(load=1.0)), places),))
    tables: dict[str, tuple[Option, ...]] = {
        f"t{number}": (part, Option(label="all", everywhere=Piece(load=5.0 + number / 8))) for number in range(9)
    }
    encoded = encode(Problem(ranks=8, capacity=(np.inf,), tables=tables))
    found = solve(Problem(ranks=8, capacity=(np.inf,), tables=tables), SolveLimits(gap=0.005, effort=10))
    assert found is not None
    assert found.gap <= 0.005
    assert HostSearch.applies(encoded, packed(encoded))


def test_solutions_by_hosts_are_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = Random(3)
    problem = random_problem(rng, 14, capacity=8.0)
    monkeypatch.setattr(programme, "_BEAM", 5)
    found = solve(problem, SolveLimits(gap=0.0, effort=10))
    assert found is not None
    check(problem, found)

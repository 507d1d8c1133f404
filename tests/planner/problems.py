"""Small random problems for the solver, and what is best for them by trying everything."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations_with_replacement, product
from math import inf
from random import Random

from shardrec.planner.solve import Gang, Item, Option, Problem, Solution
from shardrec.planner.solve.problem import Place

__all__ = ["anywhere", "best_cost", "check", "host_places", "random_problem"]


def anywhere(ranks: int) -> tuple[Place, ...]:
    """The places of a single item that may be on any rank."""
    return tuple((rank,) for rank in range(ranks))


def host_places(hosts: int, ranks_per_host: int) -> tuple[Place, ...]:
    """The places of a gang with one item for each rank of a host."""
    return tuple(tuple(range(host * ranks_per_host, (host + 1) * ranks_per_host)) for host in range(hosts))


def random_problem(rng: Random, *, most_tables: int = 4, ranks: int | None = None) -> Problem:
    """Tables with single items, items by host, on neighbouring ranks or at a fixed place, and loads on every rank."""
    hosts, per_host = rng.choice([(1, 2), (1, 3), (2, 2)])
    if ranks is not None:
        hosts, per_host = 1, ranks
    world = hosts * per_host
    free, by_host = anywhere(world), host_places(hosts, per_host)
    fixed = (tuple(range(world)),)
    pairs = tuple(
        (host + rank, host + (rank + 1) % per_host) for host in range(0, world, per_host) for rank in range(per_host)
    )
    few = free[: rng.randint(1, world)]

    def item() -> Item:
        return Item(load=rng.choice([0.0, 1.0, 2.0, 3.5, 5.0]), memory=(float(rng.randint(0, 6)),))

    def option() -> Option:
        gangs: list[Gang] = []
        kind = rng.randrange(6)
        if kind == 0:
            gangs = [Gang(items=(item(),), places=rng.choice([free, few]), count=rng.randint(1, 2))]
        elif kind == 1:
            gangs = [Gang(items=tuple(item() for _ in range(per_host)), places=by_host)]
        elif kind == 2:
            gangs = [Gang(items=tuple(item() for _ in range(world)), places=fixed)]
        elif kind == 3:
            gangs = [Gang(items=(item(),), places=free), Gang(items=(item(),), places=free)]
        elif kind == 4:
            gangs = [Gang(items=(item(), item()), places=pairs, count=rng.randint(1, 2))]
        everywhere = Item(load=rng.choice([0.0, 0.5, 1.0]), memory=(float(rng.randint(0, 1)),))
        return Option(label=str(kind), everywhere=everywhere, gangs=tuple(gangs))

    tables: dict[str, tuple[Option, ...]] = {}
    for number in range(rng.randint(1, most_tables)):
        if tables and rng.random() < 0.4:
            tables[f"t{number}"] = rng.choice(list(tables.values()))
        else:
            tables[f"t{number}"] = tuple(option() for _ in range(rng.randint(1, 3)))
    return Problem(ranks=world, capacity=(rng.choice([inf, 8.0, 12.0, 20.0]),), tables=tables)


def _placements(option: Option) -> Iterator[tuple[Place, ...]]:
    each = [combinations_with_replacement(gang.places, gang.count) for gang in option.gangs]
    for chosen in product(*each):
        yield tuple(place for places in chosen for place in places)


def _loads(problem: Problem, choice: dict[str, int], places: dict[str, tuple[Place, ...]]) -> list[list[float]]:
    """Per rank: load, then bytes of each tier."""
    found = [[0.0] * (1 + len(problem.capacity)) for _ in range(problem.ranks)]

    def put(rank: int, item: Item) -> None:
        for index, value in enumerate((item.load, *item.memory)):
            found[rank][index] += value

    for name, number in choice.items():
        option = problem.tables[name][number]
        for rank in range(problem.ranks):
            put(rank, option.everywhere)
        spots = iter(places[name])
        for gang in option.gangs:
            for _ in range(gang.count):
                place = next(spots)
                assert place in gang.places
                for item, rank in zip(gang.items, place, strict=True):
                    put(rank, item)
        assert next(spots, None) is None
    return found


def best_cost(problem: Problem) -> float:
    """The least cost by trying everything; inf if nothing fits."""
    names = list(problem.tables)
    ways = [
        [(number, places) for number, option in enumerate(problem.tables[name]) for places in _placements(option)]
        for name in names
    ]
    best = inf
    for chosen in product(*ways):
        choice = {name: number for name, (number, _) in zip(names, chosen, strict=True)}
        places = {name: spots for name, (_, spots) in zip(names, chosen, strict=True)}
        ranks = _loads(problem, choice, places)
        if all(size <= most for rank in ranks for size, most in zip(rank[1:], problem.capacity, strict=True)):
            best = min(best, max(rank[0] for rank in ranks))
    return best


def check(problem: Problem, solution: Solution) -> None:
    """The solution places every gang of every table, fits, and costs what it says."""
    assert solution.choice.keys() == solution.places.keys() == problem.tables.keys()
    ranks = _loads(problem, dict(solution.choice), dict(solution.places))
    for rank, values in enumerate(ranks):
        assert abs(values[0] - solution.loads[rank]) <= 1e-9 * max(1.0, values[0])
        for size, told, most in zip(values[1:], solution.memory[rank], problem.capacity, strict=True):
            assert abs(size - told) <= 1e-9 * max(1.0, size)
            assert size <= most * (1 + 1e-9)
    assert solution.bound <= solution.cost

"""Where memory binds: plans are found, and near what is best."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from hypothesis import given, settings

from shardrec.planner.solve import Gang, Item, Option, Problem, SolveLimits, solve
from shardrec.planner.solve.encode import encode
from shardrec.planner.solve.packing import Packing, demand
from shardrec.planner.solve.rebuild import Rebuilder, by_memory
from tests.planner.problems import anywhere, check, host_places
from tests.plans import randoms

FULL = 100.0
KINDS = ((48.0, 22.0), (19.0, 1.0), (4.0, 21.0), (3.9, 43.0), (2.0, 0.6), (1.9, 0.1))
"""Time and memory of items: much of the one, much of the other, little of both."""


def planted(rng: Random, ranks: int, hosts: int = 0) -> Problem:
    """Tables that nearly fill all ranks, in time and memory, if put where they were made.

    Args:
        rng: draws them.
        ranks: how many.
        hosts: tables with a gang on each rank of a host.
    """
    spots = anywhere(ranks)
    tables: dict[str, tuple[Option, ...]] = {}
    for rank in range(ranks):
        # Ranks of hosts of four have less room where a table is on all of them.
        left = np.array([FULL, FULL]) - np.array([5.0, 8.0]) * (rank // 4 < hosts)
        items = []
        while (fit := [kind for kind in KINDS if (left >= kind).all()]) and rng.random() < 0.96:
            items.append(rng.choice(fit))
            left -= items[-1]
        # Two more take what is left, to the next half, that there are not too many kinds.
        items += [tuple(np.floor(left) / 2)] * 2
        for load, memory in items:
            options = [_option("one", load, memory, spots, 1)]
            options.append(_option("two", load * 0.53, memory * 0.502, spots, 2))
            options.append(_option("four", load * 0.3, memory * 0.252, spots, 4))
            tables[f"t{len(tables)}"] = tuple(options)
    for number in range(hosts):
        items = (Item(load=5.0, memory=(8.0,)),) * 4
        gang = Gang(items=items, places=host_places(ranks // 4, 4))
        host = Option(label="host", everywhere=Item(), gangs=(gang,))
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
            options.append(Option(label="all", everywhere=Item(load=load / (ranks + 1), memory=(memory,))))
            tables[f"t{len(tables)}"] = tuple(options)
            used += memory
    return Problem(ranks=ranks, capacity=(1.02 * used / ranks,), tables=tables)


def _option(label: str, load: float, memory: float, spots: tuple[tuple[int, ...], ...], count: int) -> Option:
    gang = Gang(items=(Item(load=load, memory=(memory,)),), places=spots, count=count)
    return Option(label=label, everywhere=Item(load=1e-3 * count, memory=(1e-5 * count,)), gangs=(gang,))


@settings(max_examples=4, deadline=None)
@given(rng=randoms())
def test_repair_brings_every_rank_within_its_memory(rng: Random) -> None:
    """From anywhere: each table in four parts, on ranks at random."""
    encoded = encode(planted(rng, 8))
    memory = by_memory(encoded)
    counts = np.zeros(len(encoded.base), dtype=np.int64)
    counts[[span.stop - 1 for span in encoded.group_options]] = encoded.sizes
    start = Packing(memory, counts)
    for kind, count in demand(encoded, counts).items():
        for _ in range(count):
            start.put(kind, rng.randrange(encoded.ranks))
    found = start if start.cost <= 1 else Rebuilder(memory).run([start], 80000, lambda: False, floor=1.0)[0]
    assert found is not None
    packing = Packing.fitting(encoded, found.counts, found.gangs)
    assert packing is not None
    np.testing.assert_allclose(found.load[:, 0] * encoded.capacity[0], packing.load[:, 1])


@settings(max_examples=2, deadline=None)
@given(rng=randoms())
def test_first_packings_fit_and_hold_each_table(rng: Random) -> None:
    """First plans keep to the memory, hold each table, and are the same every time."""
    encoded = encode(planted(rng, 8, hosts=rng.randint(0, 2)))
    found = [*Rebuilder(encoded).multifit(FULL, lambda: False)]
    again = [*Rebuilder(encoded).multifit(FULL, lambda: False)]
    assert [packing.cost for packing in found] == [packing.cost for packing in again]
    for packing in found:
        assert packing.fits()
        assert [packing.counts[span.start : span.stop].sum() for span in encoded.group_options] == [*encoded.sizes]
        assert {kind: at.sum() for kind, at in packing.at.items()} == demand(encoded, packing.counts)


def test_tables_are_cut_to_fill_what_others_leave() -> None:
    """Fourteen tables on four ranks with memory for three and a half: two of them have to be cut."""
    spots, unit = anywhere(4), 100.0
    options = tuple(_option(label, 1.0, unit / count, spots, count) for label, count in (("one", 1), ("two", 2)))
    tables = {f"t{number}": options for number in range(14)}
    encoded = encode(Problem(ranks=4, capacity=(3.5 * unit + 0.1,), tables=tables))
    found = [*Rebuilder(encoded).multifit(0.0, lambda: False)]
    assert found and all(packing.fits() for packing in found)
    assert found[0].counts.tolist() == [12, 2]


def test_what_greedy_packing_misses() -> None:
    """Two ranks with memory for 10: 6 + 4 and 5 + 5 fit; the largest first ends with 6, 5 and 5, 4."""
    spots = anywhere(2)
    tables = {f"t{n}": (_option("one", 1.0, m, spots, 1),) for n, m in enumerate((6.0, 5.0, 5.0, 4.0))}
    encoded = encode(Problem(ranks=2, capacity=(10.001,), tables=tables))
    memory = by_memory(encoded)
    start = Packing(memory, encoded.sizes)
    by_size = sorted(demand(encoded, encoded.sizes), key=lambda kind: -encoded.kinds[kind].size[0, 1])
    for block, rank in zip((by_size[0], by_size[1], by_size[1], by_size[2]), (0, 0, 1, 1), strict=True):
        start.put(block, rank)
    assert start.cost > 1
    (found,) = Rebuilder(memory).run([start], 20000, lambda: False, floor=1.0)
    assert found is not None and Packing.fitting(encoded, found.counts, found.gangs) is not None


@pytest.mark.some(1, of="crowded ranks")
@settings(max_examples=2, deadline=None)
@given(rng=randoms())
def test_crowded_ranks(rng: Random) -> None:
    problem = crowded(rng, 4)
    solution = solve(problem, SolveLimits(gap=0.02, effort=10))
    assert solution is not None
    check(problem, solution)
    assert solution.gap <= 0.02


@pytest.mark.some(1, of="crowded ranks")
def test_what_was_planted_is_found() -> None:
    problem = planted(Random(1), 16, hosts=1)
    solution = solve(problem, SolveLimits(gap=0.02, effort=10))
    assert solution is not None
    check(problem, solution)
    assert solution.cost <= 1.03 * FULL

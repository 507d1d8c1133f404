"""A programme with a pool of columns, against the whole of it."""

from __future__ import annotations

from random import Random
from unittest.mock import patch

import numpy as np
from hypothesis import given, settings
from scipy.optimize import linprog

from shardrec.planner.solve import master as module
from shardrec.planner.solve.encode import Floats
from shardrec.planner.solve.master import Master
from tests.plans import randoms


@settings(max_examples=40, deadline=None)
@given(rng=randoms())
def test_programmes_with_what_pays_of_a_pool_have_the_value_of_the_whole(rng: Random) -> None:
    master, rows = Master(), rng.randint(1, 4)
    for _ in range(rows):
        master.row(float(rng.randint(1, 5)), np.inf)
    # One that is dear and can do everything, so that there is a solution.
    costs, needs, entries = [50.0], [0], [dict.fromkeys(range(rows), 1.0)]
    master.column(costs[0], entries[0], always=True)
    prices: Floats | None = None
    for _ in range(rng.randint(1, 6)):
        for _ in range(rng.randint(0, 25)):
            costs.append(rng.random())
            needs.append(rng.randint(0, 9))
            entries.append({row: float(rng.randint(1, 3)) for row in range(rows) if rng.random() < 0.6})
            assert master.column(costs[-1], entries[-1], needs[-1]) == len(costs) - 1
        if rng.random() < 0.5:
            # A limit that comes later, of columns that are there.
            some = {column: 1.0 for column in range(1, len(costs)) if rng.random() < 0.3}
            row = master.row(-np.inf, float(rng.randint(1, 4)), some)
            for column, value in some.items():
                entries[column][row] = value
        room, limit = rng.randint(0, 9), float(rng.randint(1, 5))
        master.limit(0, limit, np.inf)
        known = None if prices is None else np.append(prices, np.zeros(master.rows - len(prices)))
        master.begin([room], {"room": float(room)}, known)
        prices, value = solved(master, costs, needs, entries, room)
        np.testing.assert_allclose(value, whole(master, costs, needs, entries, room), rtol=1e-6, atol=1e-6)
        used = master.values()
        assert len(used) == len(costs)
        np.testing.assert_allclose(used @ np.array(costs), value, rtol=1e-6, atol=1e-6)
        assert not used[np.array(needs) > room].any()
        if rng.random() < 0.7:
            master.keep()


def test_a_run_that_goes_on_too_long_begins_anew() -> None:
    master = Master()
    rows = [master.row(float(row), np.inf) for row in range(1, 20)]
    for row in rows:
        master.column(1.0 + row, {row: 1.0, (row + 1) % len(rows): 0.5}, always=True)
    value = master.run()[1]
    master.begin([0], {})
    with patch.object(module, "_ITERATIONS", 0):
        assert master.run()[1] == value
    assert master.solver.getOptionValue("simplex_iteration_limit")[1] == module._ANY


def solved(
    master: Master, costs: list[float], needs: list[int], entries: list[dict[int, float]], room: int
) -> tuple[Floats, float]:
    """Solve it, and put in what pays at its prices, until nothing does."""
    while True:
        prices, value = master.run()
        worth = [sum(prices[row] * entry for row, entry in each.items()) for each in entries]
        pays = [at for at, cost in enumerate(costs) if needs[at] <= room and worth[at] > cost + 1e-9]
        if not any([master.enter(column) for column in pays]):
            return prices, value


def whole(master: Master, costs: list[float], needs: list[int], entries: list[dict[int, float]], room: int) -> float:
    matrix = np.zeros((master.rows, len(costs)))
    for column, each in enumerate(entries):
        for row, value in each.items():
            matrix[row, column] = value
    lower, upper = np.array(master.lower), np.array(master.upper)
    least, most = np.isfinite(lower), np.isfinite(upper)
    found = linprog(
        costs,
        A_ub=np.concatenate([-matrix[least], matrix[most]]),
        b_ub=np.concatenate([-lower[least], upper[most]]),
        bounds=[(0, None if need <= room else 0) for need in needs],
    )
    return float(found.fun)

"""The best multiset of pieces for every size of room, by dynamic programming.

Sizes are in steps of 1/G of the largest room. The value function V of a knapsack in which pieces may be used any number
of times satisfies V(a) + V(b) <= V(a + b): what fits a and what fits b together fit a + b. So V / V(1) is a dual
feasible function (:mod:`relax`), of the sizes that were priced and of all others. Gilmore and Gomory, "A linear
programming approach to the cutting-stock problem" (1961).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from shardrec.planner.solve.encode import Floats, Ints

__all__ = ["GRID", "knapsack", "knapsacks"]

GRID = 1500
"""G."""


def knapsack(weights: Ints, values: Floats) -> tuple[Floats, Callable[[int], Ints]]:
    """The best multisets of pieces within each size.

    Args:
        weights: (K,) steps of each kind, positive.
        values: (K,).

    Returns:
        (G + 1,) the most value within each size, and a function that gives the (K,) numbers of pieces that have it.
    """
    best, pieces = knapsacks(weights, values, [len(weights)])
    return best[0], lambda size: pieces(size, 0)


def knapsacks(weights: Ints, values: Floats, ends: Sequence[int]) -> tuple[Floats, Callable[[int, int], Ints]]:
    """The best multisets of the first so many kinds, for several numbers of kinds.

    Args:
        weights: (K,) steps of each kind, positive.
        values: (K,).
        ends: (n,) numbers of kinds, ascending.

    Returns:
        (n, G + 1) the most value within each size, and a function that gives for a size and an index of ``ends`` the
        (K,) numbers of pieces that have it.
    """
    best, found = np.zeros(GRID + 1), np.zeros((len(ends), GRID + 1))
    steps: list[tuple[int, int, int, NDArray[np.bool_]]] = []
    begin = 0
    for number, end in enumerate(ends):
        for kind in range(begin, end):
            weight, times = int(weights[kind]), 1
            # Once, twice, four times ...: any number of times.
            while values[kind] > 1e-12 and times * weight <= GRID:
                shift = times * weight
                other = best[:-shift] + times * values[kind]
                better = other > best[shift:] + 1e-12
                best[shift:] = np.where(better, other, best[shift:])
                steps.append((kind, times, shift, better))
                times *= 2
        found[number] = best
        begin = end

    def pieces(size: int, number: int) -> Ints:
        counts, place = np.zeros(len(weights), dtype=np.int64), size
        for kind, times, shift, better in reversed(steps):
            if kind < ends[number] and place >= shift and better[place - shift]:
                counts[kind] += times
                place -= shift
        return counts

    return found, pieces

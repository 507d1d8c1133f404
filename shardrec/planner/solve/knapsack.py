"""The best multiset of pieces for every size of room, by dynamic programming.

Sizes are whole numbers of steps. The value function V of a knapsack in which pieces may be used any number of times
satisfies V(a) + V(b) <= V(a + b): what fits a and what fits b together fit a + b. So whatever fits a room, its pieces'
values add up to at most V(room), for every room (:mod:`curve`), for the sizes that were priced and all others. Gilmore
and Gomory, "A linear programming approach to the cutting-stock problem" (1961).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from shardrec.planner.solve.encode import Floats, Ints

__all__ = ["GRID", "knapsack", "knapsacks"]

GRID = 1500
"""Steps of the room of a rank, where there is one room only."""


def knapsack(weights: Ints, values: Floats, most: int) -> tuple[Floats, Callable[[int], Ints]]:
    """The best multisets of pieces within each size.

    Args:
        weights: (K,) steps of each kind, positive.
        values: (K,).
        most: G, the largest size.

    Returns:
        (G + 1,) the most value within each size, and a function that gives the (K,) numbers of pieces that have it.
    """
    best, pieces = knapsacks(weights, values, most, [len(weights)])
    return best[0], lambda size: pieces(size, 0)


def knapsacks(
    weights: Ints, values: Floats, most: int, ends: Sequence[int], counts: Ints | None = None
) -> tuple[Floats, Callable[[int, int], Ints]]:
    """The best multisets of the first so many kinds, for several numbers of kinds.

    Args:
        weights: (K,) steps of each kind, positive.
        values: (K,).
        most: G, the largest size.
        ends: (n,) numbers of kinds, ascending.
        counts: (K,) how many pieces of each kind there are; default: as many as fit.

    Returns:
        (n, G + 1) the most value within each size, and a function that gives for a size and an index of ``ends`` the
        (K,) numbers of pieces that have it.
    """
    best, found = np.zeros(most + 1), np.zeros((len(ends), most + 1))
    steps: list[tuple[int, int, int, NDArray[np.bool_]]] = []
    begin = 0
    for number, end in enumerate(ends):
        for kind in range(begin, end):
            weight = int(weights[kind])
            # No more than others have in its place, of which there are any number: of no use, as most kinds are.
            if weight > most or values[kind] <= (1e-12 if counts is not None else best[weight] + 1e-12):
                continue
            for times in _doublings(most // weight if counts is None else min(most // weight, int(counts[kind]))):
                shift = times * weight
                other = best[:-shift] + times * values[kind]
                better = other > best[shift:] + 1e-12
                if not better.any():
                    break
                np.copyto(best[shift:], other, where=better)
                steps.append((kind, times, shift, better))
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


def _doublings(most: int) -> Iterator[int]:
    """Numbers of pieces, some of which add up to any number up to ``most``, and none to more."""
    times = 1
    while most > 0:
        yield min(times, most)
        most -= times
        times *= 2

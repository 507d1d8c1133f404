"""The best multiset of pieces for every size of room, by dynamic programming.

Sizes are whole numbers of steps. The value function V of a knapsack in which pieces may be used any number of times
satisfies V(a) + V(b) <= V(a + b): what fits a and what fits b together fit a + b. So whatever fits a room, its pieces'
values add up to at most V(room), for every room, for the sizes that were priced and all others. Gilmore
and Gomory, "A linear programming approach to the cutting-stock problem" (1961).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from shardrec.planner.native import address, library
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
    weights: Ints,
    values: Floats,
    most: int,
    ends: Sequence[int],
    counts: Ints | None = None,
    start: Floats | None = None,
) -> tuple[Floats, Callable[[int, int], Ints]]:
    """The best multisets of the first so many kinds, for several numbers of kinds.

    Args:
        weights: (K,) steps of each kind, positive.
        values: (K,).
        most: G, the largest size.
        ends: (n,) numbers of kinds, ascending.
        counts: (K,) how many pieces of each kind there are; default: as many as fit.
        start: (G + 1,) what each size is worth without any, which is itself the best of some pieces; default: 0.

    Returns:
        (n, G + 1) the most value within each size, and a function that gives for a size and an index of ``ends`` the
        (K,) numbers of pieces that have it.

    Raises:
        ValueError: if a weight is not positive.
    """
    if (weights < 1).any():
        raise ValueError(f"a piece of {int(weights.min())} steps: any number of them fits; give it at least one")
    compiled = library()
    if compiled is None:
        return _in_python(weights, values, most, ends, counts, start)
    return _compiled(compiled, weights, values, most, ends, counts, start)


def _compiled(
    compiled: ctypes.CDLL,
    weights: Ints,
    values: Floats,
    most: int,
    ends: Sequence[int],
    counts: Ints | None,
    start: Floats | None,
) -> tuple[Floats, Callable[[int, int], Ints]]:
    weights, values = np.ascontiguousarray(weights, dtype=np.int64), np.ascontiguousarray(values, dtype=np.float64)
    there = most // weights
    if counts is not None:
        counts = np.ascontiguousarray(counts, dtype=np.int64)
        there = np.minimum(there, counts)
    if start is not None:
        start = np.ascontiguousarray(start, dtype=np.float64)
    # A number takes as many doublings as it has binary digits. Each step has a bit for every size.
    steps = int(np.frexp(there.astype(np.float64))[1].sum())
    made, better = np.empty((steps, 3), dtype=np.int64), np.empty((steps, most // 8 + 1), dtype=np.uint8)
    until, found = np.array(ends, dtype=np.int64), np.empty((len(ends), most + 1))
    count = compiled.shardrec_solve_knapsacks(
        address(weights),
        address(values),
        None if counts is None else address(counts),
        None if start is None else address(start),
        ctypes.c_int64(most),
        address(until),
        ctypes.c_int64(len(until)),
        address(found),
        address(made),
        address(better),
    )

    def pieces(size: int, number: int) -> Ints:
        counts: Ints = np.zeros(len(weights), dtype=np.int64)
        compiled.shardrec_solve_knapsack_pieces(
            address(made),
            address(better),
            ctypes.c_int64(count),
            ctypes.c_int64(most),
            ctypes.c_int64(ends[number]),
            ctypes.c_int64(size),
            address(counts),
        )
        return counts

    return found, pieces


def _in_python(
    weights: Ints, values: Floats, most: int, ends: Sequence[int], counts: Ints | None, start: Floats | None
) -> tuple[Floats, Callable[[int, int], Ints]]:
    best = np.zeros(most + 1) if start is None else start.copy()
    found = np.zeros((len(ends), most + 1))
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

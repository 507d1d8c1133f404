"""The best multiset of pieces for every room in load and memory, by dynamic programming; see :mod:`knapsack`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from shardrec.planner.solve.encode import Floats, Ints
from shardrec.planner.solve.fillings import Kind
from shardrec.planner.solve.knapsack import knapsack

__all__ = ["plane"]


def plane(
    kinds: Sequence[Kind], values: Floats, most: int, memory: int
) -> tuple[Floats, Callable[[int, int], dict[Kind, int]]]:
    """The best multisets of pieces within each load and memory.

    Args:
        kinds: (K,) of pieces, of positive load.
        values: (K,).
        most: G, the largest load.
        memory: M, the largest memory.

    Returns:
        (G + 1, M + 1) the most value within each, and a function that gives the pieces that have it.
    """
    if not memory:
        best, pieces = knapsack(np.array([size for size, _ in kinds], dtype=np.int64), values, most)

        def on_line(size: int, heavy: int) -> dict[Kind, int]:
            counts: Ints = pieces(size)
            return {kinds[number]: int(counts[number]) for number in np.flatnonzero(counts).tolist()}

        return best[:, None], on_line
    found = np.zeros((most + 1, memory + 1))
    steps: list[tuple[Kind, int, NDArray[np.bool_]]] = []
    for (size, heavy), value in zip(kinds, values.tolist(), strict=True):
        if size > most or heavy > memory or value <= found[size, heavy] + 1e-12:
            continue
        times, left = 1, min(most // size, memory // heavy if heavy else most)
        while left:
            many = min(times, left)
            # A copy: a piece is not used again by what it has just made better.
            other = found[: most + 1 - many * size, : memory + 1 - many * heavy] + many * value
            into = found[many * size :, many * heavy :]
            better = other > into + 1e-12
            if not better.any():
                break
            np.copyto(into, other, where=better)
            steps.append(((size, heavy), many, better))
            left -= many
            times *= 2

    def in_plane(size: int, heavy: int) -> dict[Kind, int]:
        counts: dict[Kind, int] = {}
        for kind, many, better in reversed(steps):
            after = size - many * kind[0], heavy - many * kind[1]
            if min(after) >= 0 and better[after]:
                counts[kind] = counts.get(kind, 0) + many
                size, heavy = after
        return counts

    return found, in_plane

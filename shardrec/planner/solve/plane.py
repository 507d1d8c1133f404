"""The best multiset of pieces for every room in load and memory, by dynamic programming; see :mod:`knapsack`.

Of some pieces, those of a table cut by rows, no rank has two. First come the others, any number of each, then for each
such table one piece or none.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from shardrec.planner.native import address, library
from shardrec.planner.solve.encode import Floats, Ints
from shardrec.planner.solve.fillings import Kind
from shardrec.planner.solve.knapsack import knapsack

__all__ = ["Pieces", "Plane", "plane"]


class Pieces:
    """Kinds of pieces, apart: those of which a rank may have any number, and those of each table of which only one.

    Args:
        kinds: (K,) of pieces, of positive load.
        most: G, the largest load.
        memory: M, the largest memory.

    Attributes:
        free: numbers of the kinds of which a rank may have any number.
        alone: those of which a rank may have only one of a table, and which fit, by table.
        tables: of those.
        ends: (T,) of each table's, in ``alone``.
        sizes: load of each of ``alone``.
        heavy: memory of each.
    """

    def __init__(self, kinds: Sequence[Kind], most: int, memory: int) -> None:
        self.kinds, self.most, self.memory = kinds, most, memory
        self.free: list[int] = []
        by_table: dict[int, list[int]] = {}
        for number, (size, heavy, table) in enumerate(kinds):
            if table < 0:
                self.free.append(number)
            elif size <= most and heavy <= memory:
                by_table.setdefault(table, []).append(number)
        self.tables = list(by_table)
        self.ends: Ints = np.cumsum([len(some) for some in by_table.values()], dtype=np.int64)
        self.alone = [number for some in by_table.values() for number in some]
        self.sizes, self.heavy = (np.array([kinds[at][which] for at in self.alone], dtype=np.int64) for which in (0, 1))


class Plane:
    """The best multisets of pieces within each load and memory.

    Args:
        pieces: K kinds; T tables of which a rank has only one piece.
        values: (K,).

    Attributes:
        value: (G + 1, M + 1) the most value within each.
        free: (G + 1, M + 1) the same for the pieces of which a rank may have any number.
        alone: by table of which a rank has only one piece, (G + 1, M + 1) the most value of one or of others instead.
        worth: (1 + T, M + 1, G + 1) of ``free``, and of each table in ``alone``.
    """

    def __init__(self, pieces: Pieces, values: Floats) -> None:
        kinds, shape = pieces.kinds, (len(pieces.tables), pieces.memory + 1, pieces.most + 1)
        free = [kinds[number] for number in pieces.free]
        self.free, self._free_way = plane(free, values[pieces.free], pieces.most, pieces.memory)
        self.worth: Floats = np.empty((1 + shape[0], *shape[1:]))
        self.worth[:] = self.free.T
        self._of, self._picked = pieces, np.full(shape, -1, dtype=np.int64)
        value = self.worth[0].copy()
        compiled = library()
        add = _add_in_python if compiled is None else partial(_add_compiled, compiled)
        add(pieces, values[pieces.alone], value, self.worth, self._picked)
        self.value = value.T
        self.alone = {table: worth.T for table, worth in zip(pieces.tables, self.worth[1:], strict=True)}

    def way(self, size: int, heavy: int, *, free: bool = False) -> dict[Kind, int]:
        """The pieces that have the most value within a load and memory.

        Args:
            size: the load.
            heavy: the memory.
            free: those only of which a rank may have any number.
        """
        found: dict[Kind, int] = {}
        table = 0 if free else len(self._picked)
        while len(some := np.flatnonzero(self._picked[:table, heavy, size] >= 0)):
            table = int(some[-1])
            kind = self._of.kinds[self._of.alone[self._picked[table, heavy, size]]]
            found[kind] = 1
            size, heavy = size - kind[0], heavy - kind[1]
        return found | self._free_way(size, heavy)


def _add_compiled(
    compiled: ctypes.CDLL, pieces: Pieces, values: Floats, value: Floats, worth: Floats, picked: Ints
) -> None:
    compiled.shardrec_solve_plane_alone(
        address(pieces.sizes),
        address(pieces.heavy),
        address(values),
        address(pieces.ends),
        ctypes.c_int64(len(pieces.ends)),
        ctypes.c_int64(pieces.most),
        ctypes.c_int64(pieces.memory),
        address(value),
        address(worth),
        address(picked),
    )


def _add_in_python(pieces: Pieces, values: Floats, value: Floats, worth: Floats, picked: Ints) -> None:
    """Add the tables of which a rank has only one piece.

    Args:
        pieces: the kinds.
        values: of each piece of those tables.
        value: (M + 1, G + 1) that of the other pieces; afterwards of all.
        worth: as :class:`Plane`'s, of the other pieces everywhere.
        picked: (T, M + 1, G + 1) -1; which piece of a table is taken.
    """
    start, free = 0, worth[0]
    for table, end in enumerate(pieces.ends.tolist()):
        before = value.copy()
        for number in range(start, end):
            size, heavy, mine = int(pieces.sizes[number]), int(pieces.heavy[number]), float(values[number])
            if mine <= free[heavy, size] + 1e-12:
                continue
            here = slice(heavy, None), slice(size, None)
            worth[1 + table][here] = np.maximum(worth[1 + table][here], mine)
            other = before[: len(before) - heavy, : before.shape[1] - size] + mine
            better = other > value[here] + 1e-12
            np.copyto(value[here], other, where=better)
            picked[table][here][better] = number
        start = end


def plane(
    kinds: Sequence[Kind], values: Floats, most: int, memory: int
) -> tuple[Floats, Callable[[int, int], dict[Kind, int]]]:
    """The best multisets of pieces within each load and memory.

    Args:
        kinds: (K,) of pieces, of positive load, of which there may be any number.
        values: (K,).
        most: G, the largest load.
        memory: M, the largest memory.

    Returns:
        (G + 1, M + 1) the most value within each, and a function that gives the pieces that have it.

    Raises:
        ValueError: if a load is not positive.
    """
    if least := [size for size, _, _ in kinds if size < 1]:
        raise ValueError(f"a piece of load {least[0]}: any number of them fits; give it at least 1")
    if not memory:
        best, pieces = knapsack(np.array([size for size, _, _ in kinds], dtype=np.int64), values, most)

        def on_line(size: int, heavy: int) -> dict[Kind, int]:
            counts: Ints = pieces(size)
            return {kinds[number]: int(counts[number]) for number in np.flatnonzero(counts).tolist()}

        return best[:, None], on_line
    compiled = library()
    if compiled is None:
        return _in_python(kinds, values, most, memory)
    return _compiled(compiled, kinds, values, most, memory)


def _compiled(
    compiled: ctypes.CDLL, kinds: Sequence[Kind], values: Floats, most: int, memory: int
) -> tuple[Floats, Callable[[int, int], dict[Kind, int]]]:
    sizes, heavy = (np.array([kind[which] for kind in kinds], dtype=np.int64) for which in range(2))
    values = np.ascontiguousarray(values, dtype=np.float64)
    # A number takes as many doublings as it has binary digits. Each step has a bit for every load and memory.
    there = np.minimum(most // sizes, np.where(heavy > 0, memory // np.maximum(heavy, 1), most))
    steps = int(np.frexp(there.astype(np.float64))[1].sum())
    made, better = np.empty((steps, 3), dtype=np.int64), np.empty((steps, memory + 1, most // 8 + 1), dtype=np.uint8)
    # Values of the same memory are next to each other: these are the longer rows.
    found = np.zeros((memory + 1, most + 1))
    count = compiled.shardrec_solve_plane(
        address(sizes),
        address(heavy),
        address(values),
        ctypes.c_int64(len(kinds)),
        ctypes.c_int64(most),
        ctypes.c_int64(memory),
        address(found),
        address(made),
        address(better),
    )

    def in_plane(size: int, bytes_: int) -> dict[Kind, int]:
        numbers: Ints = np.zeros(len(kinds), dtype=np.int64)
        compiled.shardrec_solve_plane_pieces(
            address(made),
            address(better),
            ctypes.c_int64(count),
            address(heavy),
            ctypes.c_int64(most),
            ctypes.c_int64(memory),
            ctypes.c_int64(size),
            ctypes.c_int64(bytes_),
            address(numbers),
        )
        counts: dict[Kind, int] = {}
        for number in np.flatnonzero(numbers)[::-1].tolist():
            counts[kinds[number]] = counts.get(kinds[number], 0) + int(numbers[number])
        return counts

    return found.T, in_plane


def _in_python(
    kinds: Sequence[Kind], values: Floats, most: int, memory: int
) -> tuple[Floats, Callable[[int, int], dict[Kind, int]]]:
    found = np.zeros((most + 1, memory + 1))
    steps: list[tuple[Kind, int, NDArray[np.bool_]]] = []
    for kind, value in zip(kinds, values.tolist(), strict=True):
        size, heavy, _ = kind
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
            steps.append((kind, many, better))
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

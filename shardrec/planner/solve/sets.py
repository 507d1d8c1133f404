"""The sets of parts on a host that are worth most; :mod:`inside` says what parts are, and what of them fits.

With a price for each kind of part and the value V of free pieces by size, a set is worth

    the prices of its parts + the sum over the host's ranks of V(room - load of its parts there)

and the best sets are found part by part: a state is a set together with its loads, and is dropped if not even the
value of the best pieces for what is left of each rank makes it worth enough.

Shapes: G steps, L ranks of a host, W ways to put a part on them, K kinds of parts, S sets or states.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardrec.planner.native import address, library
from shardrec.planner.solve.encode import Floats, Ints
from shardrec.planner.solve.inside import Inside
from shardrec.planner.solve.knapsack import knapsacks

__all__ = ["Found", "best_sets"]

_CELLS = 2_000_000
"""Numbers that are held at a time."""
_STATES = 60_000
"""Most sets that are looked at for one answer, if it is to be exact."""
_FOUND = 400
_FACTOR = 0x9E3779B97F4A7C15
"""Its powers tell rows of numbers apart."""


@dataclass(frozen=True, eq=False)
class Found:
    """Sets of parts.

    Args:
        values: (S,) what they are worth, the most first.
        sets: (S, n) kinds of their parts, -1 where there are fewer.
        loads: (S, L) steps of the parts on each rank.
        most: no set is worth more.
    """

    values: Floats
    sets: Ints
    loads: Ints
    most: float


def best_sets(
    inside: Inside,
    room: int,
    price: Floats,
    free: Floats,
    *,
    least: float,
    beam: int = 0,
    near: float = 0.0,
    every: bool = False,
) -> Found:
    """The sets of parts that are worth most.

    Args:
        inside: the parts.
        room: steps of a rank.
        price: (K,) of a part of each kind.
        free: (G + 1,) V.
        least: sets that are worth less are of no use.
        beam: keep no more than so many states of a size, the most promising; 0: all, which is exact.
        near: also the sets that are worth so much less than the best.
        every: also those with a part in whose place another is worth as much.

    Returns:
        Sets; if ``beam`` is 0, there are some if any is worth ``least``, and they need not be the best.
    """
    kinds = _useful(inside, price, room, every=every)
    search = _Search(inside, kinds, price, free, room)
    compiled = library()
    return search.in_python(least, beam, near) if compiled is None else search.compiled(compiled, least, beam, near)


def _useful(inside: Inside, price: Floats, room: int, every: bool) -> list[int]:
    """Kinds in order of their price by load, without those in whose place another is worth as much."""
    able = (price > 1e-12) & (inside.largest <= room)
    if not every:
        # Of two kinds that fit in each other's place, the first.
        better = able & (price[None] >= price[:, None] - 1e-10)
        able = able & ~(inside.replaced & better).any(axis=1)
    kinds = np.flatnonzero(able).tolist()
    return sorted(kinds, key=lambda kind: -price[kind] / max(int(inside.kinds[kind][0].sum()), 1))


@dataclass(frozen=True, eq=False)
class _States:
    """Sets so far: (S, L) loads, (S,) prices of the parts, (S, n) numbers of their kinds, ascending."""

    loads: Ints
    value: Floats
    parts: Ints

    @property
    def last(self) -> Ints:
        """(S,) the number of the last part's kind."""
        return self.parts[:, -1] if self.parts.shape[1] else np.zeros(len(self.value), dtype=np.int64)

    def picked(self, which: Ints | NDArray[np.bool_]) -> _States:
        return _States(self.loads[which], self.value[which], self.parts[which])


class _Search:
    """The search among some kinds, which are numbered in their order here."""

    def __init__(self, inside: Inside, kinds: Sequence[int], price: Floats, free: Floats, room: int) -> None:
        self._kinds, self._local, self._room, self._pieces = kinds, inside.local, room, inside.pieces
        none: Ints = np.zeros((0, inside.local), dtype=np.int64)
        self._ways: Ints = np.concatenate([none, *(inside.kinds[kind] for kind in kinds)])
        many = [len(inside.kinds[kind]) for kind in kinds]
        self._number_of: Ints = np.repeat(np.arange(len(kinds)), many)
        self._first: Ints = np.cumsum([0, *many], dtype=np.int64)
        self._price: Floats = np.ascontiguousarray(price[kinds], dtype=np.float64)
        self._free: Floats = np.ascontiguousarray(free[: room + 1], dtype=np.float64)
        self._rest = self._values_of_pieces()
        widest = room * inside.local // max(int(self._ways.sum(axis=1).min(initial=room + 1)), 1) + 1
        self._factors: NDArray[np.uint64] = np.cumprod(
            np.full(inside.local + widest, _FACTOR, dtype=np.uint64), dtype=np.uint64
        )

    def _values_of_pieces(self) -> Floats:
        """(K + 1, room + 1) the most that pieces on a rank are worth, if parts are of kinds from a number on.

        The pieces are free ones, or of parts, that share their price by load.
        """
        pieces = [self._pieces[kind] for kind in reversed(self._kinds)]
        many = [len(sizes) for sizes, _ in pieces]
        sizes: Ints = np.concatenate([np.zeros(0, dtype=np.int64), *(sizes for sizes, _ in pieces)])
        parts: Floats = np.concatenate([np.zeros(0), *(part for _, part in pieces)])
        ends = np.cumsum([0, *many]).tolist()
        best, _ = knapsacks(sizes, np.repeat(self._price[::-1], many) * parts, self._room, ends, start=self._free)
        found: Floats = np.ascontiguousarray(best[::-1]) + 1e-12
        return found

    def compiled(self, compiled: ctypes.CDLL, least: float, beam: int, near: float) -> Found:
        """In C++."""
        width = len(self._factors) - self._local
        values, most = np.empty(_FOUND), np.empty(1)
        sets, loads = (np.empty((_FOUND, columns), dtype=np.int64) for columns in (width, self._local))
        count = compiled.shardrec_solve_best_sets(
            ctypes.c_int64(len(self._kinds)),
            ctypes.c_int64(self._local),
            address(self._ways),
            address(self._first),
            address(self._price),
            address(self._rest),
            address(self._free),
            ctypes.c_int64(self._room),
            ctypes.c_double(least),
            ctypes.c_int64(beam),
            ctypes.c_double(near),
            ctypes.c_int64(_STATES),
            address(self._factors),
            ctypes.c_int64(_FOUND),
            ctypes.c_int64(width),
            address(values),
            address(sets),
            address(loads),
            address(most),
        )
        return self._named(values[:count], sets[:count], loads[:count], float(most[0]))

    def _named(self, values: Floats, sets: Ints, loads: Ints, most: float) -> Found:
        names = np.array([*self._kinds, -1], dtype=np.int64)
        return Found(values, names[sets[:, : int((sets >= 0).sum(axis=1).max(initial=0))]], loads, most)

    def in_python(self, least: float, beam: int, near: float) -> Found:
        """The same, slowly."""
        zeros: Ints = np.zeros((1, self._local), dtype=np.int64)
        states = _States(zeros, np.zeros(1), zeros[:, :0])
        bar, passed, looked = least, -np.inf, 0
        found: list[tuple[Floats, _States]] = []
        while len(states.value):
            worth = states.value + _over_ranks(self._free[None], np.zeros(1, dtype=np.int64), self._room - states.loads)
            good = worth >= bar
            if good.any():
                bar = max(bar, float(worth.max()) - near)
                found.append((worth[good], states.picked(good)))
                if not beam:
                    passed = np.inf
                    break
            if (beam and len(states.value) > beam) or looked > _STATES:
                promise = states.value + _over_ranks(self._rest, states.last, self._room - states.loads)
                order = np.argsort(-promise, kind="stable")
                keep = beam if looked <= _STATES else 0
                passed = max(passed, float(promise[order[keep]]))
                states = states.picked(order[:keep])
                if not keep:
                    break
            states = self._extended(states, bar)
            looked += len(states.value)
        return self._ordered(found, bar, max(passed, least))

    def _extended(self, states: _States, bar: float) -> _States:
        """All the sets with a part more that may be worth ``bar``."""
        last, room = states.last, self._room
        loads, values, sources, numbers = [states.loads[:0]], [states.value[:0]], [last[:0]], [last[:0]]
        chunk = max(1, _CELLS // (len(self._ways) * self._local + 1))
        for begin in range(0, len(last), chunk):
            here = states.loads[begin : begin + chunk]
            after = here[:, None] + self._ways[None]
            fits = after.max(axis=2) <= room
            # Kinds are in order, so that a set is made in one order only.
            fits &= last[begin : begin + chunk, None] <= self._number_of[None]
            source, way = np.nonzero(fits)
            after, number = after[source, way], self._number_of[way]
            value = states.value[begin + source] + self._price[number]
            good = value + _over_ranks(self._rest, number, room - after) >= bar
            loads.append(after[good])
            values.append(value[good])
            sources.append(begin + source[good])
            numbers.append(number[good])
        parts = np.hstack([states.parts[np.concatenate(sources)], np.concatenate(numbers)[:, None]])
        found = _States(np.vstack(loads), np.concatenate(values), parts)
        # Ways of equal parts may change places: one of those that look the same is enough. Compared by a hash first, as
        # to sort rows is slow; those that only have the hash in common stay.
        rows = np.hstack([found.loads, parts])
        _, first, which = np.unique(
            rows.astype(np.uint64) @ self._factors[: rows.shape[1]], return_index=True, return_inverse=True
        )
        others = np.flatnonzero((rows != rows[first[which]]).any(axis=1))
        return found.picked(np.union1d(first, others))

    def _ordered(self, found: Sequence[tuple[Floats, _States]], bar: float, most: float) -> Found:
        widest = max((states.parts.shape[1] for _, states in found), default=0)
        sets = [
            np.pad(states.parts, ((0, 0), (0, widest - states.parts.shape[1])), constant_values=-1)
            for _, states in found
        ]
        values = np.concatenate([np.zeros(0), *(worth for worth, _ in found)])
        chosen = np.concatenate([np.zeros((0, widest), dtype=np.int64), *sets])
        loads = np.concatenate([np.zeros((0, self._local), dtype=np.int64), *(states.loads for _, states in found)])
        order = np.argsort(-values, kind="stable")
        order = order[values[order] >= bar][:_FOUND]
        return self._named(values[order], chosen[order], loads[order], max(most, float(values.max(initial=-np.inf))))


def _over_ranks(value: Floats, which: Ints, left: Ints) -> Floats:
    """(S,) the sum over the ranks of one of the functions, added up rank by rank.

    Args:
        value: (K, G + 1).
        which: (S,) the function, or (1,) that of all.
        left: (S, L) steps.
    """
    total: Floats = value[which, left[:, 0]]
    for rank in range(1, left.shape[1]):
        total = total + value[which, left[:, rank]]
    return total

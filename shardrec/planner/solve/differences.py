"""By how much the shares of two hosts differ: what each difference costs at least, at some prices of options.

The rooms of two hosts differ by what their shares do (:mod:`alike`). A few tables have shares, of a few sizes, so most
differences are not possible, or take options that cost more; fractions of options, which :mod:`cells` prices, have any.
Here tables are gone through one by one, whole options on whole hosts (dynamic programming).

Shapes: O options, C numbers of tables with shares (the last is for so many or more), D differences, G steps.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import partial
from itertools import product

import numpy as np

from shardrec.planner.native import address, library
from shardrec.planner.solve.alike import Alike
from shardrec.planner.solve.encode import Floats, Ints
from shardrec.planner.solve.sizes import GRID

__all__ = ["Differences"]

_FINE = 4
"""Differences that are told apart, per step."""
_BUDGET = 0.02
"""Of the most load: options that cost so much more than the best of their table are all taken to cost that."""


class Differences:
    """The differences that each option makes.

    Args:
        alike: the problem.
        most: C less 1.
    """

    def __init__(self, alike: Alike, most: int) -> None:
        self._most = most
        parts: dict[int, list[tuple[float, int]]] = {}
        for option, share, count in zip(alike.part_option, alike.part_share, alike.part_count, strict=True):
            if share > 0:
                parts.setdefault(int(option), []).append((float(share) * GRID * _FINE, int(count)))
        self._tables = int(alike.sizes.sum())
        # One host's shares are never more than the most load. What each table makes of it is rounded.
        self._reach = GRID * _FINE + self._tables // 2 + 1
        # Moves, and the options that make them: for each table that of all options without shares, or of one more
        # that there is not, then one for each difference.
        by: list[int] = []
        options: list[list[int]] = []
        ends: list[int] = []
        last = np.append(alike.starts[1:], len(alike.base)).tolist()
        for start, end, tables in zip(alike.starts.tolist(), last, alike.sizes.tolist(), strict=True):
            made: dict[int, list[int]] = {}
            for option in range(start, end):
                for difference in _differences(parts[option]) if option in parts else ():
                    made.setdefault(difference, []).append(option)
            without = [option for option in range(start, end) if option not in parts] or [len(alike.base)]
            for _ in range(tables):
                by += [0, *made]
                options += [without, *made.values()]
                ends.append(len(by))
        self._by, self._ends = np.array(by, dtype=np.int64), np.array(ends, dtype=np.int64)
        self._options: Ints = np.array([option for some in options for option in some], dtype=np.int64)
        self._starts: Ints = np.cumsum([0, *map(len, options)])[:-1]

    def least(self, price: Floats) -> Floats:
        """(C, G + 1) by number of tables with shares and whole steps between the rooms, the least sum of prices.

        Args:
            price: (O,) of each option, infinite where a table may not take it.
        """
        prices = np.minimum.reduceat(np.append(price, np.inf)[self._options], self._starts)
        compiled = library()
        taken = _in_python if compiled is None else partial(_compiled, compiled)
        found, lowest = taken(self._by, prices, self._ends, self._most, self._reach)
        found = np.minimum(found, lowest + _BUDGET)
        return np.array([_near(row, _FINE + self._rounded(number)) for number, row in enumerate(found)])

    def _rounded(self, number: int) -> int:
        """What rounding may come to, with so many tables with shares."""
        return ((self._tables if number == self._most else number) + 1) // 2


def _differences(parts: Sequence[tuple[float, int]]) -> list[int]:
    """By what either host may have more than the other, for all ways to put parts of these shares on them.

    Args:
        parts: share and number of each.
    """
    each = [[share * (count - 2 * there) for there in range(count + 1)] for share, count in parts]
    return sorted({abs(int(np.rint(sum(some)))) for some in product(*each)})


def _near(row: Floats, width: int) -> Floats:
    """(G + 1,) the least near each whole step, of what each difference from 0 on costs."""
    padded = np.concatenate([row[width:0:-1], row, np.full(width, np.inf)])
    shifted = [padded[shift : shift + GRID * _FINE + 1 : _FINE] for shift in range(2 * width + 1)]
    found: Floats = np.minimum.reduce(shifted)
    return found


def _compiled(
    compiled: ctypes.CDLL, by: Ints, prices: Floats, ends: Ints, most: int, reach: int
) -> tuple[Floats, float]:
    found, lowest = np.full((most + 1, reach + 1), np.inf), np.zeros(1)
    compiled.shardrec_solve_differences(
        address(ends),
        address(by),
        address(prices),
        ctypes.c_int64(len(ends)),
        ctypes.c_int64(most),
        ctypes.c_int64(reach),
        ctypes.c_double(_BUDGET),
        address(found),
        address(lowest),
    )
    return found, float(lowest[0])


def _in_python(by: Ints, prices: Floats, ends: Ints, most: int, reach: int) -> tuple[Floats, float]:
    """The least sums by number of tables with shares and difference from 0 on, and the least of all.

    Args:
        by: of each move.
        prices: of each.
        ends: of each table's moves.
        most: C less 1.
        reach: the largest difference.
    """
    found = np.full((most + 1, 2 * reach + 1), np.inf)
    found[0, reach] = lowest = 0.0
    start = 0
    for end in ends.tolist():
        least = float(prices[start:end].min())
        lowest += least
        if lowest == np.inf:
            return np.full((most + 1, reach + 1), np.inf), lowest
        able = start + np.flatnonzero(prices[start:end] <= least + _BUDGET)
        moves = {int(by[move]): float(prices[move]) for move in able.tolist() if move > start}
        found = _taken(found, float(prices[start]), moves)
        # Costs only grow over the least there is, so this does not come back below what the rest is taken to cost.
        found[found > lowest + _BUDGET] = np.inf
        start = end
    return found[:, reach:], lowest


def _taken(before: Floats, without: float, moves: dict[int, float]) -> Floats:
    """After one more table: at a price without a share, or at those of each difference that it makes."""
    found = before + without
    size = before.shape[1]
    for difference, cost in [(sign * by, cost) for by, cost in moves.items() for sign in (1, -1)]:
        here = slice(max(difference, 0), size + min(difference, 0))
        moved = before[:, max(-difference, 0) : size + min(-difference, 0)] + cost
        np.minimum(found[1:, here], moved[:-1], out=found[1:, here])
        np.minimum(found[-1, here], moved[-1], out=found[-1, here])
    return found

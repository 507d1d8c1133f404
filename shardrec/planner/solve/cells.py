"""Bounds for the smaller problem (:mod:`alike`), for all rooms at once, from prices (:mod:`pricing`).

On two hosts of L ranks with rooms r1 >= r2, every choice of options that fits has, for V the value function of a
knapsack, any m >= 0 and any p,

    E + c  >=  sum over tables of the least (load on every rank + half of its shares + V of its pieces
                                             - m of its shares - p if it has shares)
               - L (V(r1) + V(r2)) + (r1 + r2) / 2 + m (r1 - r2) + p (tables with shares)

since c is the mean of the rooms and half of all shares, and the shares of the hosts differ by what the rooms do
(Lagrange). So one solution's prices bound the cost for all rooms and all numbers of tables with shares. With one class
of ranks there is one room, and no share. Prices are the dual values of a programme for some rooms, with a column for
each option and each way to fill a rank; columns are generated.

How many tables have shares makes a great difference: they are what allows different rooms, and cost more. So bounds are
kept for each such number apart (:class:`Cells`).

Loads are counted in steps, G of them to the most load; pieces are rounded down. A rank with less than r + 1 steps of
pieces has room r. A *cell* is a pair of rooms.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardrec.planner.solve.encode import Floats
from shardrec.planner.solve.sizes import GRID

__all__ = ["SHARED", "Box", "Cells", "Prices"]

SHARED = 4
"""Numbers of tables with shares that are looked at apart; so many or more are together."""
_MUCH = 1e9
"""More than any bound; not infinite, as the bound of a room that some table does not fit is."""


@dataclass(frozen=True, eq=False)
class Box:
    """Cells, and a range of the number of tables with shares.

    Args:
        low: the least room of each class of ranks, descending.
        high: the largest.
        least: tables with shares, at least.
        most: at most; may be infinite.
    """

    low: tuple[int, ...]
    high: tuple[int, ...]
    least: int
    most: float

    @property
    def mean(self) -> float:
        """The mean room, at least; of the most load."""
        return sum(self.low) / len(self.low) / GRID

    @property
    def width(self) -> int:
        """Steps from the least room to the largest."""
        return self.high[0] - self.low[0]

    @property
    def apart(self) -> float:
        """What the rooms differ by, at least; of the most load."""
        return max(self.low[0] - self.high[-1] - 1, 0) / GRID if len(self.low) > 1 else 0.0


@dataclass(frozen=True, eq=False)
class Prices:
    """Dual values, and what follows from them.

    Args:
        value: (G + 1, M + 1) V by load and memory; that of a room is for all the memory of a rank.
        free: (G + 1, M + 1) the same without the pieces of which a rank has only one of a table.
        alone: by table, (G + 1, M + 1) price of a piece of those, by load and memory; where there is none, ``free``.
        fixed: (G + 1,) by the largest room, the sum over tables less what the other limits come to.
        option: (O,) price of each option.
        apart: m.
        shared: p.
        room: the largest for which ``least`` holds.
        least: (SHARED + 1, G + 1) by number of tables with shares and steps between the rooms, what whole options come
            to, less what the other limits do; None if there are not two hosts.
    """

    value: Floats
    free: Floats
    alone: Mapping[int, Floats]
    fixed: Floats
    option: Floats
    apart: float
    shared: float
    room: int
    least: Floats | None

    def of_tables(self, least: int, most: float) -> float:
        """What the number of tables with shares comes to, at least."""
        if self.shared >= 0:
            return self.shared * least
        return self.shared * most if np.isfinite(most) else -_MUCH

    def bound(self, box: Box, ranks: tuple[int, ...]) -> float:
        """A bound of the load on every rank and half of the shares, in a box."""
        rooms = sum(count * float(self.value[room, -1]) for count, room in zip(ranks, box.high, strict=True))
        fixed = float(self.fixed[box.high[0]]) + self.apart * box.apart + self.of_tables(box.least, box.most)
        number = min(box.least, SHARED)
        if self.least is not None and box.high[0] <= self.room and (number == SHARED or box.most == number):
            between = slice(max(box.low[0] - box.high[-1], 0), box.high[0] - box.low[-1] + 1)
            fixed = max(fixed, float(self.least[number, between].min()))
        return fixed - rooms


class Cells:
    """The cells in which there may be a plan below a target, for a number of tables with shares.

    Args:
        ranks: of each class.
        least: tables with shares, at least.
        most: at most.

    Attributes:
        high: the larger room of each cell.
        low: the smaller.
        bound: of the cost, of the most load.
        width: of the next box to price.
    """

    def __init__(self, ranks: tuple[int, ...], least: int, most: float) -> None:
        self.ranks, self.least, self.most = ranks, least, most
        room = np.arange(GRID + 1)
        self.high, self.low = (room, room) if not most else (each.ravel() for each in np.indices((GRID + 1, GRID + 1)))
        self.bound: Floats = np.full(len(self.high), -np.inf)
        self.width = GRID // 40
        self._most_width: dict[tuple[int, ...], int] = {}
        self._only(self.low <= self.high)

    def _only(self, some: NDArray[np.bool_]) -> None:
        self.high, self.low, self.bound = self.high[some], self.low[some], self.bound[some]

    @property
    def deciding(self) -> float:
        """The least bound; infinite if no cell is left."""
        return float(self.bound.min(initial=np.inf))

    def learn(self, prices: Prices, target: float) -> None:
        """Raise the bounds, and leave out what reaches the target."""
        rooms = self.ranks[0] * prices.value[self.high, -1]
        if len(self.ranks) > 1:
            rooms = rooms + self.ranks[1] * prices.value[self.low, -1]
        fixed = prices.fixed[self.high] + prices.of_tables(self.least, self.most)
        fixed += prices.apart / GRID * np.maximum(self.high - self.low - 1, 0)
        if prices.least is not None:
            apart = prices.least[self.least, self.high - self.low]
            fixed = np.where(self.high <= prices.room, np.maximum(fixed, apart), fixed)
        found = fixed - rooms + (self.high + self.low) / (2 * GRID)
        self.bound = np.maximum(self.bound, found)
        self._only(self.bound < target)

    def keep(self, target: float) -> None:
        """Leave out what reaches the target."""
        self._only(self.bound < target)

    def deciding_outside(self, boxes: Sequence[Box]) -> float:
        """The least bound of the cells that are in none of some boxes."""
        return float(self._bounds_outside(boxes).min(initial=np.inf))

    def box(self, boxes: Sequence[Box] = ()) -> Box:
        """The cells from that of the least bound on, of those that are in none of some boxes."""
        at = int(self._bounds_outside(boxes).argmin())
        low = (int(self.high[at]), int(self.low[at]))[: len(self.ranks)]
        width = min(self.width, self._most_width.get(low, GRID))
        return Box(low, tuple(min(room + width, GRID) for room in low), self.least, self.most)

    def failed(self, box: Box) -> None:
        """Make boxes narrower after one that was not closed, and from its least rooms on for good: levels rise."""
        self.width = self._most_width[box.low] = box.width // 2

    def raised(self, box: Box, bound: float) -> None:
        """Raise the bounds of the cells of a box."""
        self.bound = np.where(self._inside(box), np.maximum(self.bound, bound), self.bound)

    def least_in(self, box: Box) -> float:
        """The least bound of the cells of a box; infinite if none is left."""
        return float(self.bound[self._inside(box)].min(initial=np.inf))

    def _inside(self, box: Box) -> NDArray[np.bool_]:
        inside: NDArray[np.bool_] = (self.high >= box.low[0]) & (self.high <= box.high[0])
        return inside & (self.low >= box.low[-1]) & (self.low <= box.high[-1])

    def _bounds_outside(self, boxes: Sequence[Box]) -> Floats:
        bounds = self.bound
        for box in boxes:
            bounds = np.where(self._inside(box), np.inf, bounds)
        return bounds

"""Prices for a box of rooms: ranks filled in fractions of ways, for the smaller problem (:mod:`alike`).

:mod:`cells` says what they prove. The programme has a column for each option and each way to fill a rank; they are
generated. Columns stay when another box is priced. Gilmore and Gomory, "A linear programming approach to the
cutting-stock problem" (1961).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import highspy
import numpy as np

from shardrec.planner.solve.alike import Alike
from shardrec.planner.solve.cells import Box, Prices
from shardrec.planner.solve.encode import Floats, Ints
from shardrec.planner.solve.fillings import Kind
from shardrec.planner.solve.plane import plane
from shardrec.planner.solve.sizes import GRID

__all__ = ["Pricing"]

_ROUNDS = 300
_CLOSE = 3e-5
_PART, _FAR = 0.1, 3e-3
"""Of the way to what is enough, and at most: how near the bound must come to the programme's value."""
_WAYS = 8
"""Ways to fill a rank that are added at a time."""
_COARSE = 8
"""Steps of memory that are one here."""
_SHORT = 0.5
"""Of all memory: so much must be in use for it to be priced."""
_NEAR = 0.95
"""Of the room: ways that fill less are left out until they are worth it."""
_OUT, _NO_SHARE, _NOT_APART = 4.0, 4.0, 40.0
"""Prices that no plan pays: for a table that stays out, and for want of shares."""
_SLACK = 1e-9
_MUCH = 1e12
_DUAL, _PRIMAL = 1, 4
_NOTHING = np.zeros(0, dtype=np.int32)


class Pricing:
    """The programme.

    Args:
        alike: the smaller problem.

    Attributes:
        base: (O,) load on every rank and half of the shares.
        need: (O,) the least room that an option's pieces fit one by one; G + 1 if there is none.
        size: (K,) steps of each piece's load.
        heavy: (K,) steps of each piece's memory, rounded down to fewer.
        memory: steps that options leave of a rank's, at most; 0 if no piece takes a step of it.
        pieces: per option, how many pieces it has of each kind.
        prices: of all boxes priced so far.
        limits: the other limits that were broken by some solution.
    """

    def __init__(self, alike: Alike) -> None:
        self.alike = alike
        self.size: Ints = np.clip(np.floor(alike.load * GRID - 1e-6), 0, GRID + 1).astype(np.int64)
        need: Ints = np.zeros(len(alike.base), dtype=np.int64)
        np.maximum.at(need, alike.option, self.size)
        self.need: Ints = np.where(alike.fits, need, GRID + 1)
        self.base: Floats = alike.base + alike.share / len(alike.ranks)
        # In fractions, memory makes a difference only where there is little.
        self.heavy: Ints = alike.heavy // _COARSE if alike.used > _SHORT else np.zeros_like(alike.heavy)
        able = np.flatnonzero((self.need <= GRID) & (alike.base < 1))
        self.memory = alike.beside(able)[1] // _COARSE if self.heavy.any() else 0
        self.pieces: list[dict[Kind, float]] = [{} for _ in alike.base]
        for option, _, (size, heavy), count in self.items():
            kind = size, heavy // _COARSE if self.memory else 0
            self.pieces[option][kind] = self.pieces[option].get(kind, 0.0) + count
        self.prices: list[Prices] = []
        self.limits: dict[int, int] = {}
        self._ends: Ints = np.append(alike.starts[1:], len(alike.base))
        self._begin()

    def _begin(self) -> None:
        self._solver: Any = highspy.Highs()  # type: ignore[no-untyped-call]
        for name, value in (
            ("output_flag", False),
            ("threads", 1),
            ("random_seed", 0),
            ("presolve", "off"),
            ("simplex_scale_strategy", 0),
            ("simplex_primal_edge_weight_strategy", 1),
        ):
            self._solver.setOptionValue(name, value)
        self._count = 0
        for size in self.alike.sizes.tolist():
            self._row(float(size), float(size))
        self._room_rows = [self._row(-highspy.kHighsInf, float(ranks)) for ranks in self.alike.ranks]
        self._apart_row = self._row(-highspy.kHighsInf, highspy.kHighsInf)
        self._shared_row = self._row(-highspy.kHighsInf, highspy.kHighsInf)
        self._kind_rows: dict[Kind, int] = {}
        self._options: dict[int, int] = {}
        self._ways: dict[object, int] = {}
        # Of each column: the room it needs, the least room for which it is of use, of which class of ranks, and whether
        # it may be used.
        self._needs: list[int] = []
        self._least: list[float] = []
        self._kinds: list[int] = []
        self._opened: list[bool] = []
        for group in range(len(self.alike.sizes)):
            self._column(_OUT, {group: 1.0})
        self._column(_NO_SHARE, {self._shared_row: 1.0})
        self._column(_NOT_APART, {self._apart_row: 1.0})

    def bound(self, box: Box) -> tuple[float, Prices]:
        """The best bound for a box so far, of the load on every rank and half of the shares, and its prices."""
        values = [prices.bound(box, self.alike.ranks) for prices in self.prices]
        best = int(np.argmax(values))
        return values[best], self.prices[best]

    def items(self) -> Iterator[tuple[int, int, Kind, float]]:
        """Option, part, -1 if it may be on any rank, kind and number of pieces, but for those of next to no load."""
        alike = self.alike
        columns = (alike.option, alike.part, self.size, alike.heavy, alike.count)
        for option, part, size, heavy, count in zip(*(column.tolist() for column in columns), strict=True):
            if size:
                yield option, part, (size, heavy), count

    def worth(self, prices: Prices, kinds: Sequence[Kind]) -> list[float]:
        """What a piece of each kind is worth."""
        return [float(prices.value[size, min(heavy // _COARSE, self.memory)]) for size, heavy in kinds]

    def know(self, prices: Prices) -> None:
        """Take in prices that were found elsewhere."""
        if not any(prices is other for other in self.prices):
            self.prices.append(prices)

    def over(self, prices: Prices, room: int) -> Floats:
        """(O,) what each option costs more than the best of its table, where its pieces must fit a room."""
        price = np.where(self.need <= room, prices.option, np.inf)
        found: Floats = price - np.minimum.reduceat(price, self.alike.starts)[self.alike.group]
        return found

    def price(self, box: Box, enough: float, *, closely: bool = False) -> Prices:
        """Generate columns for a box, until the bound is enough or cannot be; the prices.

        Args:
            box: the bound is infinite where some table has no option that fits.
            enough: a bound of the load on every rank and half of the shares that is as good as any.
            closely: go on to the end.
        """
        self._open(box)
        alike, best, found = self.alike, -np.inf, np.zeros(self._count)
        for number in range(_ROUNDS):
            # Closed columns leave the last solution to be made feasible, new ones to be made better.
            self._solver.setOptionValue("simplex_strategy", _PRIMAL if number else _DUAL)
            self._solver.run()
            duals = np.array(self._solver.getSolution().row_dual)
            objective = float(self._solver.getInfo().objective_function_value)
            value, ways = self._value(duals)
            price, paid = self._prices(duals, value)
            price = np.where(self.need <= box.high[0], price, np.inf)
            lowest = np.minimum.reduceat(price, alike.starts)
            rooms = sum(n * float(value[room, -1]) for n, room in zip(alike.ranks, box.high, strict=True))
            bound = float(lowest @ alike.sizes) - rooms - paid + self._more(duals, box)
            if bound > best:
                best, found = bound, duals
            if best >= enough and not closely:
                break
            near = _CLOSE if closely else max(_CLOSE, min(_PART * (enough - objective), _FAR))
            if objective - best <= near:
                if self._add_limits():
                    continue
                break
            added = False
            for kind, room in enumerate(box.high):
                added |= self._add_ways(duals, value, ways, room, kind)
            for group in np.flatnonzero(lowest < duals[: len(lowest)] - 1e-9).tolist():
                start = int(alike.starts[group])
                added |= self._add_option(start + int(price[start : self._ends[group]].argmin()), box)
            if not added and not self._add_limits():
                break
        self.prices.append(self._learned(found))
        return self.prices[-1]

    def _open(self, box: Box) -> None:
        """Allow the columns that a box has room for, and of the ways those that nearly fill it."""
        rooms = np.array(box.high)[self._kinds]
        opened = (np.array(self._needs) <= rooms) & (np.array(self._least) >= _NEAR * rooms)
        self._opened = opened.tolist()
        upper = np.where(opened, highspy.kHighsInf, 0.0)
        columns = len(upper)
        self._solver.changeColsBounds(columns, np.arange(columns, dtype=np.int32), np.zeros(columns), upper)
        apart = box.apart if box.apart > 0 else -highspy.kHighsInf
        self._solver.changeRowBounds(self._apart_row, apart, highspy.kHighsInf)
        most = float(box.most) if np.isfinite(box.most) else highspy.kHighsInf
        self._solver.changeRowBounds(self._shared_row, float(box.least), most)

    def _more(self, duals: Floats, box: Box) -> float:
        """What the two rows about shares come to."""
        shared = self._shared(duals)
        more = max(float(duals[self._apart_row]), 0.0) * box.apart
        return more + (shared * (box.least if shared > 0 else min(box.most, _MUCH)) if shared else 0.0)

    def _shared(self, duals: Floats) -> float:
        found = float(duals[self._shared_row])
        return found if abs(found) > 1e-12 else 0.0

    def _value(self, duals: Floats) -> tuple[Floats, Callable[[int, int], dict[Kind, int]]]:
        """V, and the best way to fill a room in load and memory."""
        kinds = sorted(self._kind_rows)
        worth = np.maximum(duals[[self._kind_rows[kind] for kind in kinds]], 0.0) if kinds else np.zeros(0)
        return plane(kinds, worth, GRID, self.memory)

    def _prices(self, duals: Floats, value: Floats) -> tuple[Floats, float]:
        """(O,) the price of each option, and what the other limits come to."""
        alike, paid = self.alike, 0.0
        worth = value[np.minimum(self.size, GRID), np.minimum(self.heavy, self.memory)] * alike.count
        price: Floats = self.base + np.bincount(alike.option, worth, len(self.base))
        price -= max(float(duals[self._apart_row]), 0.0) * alike.share
        price -= self._shared(duals) * (alike.share > 0)
        for number, row in self.limits.items():
            dual = max(-float(duals[row]), 0.0) if row < len(duals) else 0.0
            price += dual * alike.rows[number]
            paid += dual * float(alike.limits[number])
        return price, paid

    def _learned(self, duals: Floats) -> Prices:
        duals = np.append(duals, np.zeros(self._count - len(duals)))
        value, _ = self._value(duals)
        price, paid = self._prices(duals, value)
        least = np.full((len(self.alike.sizes), GRID + 2), np.inf)
        np.minimum.at(least, (self.alike.group, self.need), price)
        sizes = self.alike.sizes.astype(np.float64)
        lowest: Floats = sizes @ np.minimum.accumulate(least[:, : GRID + 1], axis=1)
        apart = max(float(duals[self._apart_row]), 0.0)
        return Prices(value, lowest - paid - _SLACK, price, apart, self._shared(duals))

    def _add_limits(self) -> bool:
        """Take in the limits that the solution breaks; whether there are any."""
        alike = self.alike
        options = np.array(list(self._options), dtype=np.int64)
        columns = np.array(list(self._options.values()), dtype=np.int32)
        values = np.array(self._solver.getSolution().col_value)
        if not len(alike.limits) or not len(options) or len(values) <= columns.max():
            return False
        used = alike.rows[:, options] @ values[columns]
        over = np.flatnonzero(used > alike.limits * (1 + 1e-7) + 1e-9).tolist()
        broken = [number for number in over if number not in self.limits]
        for number in broken:
            entries, limit = alike.rows[number, options], float(alike.limits[number])
            some = np.flatnonzero(entries)
            self._solver.addRow(-highspy.kHighsInf, limit, len(some), columns[some], entries[some])
            self.limits[number], self._count = self._count, self._count + 1
        return bool(broken)

    def _column(
        self, cost: float, entries: dict[int, float], need: int = 0, least: float = np.inf, kind: int = 0
    ) -> None:
        rows = np.array(list(entries), dtype=np.int32)
        self._solver.addCol(cost, 0.0, highspy.kHighsInf, len(rows), rows, np.array(list(entries.values())))
        self._needs.append(need)
        self._least.append(least)
        self._kinds.append(kind)
        self._opened.append(True)

    def _row(self, lower: float, upper: float) -> int:
        self._solver.addRow(lower, upper, 0, _NOTHING, np.zeros(0))
        self._count += 1
        return self._count - 1

    def _add_ways(
        self, duals: Floats, value: Floats, ways: Callable[[int, int], dict[Kind, int]], room: int, its: int
    ) -> bool:
        """The best way to fill a room, and the best that have some piece, if they are worth more than they cost."""
        limit = -float(duals[self._room_rows[its]]) * (1 + 1e-7) + 1e-9
        added = value[room, -1] > limit and self._add_way(ways(room, self.memory), its)
        kinds = sorted(kind for kind in self._kind_rows if kind[0] <= room and kind[1] <= self.memory)
        if not kinds:
            return added
        sizes, heavy = np.array(kinds).T
        own = np.maximum(duals[[self._kind_rows[kind] for kind in kinds]], 0.0)
        worth = own + value[room - sizes, self.memory - heavy]
        for at in np.argsort(-worth, kind="stable")[:_WAYS].tolist():
            if worth[at] > limit:
                kind = kinds[at]
                way = ways(room - kind[0], self.memory - kind[1])
                added |= self._add_way(way | {kind: way.get(kind, 0) + 1}, its)
        return added

    def _add_way(self, way: dict[Kind, int], its: int) -> bool:
        key = (its, tuple(sorted(way.items())))
        if key in self._ways:
            number = self._ways[key]
            if self._opened[number]:
                return False
            self._opened[number] = True
            self._solver.changeColBounds(number, 0.0, highspy.kHighsInf)
            return True
        self._ways[key] = len(self._needs)
        entries = {self._room_rows[its]: 1.0} | {self._kind_rows[kind]: float(n) for kind, n in way.items()}
        need = sum(size * count for (size, _), count in way.items())
        # What is full in memory need not be in load.
        full = sum(heavy * count for (_, heavy), count in way.items()) > _NEAR * self.memory > 0
        self._column(0.0, entries, need, np.inf if full else need, its)
        return True

    def _add_option(self, option: int, box: Box) -> bool:
        if option in self._options:
            return False
        alike = self.alike
        entries = {int(alike.group[option]): 1.0}
        for (size, heavy), count in self.pieces[option].items():
            if (size, heavy) not in self._kind_rows:
                self._kind_rows[size, heavy] = self._row(0.0, highspy.kHighsInf)
                many = self.memory // heavy if heavy else GRID
                for its, room in enumerate(box.high):
                    if size <= room and many:
                        self._add_way({(size, heavy): min(room // size, many)}, its)
            entries[self._kind_rows[size, heavy]] = -count
        if alike.share[option] > 0:
            entries |= {self._apart_row: float(alike.share[option]), self._shared_row: 1.0}
        for number, row in self.limits.items():
            if alike.rows[number, option]:
                entries[row] = float(alike.rows[number, option])
        self._options[option] = len(self._needs)
        self._column(float(self.base[option]), entries, int(self.need[option]))
        return True

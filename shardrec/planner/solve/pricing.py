"""Prices for a box of rooms: ranks filled in fractions of ways, for the smaller problem (:mod:`alike`).

:mod:`cells` says what they prove. The programme has a column for each option and each way to fill a rank; they are
generated. Gilmore and Gomory, "A linear programming approach to the cutting-stock problem" (1961). Columns stay in a
pool (:mod:`master`) when another box is priced. They are made, and the bound is taken, for prices between those of the
programme's solution and the best so far, which are not as far from each other (see :mod:`hosts`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import highspy
import numpy as np

from shardrec.planner.solve.alike import Alike
from shardrec.planner.solve.cells import SHARED, Box, Prices
from shardrec.planner.solve.differences import Differences
from shardrec.planner.solve.encode import Floats, Ints
from shardrec.planner.solve.fillings import Kind
from shardrec.planner.solve.master import Master
from shardrec.planner.solve.plane import Pieces, Plane
from shardrec.planner.solve.sizes import GRID

__all__ = ["Pricing"]

_ROUNDS = 300
_CLOSE = 3e-5
_PART, _FAR = 0.1, 3e-3
"""Of the way to what is enough, and at most: how near the bound must come to the programme's value."""
_PULL = 0.5
"""Share of the best prices so far in those that are looked at."""
_WAYS = 8
"""Ways to fill a rank that are added at a time."""
_COARSE = 4
"""Steps of memory that are one here."""
_SHORT = 0.5
"""Of all memory: so much must be in use for it to be priced."""
_OUT, _NO_SHARE, _NOT_APART = 4.0, 4.0, 40.0
"""Prices that no plan pays: for a table that stays out, and for want of shares."""
_SLACK = 1e-9
_MUCH = 1e12
_APART = 100.0
"""Steps of room that a table with shares more counts as, when boxes are compared."""


@dataclass(frozen=True, eq=False)
class _Look:
    """Prices of rows, and what they make of a box.

    Args:
        rows: at the time.
        plane: of those of kinds.
        option: (O,) price of each option.
        paid: what the other limits come to.
        bound: of the load on every rank and half of the shares.
    """

    rows: Floats
    plane: Plane
    option: Floats
    paid: float
    bound: float


_Centre = tuple[Floats, Plane | Prices, Floats]
"""Prices of rows, and of pieces and options."""


class Pricing:
    """The programme.

    Args:
        alike: the smaller problem.

    Attributes:
        base: (O,) load on every rank and half of the shares.
        need: (O,) the least room that an option's pieces fit one by one; G + 1 if there is none.
        size: (K,) steps of each piece's load.
        heavy: (K,) steps of each piece's memory, rounded down to fewer.
        table: (K,) group of each piece of which a rank has only one; else -1.
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
        self.table: Ints = np.where(alike.alone, alike.group[alike.option], -1)
        # Where the worth of each piece is, of those by memory and load.
        self._place: Ints = np.minimum(self.heavy, self.memory) * (GRID + 1) + np.minimum(self.size, GRID)
        self.pieces: list[dict[Kind, float]] = [{} for _ in alike.base]
        for option, _, (size, heavy, table), count in self.items():
            kind = size, heavy // _COARSE if self.memory else 0, table
            self.pieces[option][kind] = self.pieces[option].get(kind, 0.0) + count
        self._differences = Differences(alike, SHARED) if alike.share.any() else None
        self.prices: list[Prices] = []
        self._own: list[tuple[Prices, Floats]] = []
        self.limits: dict[int, int] = {}
        self._ends: Ints = np.append(alike.starts[1:], len(alike.base))
        self._begin()

    def _begin(self) -> None:
        self._master = Master()
        for size in self.alike.sizes.tolist():
            self._master.row(float(size), float(size))
        self._room_rows = [self._master.row(-highspy.kHighsInf, float(ranks)) for ranks in self.alike.ranks]
        self._apart_row = self._master.row(-highspy.kHighsInf, highspy.kHighsInf)
        self._shared_row = self._master.row(-highspy.kHighsInf, highspy.kHighsInf)
        self._kind_rows: dict[Kind, int] = {}
        self._of_kinds: tuple[Ints, Ints, Pieces] | None = None
        self._options: dict[int, int] = {}
        self._ways: dict[object, int] = {}
        for group in range(len(self.alike.sizes)):
            self._master.column(_OUT, {group: 1.0}, always=True)
        self._master.column(_NO_SHARE, {self._shared_row: 1.0}, always=True)
        self._master.column(_NOT_APART, {self._apart_row: 1.0}, always=True)

    def bound(self, box: Box) -> tuple[float, Prices]:
        """The best bound for a box so far, of the load on every rank and half of the shares, and its prices."""
        values = [prices.bound(box, self.alike.ranks) for prices in self.prices]
        best = int(np.argmax(values))
        return values[best], self.prices[best]

    def items(self) -> Iterator[tuple[int, int, Kind, float]]:
        """Option, part, -1 if it may be on any rank, kind and number of pieces, but for those of next to no load."""
        alike = self.alike
        columns = (alike.option, alike.part, self.size, alike.heavy, self.table, alike.count)
        for option, part, size, heavy, table, count in zip(*(column.tolist() for column in columns), strict=True):
            if size:
                yield option, part, (size, heavy, table), count

    def worth(self, prices: Prices, kinds: Sequence[Kind]) -> list[float]:
        """What a piece of each kind is worth."""
        return [
            float(prices.alone.get(table, prices.free)[size, min(heavy // _COARSE, self.memory)])
            for size, heavy, table in kinds
        ]

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
        centre, best, bound = self._open(box), None, -np.inf
        for _ in range(_ROUNDS):
            rows, objective = self._master.run()
            near, added = _CLOSE if closely else max(_CLOSE, min(_PART * (enough - objective), _FAR)), False
            # Where nothing pays between the two, something may at the solution's own.
            for at in (rows,) if centre is None else (self._pulled(centre, box, rows), rows):
                look = self._look(at, box)
                if best is None or look.bound > bound:
                    best, bound, centre = look, look.bound, (look.rows, look.plane, look.option)
                known = objective - bound <= near or (bound >= enough and not closely)
                added = not known and self._add(look, box)
                if known or added:
                    break
            if (bound >= enough and not closely) or not (added or self._add_limits()):
                break
        assert best is not None, "there is a first round"
        self._master.keep()
        self.prices.append(self._learned(best, box.high[0]))
        self._own.append((self.prices[-1], best.rows))
        return self.prices[-1]

    def _open(self, box: Box) -> _Centre | None:
        """Begin with a box; the prices that give the best bound for it, of those found here."""
        apart = box.apart if box.apart > 0 else -highspy.kHighsInf
        self._master.limit(self._apart_row, apart, highspy.kHighsInf)
        most = float(box.most) if np.isfinite(box.most) else highspy.kHighsInf
        self._master.limit(self._shared_row, float(box.least), most)
        bounds = [prices.bound(box, self.alike.ranks) for prices, _ in self._own]
        centre = None
        if np.isfinite(max(bounds, default=-np.inf)):
            prices, rows = self._own[int(np.argmax(bounds))]
            centre = rows, prices, prices.option
        about: dict[object, float] = {"tables": _APART * box.least, **dict(enumerate(box.high))}
        self._master.begin(box.high, about, None if centre is None else self._pulled(centre, box))
        return centre

    def _pulled(self, centre: _Centre, box: Box, rows: Floats | None = None) -> Floats:
        """Prices between those of a solution and others; without a solution, the others for a box."""
        its, values, options = centre
        known = len(its)
        pulled: Floats = np.append(its, np.zeros(self._master.rows - known))
        for (size, heavy, table), row in self._kind_rows.items():
            # Rows that were not there have the prices that stood for theirs.
            if row >= known:
                pulled[row] = values.alone.get(table, values.free)[size, min(heavy, self.memory)]
        for row, room in zip(self._room_rows, box.high, strict=True):
            pulled[row] = -values.value[room, -1]
        pulled[: len(self.alike.starts)] = self._lowest(options, box)
        return pulled if rows is None else _PULL * pulled + (1 - _PULL) * rows

    def _lowest(self, price: Floats, box: Box) -> Floats:
        """(G,) the least price of each table's options that fit a box."""
        found: Floats = np.minimum.reduceat(np.where(self.need <= box.high[0], price, np.inf), self.alike.starts)
        return found

    def _look(self, rows: Floats, box: Box) -> _Look:
        """Take a bound from some prices."""
        alike, plane = self.alike, self._plane(rows)
        price, paid = self._prices(rows, plane)
        lowest = self._lowest(price, box)
        rent = sum(n * float(plane.value[room, -1]) for n, room in zip(alike.ranks, box.high, strict=True))
        return _Look(rows, plane, price, paid, float(lowest @ alike.sizes) - rent - paid + self._more(rows, box))

    def _add(self, look: _Look, box: Box) -> bool:
        """Add the columns that pay at some prices; whether there are any that were not there."""
        added = False
        for kind, room in enumerate(box.high):
            added |= self._add_ways(look.rows, look.plane, room, kind)
        lowest = self._lowest(look.option, box)
        for group in np.flatnonzero(lowest < look.rows[: len(lowest)] - 1e-9).tolist():
            span = np.arange(self.alike.starts[group], self._ends[group])
            fitting = span[self.need[span] <= box.high[0]]
            added |= self._add_option(int(fitting[look.option[fitting].argmin()]), box)
        return added

    def _more(self, duals: Floats, box: Box) -> float:
        """What the two rows about shares come to."""
        shared = self._shared(duals)
        more = max(float(duals[self._apart_row]), 0.0) * box.apart
        return more + (shared * (box.least if shared > 0 else min(box.most, _MUCH)) if shared else 0.0)

    def _shared(self, duals: Floats) -> float:
        found = float(duals[self._shared_row])
        return found if abs(found) > 1e-12 else 0.0

    def _plane(self, duals: Floats) -> Plane:
        """V, and the best way to fill a room in load and memory."""
        _, rows, pieces = self._kinds()
        return Plane(pieces, np.maximum(duals[rows], 0.0))

    def _prices(self, duals: Floats, plane: Plane) -> tuple[Floats, float]:
        """(O,) the price of each option, and what the other limits come to."""
        alike, paid = self.alike, 0.0
        place = np.zeros(len(alike.sizes) + 1, dtype=np.int64)
        place[list(plane.alone)] = np.arange(1, len(plane.worth))
        worth = plane.worth.ravel()[place[self.table] * plane.free.size + self._place]
        price: Floats = self.base + np.bincount(alike.option, worth * alike.count, len(self.base))
        price -= max(float(duals[self._apart_row]), 0.0) * alike.share
        price -= self._shared(duals) * (alike.share > 0)
        for number, row in self.limits.items():
            dual = max(-float(duals[row]), 0.0) if row < len(duals) else 0.0
            if dual:
                price += dual * alike.rows[number]
                paid += dual * float(alike.limits[number])
        return price, paid

    def _learned(self, look: _Look, room: int) -> Prices:
        rows, plane, price, paid = look.rows, look.plane, look.option, look.paid
        least = np.full((len(self.alike.sizes), GRID + 2), np.inf)
        np.minimum.at(least, (self.alike.group, self.need), price)
        sizes = self.alike.sizes.astype(np.float64)
        lowest: Floats = sizes @ np.minimum.accumulate(least[:, : GRID + 1], axis=1)
        apart = max(float(rows[self._apart_row]), 0.0)
        fixed = lowest - paid - _SLACK
        shared, whole = self._shared(rows), None
        if self._differences is not None:
            own = np.where(self.need <= room, price + apart * self.alike.share, np.inf)
            numbers = np.arange(SHARED + 1)
            whole = self._differences.least(own) - paid - _SLACK + (shared * numbers)[:, None]
            if shared < 0:
                whole[SHARED] = -np.inf
        return Prices(plane.value, plane.free, plane.alone, fixed, price, apart, shared, room, whole)

    def _add_limits(self) -> bool:
        """Take in the limits that the solution breaks; whether there are any."""
        alike = self.alike
        options = np.array(list(self._options), dtype=np.int64)
        if not len(alike.limits) or not len(options):
            return False
        used = alike.rows[:, options] @ self._master.values()[list(self._options.values())]
        over = np.flatnonzero(used > alike.limits * (1 + 1e-7) + 1e-9).tolist()
        broken = [number for number in over if number not in self.limits]
        for number in broken:
            entries = {
                column: float(alike.rows[number, option])
                for option, column in self._options.items()
                if alike.rows[number, option]
            }
            self.limits[number] = self._master.row(-highspy.kHighsInf, float(alike.limits[number]), entries)
        return bool(broken)

    def _add_ways(self, duals: Floats, plane: Plane, room: int, its: int) -> bool:
        """The best way to fill a room, and the best that have some piece, if they are worth more than they cost."""
        limit = -float(duals[self._room_rows[its]]) * (1 + 1e-7) + 1e-9
        added = plane.value[room, -1] > limit and self._add_way(plane.way(room, self.memory), its)
        (sizes, heavy, table), rows, pieces = self._kinds()
        able = np.flatnonzero((sizes <= room) & (heavy <= self.memory))
        rest = room - sizes[able], self.memory - heavy[able]
        worth = np.maximum(duals[rows[able]], 0.0) + np.where(table[able] < 0, plane.value[rest], plane.free[rest])
        some = np.flatnonzero(worth > limit)
        for at in able[some[np.argsort(-worth[some], kind="stable")[:_WAYS]]].tolist():
            kind = pieces.kinds[at]
            way = plane.way(room - kind[0], self.memory - kind[1], free=kind[2] >= 0)
            added |= self._add_way(way | {kind: way.get(kind, 0) + 1}, its)
        return added

    def _kinds(self) -> tuple[Ints, Ints, Pieces]:
        """(3, K) the kinds of pieces that have rows, ascending, (K,) their rows, and the same kinds apart."""
        if self._of_kinds is None or len(self._of_kinds[1]) != len(self._kind_rows):
            kinds = sorted(self._kind_rows)
            rows = np.array([self._kind_rows[kind] for kind in kinds], dtype=np.int64)
            each: Ints = np.array(kinds, dtype=np.int64).reshape(-1, 3).T.copy()
            self._of_kinds = each, rows, Pieces(kinds, GRID, self.memory)
        return self._of_kinds

    def _add_way(self, way: dict[Kind, int], its: int) -> bool:
        key = its, frozenset(way.items())
        if key in self._ways:
            return self._master.enter(self._ways[key])
        entries = {self._room_rows[its]: 1.0} | {self._kind_rows[kind]: float(n) for kind, n in way.items()}
        need = sum(size * count for (size, _, _), count in way.items())
        self._ways[key] = self._master.column(0.0, entries, need, its)
        return True

    def _add_option(self, option: int, box: Box) -> bool:
        if option in self._options:
            return self._master.enter(self._options[option])
        alike = self.alike
        entries = {int(alike.group[option]): 1.0}
        for kind, count in self.pieces[option].items():
            size, heavy, table = kind
            if kind not in self._kind_rows:
                self._kind_rows[kind] = self._master.row(0.0, highspy.kHighsInf)
                many = 1 if table >= 0 else self.memory // heavy if heavy else GRID
                for its, room in enumerate(box.high):
                    if size <= room and many:
                        self._add_way({kind: min(room // size, many)}, its)
            entries[self._kind_rows[kind]] = -count
        if alike.share[option] > 0:
            entries |= {self._apart_row: float(alike.share[option]), self._shared_row: 1.0}
        for number, row in self.limits.items():
            if alike.rows[number, option]:
                entries[row] = float(alike.rows[number, option])
        self._options[option] = self._master.column(float(self.base[option]), entries, int(self.need[option]))
        return True

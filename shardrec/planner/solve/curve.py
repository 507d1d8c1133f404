"""A bound of the load on every rank for each room for pieces: hosts and ranks filled in fractions of ways.

Let E be what the chosen options put on every rank, and c the most that the pieces of a rank come to; the cost is E + c.
Loads are counted in steps, G of them to a load that no useful plan exceeds, and pieces are rounded down to whole steps.
A rank whose pieces come to less than r + 1 steps has *room* r.

Some parts put something on each rank of a host. Such a part is taken as its least piece n on all L ranks, and what its
other pieces have beyond that as free pieces. Then a host with parts of n1, n2, ..., N in all, has ranks with room r - N
for free pieces, and with V the value of free pieces by size and W that of the parts that come to N, no host is worth
more than

    top(r) = max over N of  W(N) + L V(r - N)

so that every choice of options that fits room r satisfies, for any such V and W,

    sum over tables of (V of its free pieces + W of its parts)  <=  H top(r)

which is linear in the choice, and of which only the right-hand side depends on r (:mod:`rows`). Hence also

    E  >=  sum over tables of the least (load on every rank + V of its free pieces + W of its parts)  -  H top(r)

for *every* r (Lagrange): one pair of functions gives a bound for all rooms, and the best of several are kept as one
curve. V is the value function of a knapsack (:mod:`knapsack`), and W that of one in which no part is used more often
than there are such parts. Their prices are the dual values of a programme for one room, with a column for each option,
each way to fill a rank that has so much room, and each set of parts on a host. Columns are generated, and stay when
another room is priced.

A part's largest piece, e beyond n, must fit a rank of the same host: parts are on a host only if e <= r - N, so that W
depends on the largest e that is allowed. That is all that is said of where on the host the rest of the pieces are.
Memory enters by rows of its own. A part without a price of its own may count as free pieces, n on each rank.

Shapes: G steps, O options, H hosts of L ranks (or R of one rank, where no part is bound to a host), N rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import highspy
import numpy as np

from shardrec.planner.solve.encode import Encoded, Floats, Ints
from shardrec.planner.solve.knapsack import knapsack, knapsacks
from shardrec.planner.solve.rows import Rows
from shardrec.planner.solve.sizes import GRID, Sizes

__all__ = ["Curve"]

_ROUNDS = 250
_CLOSE = 3e-5
_FAR, _PART = 0.03, 0.1
_WAYS = 12
"""Ways to fill a rank that are added at a time."""
_NOTHING = np.zeros(0, dtype=np.int32)
_SLACK = 1e-9


@dataclass(frozen=True, eq=False)
class _Values:
    """V and W.

    Args:
        sizes: of free pieces that have a price.
        free: (G + 1,) V.
        ways: the best multiset of those sizes within a size.
        parts: kinds of parts that have a price, those with the least e first.
        edges: of e, ascending, the first is 0.
        bound: (edges, G + 1) W, of parts whose e is at most an edge.
        sets: for a size and the number of an edge, how many of each kind are in the best set.
        price: of each kind of part.
    """

    sizes: list[int]
    free: Floats
    ways: Callable[[int], Ints]
    parts: list[int]
    edges: Ints
    bound: Floats
    sets: Callable[[int, int], Ints]
    price: Floats

    def edge(self, most: Ints) -> Ints:
        """Numbers of the edges that e is limited to."""
        found: Ints = np.searchsorted(self.edges, most, side="right") - 1
        return found

    def top(self, room: int, local: int) -> tuple[float, int]:
        """The most that a host is worth, and the N of it."""
        if not self.parts:
            return local * float(self.free[room]), 0
        filled = np.arange(room + 1)
        worth = self.bound[self.edge(room - filled), filled] + local * self.free[room - filled]
        return float(worth.max()), int(worth.argmax())


class Curve:
    """The bounds for all rooms.

    Args:
        encoded: the problem.
        most: load of room G.
        rows: other limits.
    """

    def __init__(self, encoded: Encoded, most: float, rows: Rows) -> None:
        self.encoded, self._rows = encoded, rows
        self.step, self._most = most / GRID, most
        sizes = self._sizes = Sizes(encoded, self.step)
        self._local, self._hosts = sizes.local, encoded.ranks // sizes.local
        self.need: Ints = np.where(rows.fits, self._sizes.need, GRID + 1)
        """(O,) the least room that an option's pieces fit one by one."""
        self._starts = np.array([span.start for span in encoded.group_options], dtype=np.int64)
        self._base = encoded.base_load / most
        self.curve: Floats = np.full(GRID + 1, -np.inf)
        """(G + 1,) by room, a bound of E."""
        self._begin()

    def _begin(self) -> None:
        self._solver: Any = highspy.Highs()  # type: ignore[no-untyped-call]
        for name, value in (
            ("output_flag", False),
            ("threads", 1),
            ("random_seed", 0),
            ("presolve", "off"),
            ("simplex_strategy", 4),
        ):
            self._solver.setOptionValue(name, value)
        # Rows: one per group, one for the hosts, then those of sizes, parts, rooms and other limits as they are needed.
        self._count = 0
        for size in self.encoded.sizes.tolist():
            self._row(float(size), float(size))
        self._host_row = self._row(-highspy.kHighsInf, float(self._hosts))
        self._size_rows: dict[int, int] = {}
        self._part_rows: dict[int, int] = {}
        self._room_rows: dict[int, int] = {}
        self._limit_rows: dict[int, int] = {}
        self._needs: list[int] = []  # of each column, the room from which on it may be used
        self._made: set[object] = set()
        self._option_columns: dict[int, int] = {}
        for group in range(len(self.encoded.groups)):
            self._column(4.0, {group: 1.0}, 0)  # a table may stay out, at a price that no plan pays
        self._add_set({})

    def deciding(self) -> tuple[float, int]:
        """The least cost that the curve allows, in whatever room, and the room."""
        cost = np.arange(GRID + 1) * self.step + np.maximum(self.curve, 0.0)
        room = int(cost.argmin())
        return min(float(cost[room]), self._most), room

    def lift(self, target: float, rounds: int, stop: Callable[[], bool]) -> float:
        """Raise the least point again and again; the bound of the cost that this comes to.

        A bound for a room holds for all below it: so one that is a little above the deciding room is priced, the more
        the further there is to go.

        Args:
            target: a cost that is enough.
            rounds: most rooms to price.
            stop: asked between them.
        """
        width = GRID // 50
        for _ in range(rounds):
            before, room = self.deciding()
            if before >= target or stop():
                break
            width = max(min(width, int((target - before) / 2 / self.step)), 0)
            above = min(room + width, GRID)
            low, least = room * self.step, before + (target - before) / 4
            self.price(above, target - low, least - low if above > room else -np.inf)
            after, now = self.deciding()
            if after < least and now <= above:
                if width == 0 and after <= before * (1 + 1e-5):
                    break
                width //= 3
        return self.deciding()[0] * (1 - 1e-9)

    def price(self, room: int, enough: float, hopeless: float = -np.inf) -> None:
        """Raise the curve where it is for a room.

        Args:
            room: in steps.
            enough: a bound of E that is as good as any.
            hopeless: a bound of E for which it is not worth going on, if nothing higher can be reached.
        """
        self._open(room)
        best, prices = -np.inf, np.zeros(self._count)
        for _ in range(_ROUNDS):
            duals, objective = self._run()
            values = self._values(duals)
            price, paid = self._prices(duals, values, room)
            price = np.where(self.need <= room, price, np.inf)
            top, filled = values.top(room, self._local)
            lowest = np.minimum.reduceat(price, self._starts)
            bound = float(lowest @ self.encoded.sizes) - self._hosts * top - paid
            if bound > best:
                best, prices = bound, duals
            if best * self._most > enough or objective * self._most < hopeless:
                break
            # Far from enough, the last tenth of the way makes no difference.
            far = min(enough / self._most - objective, _FAR)
            if objective - best <= max(_CLOSE, _PART * far):
                if self._add_limits(room):
                    continue
                break
            added = self._add_ways(values, duals, room, top, filled)
            for group in np.flatnonzero(lowest < duals[: len(lowest)] - 1e-9):
                span = self.encoded.group_options[group]
                added |= self._add_option(span.start + int(price[span.start : span.stop].argmin()), room)
            if not added and not self._add_limits(room):
                break
        self._learn(prices, room)

    def _open(self, room: int) -> None:
        """Allow the columns that the room has room for."""
        upper = np.where(np.array(self._needs) <= room, highspy.kHighsInf, 0.0)
        columns = len(upper)
        self._solver.changeColsBounds(columns, np.arange(columns, dtype=np.int32), np.zeros(columns), upper)
        for number, row in self._limit_rows.items():
            self._solver.changeRowBounds(row, -highspy.kHighsInf, self._limit(number, room))

    def _run(self) -> tuple[Floats, float]:
        self._solver.run()
        return np.array(self._solver.getSolution().row_dual), float(self._solver.getInfo().objective_function_value)

    def _limit(self, number: int, room: int) -> float:
        return float(self._rows.limits[number] + self._rows.slopes[number] * (room + 1) * self.step)

    def _add_limits(self, room: int) -> bool:
        """Take in the limits that the solution breaks; whether there are any."""
        if not len(self._rows.limits):
            return False
        options = np.array(list(self._option_columns), dtype=np.int64)
        columns = np.array(list(self._option_columns.values()), dtype=np.int32)
        values = np.array(self._solver.getSolution().col_value)
        if not len(options) or len(values) <= columns.max():
            return False
        used = self._rows.matrix[:, options] @ values[columns]
        limits = self._rows.limits + self._rows.slopes * ((room + 1) * self.step)
        broken = [int(n) for n in np.flatnonzero(used > limits * (1 + 1e-7) + 1e-9) if int(n) not in self._limit_rows]
        for number in broken:
            entries = self._rows.matrix[number, options]
            some = np.flatnonzero(entries)
            self._solver.addRow(-highspy.kHighsInf, self._limit(number, room), len(some), columns[some], entries[some])
            self._limit_rows[number], self._count = self._count, self._count + 1
        return bool(broken)

    def _values(self, duals: Floats) -> _Values:
        sizes = sorted(self._size_rows)
        worth = np.maximum(duals[[self._size_rows[size] for size in sizes]], 0.0) if sizes else np.zeros(0)
        free, ways = knapsack(np.array(sizes, dtype=np.int64), worth, GRID)
        price = np.zeros(len(self._sizes.kinds))
        for kind, row in self._part_rows.items():
            price[kind] = max(float(duals[row]), 0.0) if row < len(duals) else 0.0
        some = sorted(np.flatnonzero(price > 1e-12).tolist(), key=lambda kind: (self._sizes.kinds[kind][1], kind))
        parts = [self._sizes.kinds[kind] for kind in some]
        edges = sorted({0, *(beyond for _, beyond in parts)})
        ends = np.searchsorted([beyond for _, beyond in parts], edges, side="right").tolist()
        least = np.array([least for least, _ in parts], dtype=np.int64)
        bound, sets = knapsacks(least, price[some], GRID, ends, self._sizes.there[some])
        return _Values(sizes, free, ways, some, np.array(edges, dtype=np.int64), bound, sets, price)

    def _worth(self, values: _Values) -> Floats:
        """(O,) the value of the pieces of each option."""
        options = len(self.encoded.options)
        free = values.free[np.minimum(self._sizes.free, GRID)] * self._sizes.free_count
        # A part may be taken as free pieces, too: V of its least piece on each rank.
        alike = self._local * values.free[np.minimum(self._sizes.bound, GRID)]
        part = np.maximum(values.price[self._sizes.kind], alike) * self._sizes.bound_count
        worth: Floats = np.zeros(options)
        worth += np.bincount(self._sizes.free_option, free, options)
        worth += np.bincount(self._sizes.bound_option, part, options)
        return worth

    def _prices(self, duals: Floats, values: _Values, room: int) -> tuple[Floats, float]:
        """(O,) load on every rank, value and use of other limits of each option; and what all of those limits cost."""
        price, paid = self._base + self._worth(values), 0.0
        for number, row in self._limit_rows.items():
            dual = max(-float(duals[row]), 0.0) if row < len(duals) else 0.0
            price += dual * self._rows.matrix[number]
            paid += dual * self._limit(number, room)
        return price, paid

    def _learn(self, duals: Floats, room: int) -> None:
        """Raise the curve by the functions of some prices, and keep them."""
        values = self._values(np.append(duals, np.zeros(self._count - len(duals))))
        price, _ = self._prices(duals, values, room)
        least = np.full((len(self.encoded.groups), GRID + 2), np.inf)
        np.minimum.at(least, (self.encoded.option_group, self.need), price)
        lowest = self.encoded.sizes @ np.minimum.accumulate(least[:, : GRID + 1], axis=1)
        tops = self._hosts * np.array([values.top(each, self._local)[0] for each in range(GRID + 1)])
        paid = np.zeros(GRID + 1)
        for number, row in self._limit_rows.items():
            dual = max(-float(duals[row]), 0.0) if row < len(duals) else 0.0
            paid += dual * (self._rows.limits[number] + self._rows.slopes[number] * np.arange(1, GRID + 2) * self.step)
        found = (lowest - tops - paid - _SLACK) * self._most
        # A bound for some room is one for less room.
        found = np.maximum.accumulate(np.maximum(self.curve, found)[::-1])[::-1]
        self.curve = found

    def _add_ways(self, values: _Values, duals: Floats, room: int, top: float, filled: int) -> bool:
        """The best set of parts on a host, and the best ways to fill ranks of each room; whether they are better."""
        added = False
        if top > -duals[self._host_row] * (1 + 1e-7) + 1e-12:
            counts = values.sets(filled, int(values.edge(np.array([room - filled]))[0])).tolist()
            added |= self._add_set({part: n for part, n in zip(values.parts, counts, strict=True) if n})
        over = {
            there: values.free[room - there] + duals[row] * (1 + 1e-7) - 1e-12
            for there, row in self._room_rows.items()
            if there <= room and row < len(duals)
        }
        for there in sorted(over, key=lambda there: -over[there])[:_WAYS]:
            if over[there] > 0:
                added |= self._add_way(dict(zip(values.sizes, values.ways(room - there).tolist(), strict=True)), there)
        return added

    def _column(self, cost: float, entries: dict[int, float], need: int) -> None:
        rows = np.array(list(entries), dtype=np.int32)
        self._solver.addCol(cost, 0.0, highspy.kHighsInf, len(rows), rows, np.array(list(entries.values())))
        self._needs.append(need)

    def _row(self, lower: float, upper: float) -> int:
        self._solver.addRow(lower, upper, 0, _NOTHING, np.zeros(0))
        self._count += 1
        return self._count - 1

    def _new(self, key: object) -> bool:
        if key in self._made:
            return False
        self._made.add(key)
        return True

    def _add_set(self, parts: dict[int, int]) -> bool:
        """A set of parts on a host; ranks of hosts with N are L for each, less the ways to fill them: at least 0."""
        if not self._new(tuple(sorted(parts.items()))):
            return False
        filled = sum(self._sizes.kinds[kind][0] * count for kind, count in parts.items())
        if filled not in self._room_rows:
            self._room_rows[filled] = self._row(-highspy.kHighsInf, 0.0)
        entries = {self._host_row: 1.0, self._room_rows[filled]: -float(self._local)}
        entries |= {self._part_rows[kind]: float(count) for kind, count in parts.items()}
        self._column(0.0, entries, filled + max((self._sizes.kinds[kind][1] for kind in parts), default=0))
        return True

    def _add_way(self, way: dict[int, int], filled: int) -> bool:
        way = {size: count for size, count in way.items() if count}
        if not self._new((filled, tuple(sorted(way.items())), "way")):
            return False
        entries = {self._room_rows[filled]: 1.0} | {self._size_rows[size]: float(n) for size, n in way.items()}
        self._column(0.0, entries, filled + sum(size * count for size, count in way.items()))
        return True

    def _add_option(self, option: int, room: int) -> bool:
        if option in self._option_columns:
            return False
        entries = {int(self.encoded.option_group[option]): 1.0}
        for item in np.flatnonzero((self._sizes.free_option == option) & (self._sizes.free > 0)):
            size = int(self._sizes.free[item])
            if size not in self._size_rows:
                self._size_rows[size] = self._row(0.0, highspy.kHighsInf)
                for count in {1, max(1, room // size)}:
                    self._add_way({size: count}, 0)
            row = self._size_rows[size]
            entries[row] = entries.get(row, 0.0) - float(self._sizes.free_count[item])
        for item in np.flatnonzero((self._sizes.bound_option == option) & (self._sizes.bound > 0)):
            part = int(self._sizes.kind[item])
            if part not in self._part_rows:
                self._part_rows[part] = self._row(0.0, highspy.kHighsInf)
                self._add_set({part: 1})
            row = self._part_rows[part]
            entries[row] = entries.get(row, 0.0) - float(self._sizes.bound_count[item])
        for number, row in self._limit_rows.items():
            if self._rows.matrix[number, option]:
                entries[row] = float(self._rows.matrix[number, option])
        self._option_columns[option] = len(self._needs)
        self._column(float(self._base[option]), entries, int(self.need[option]))
        return True

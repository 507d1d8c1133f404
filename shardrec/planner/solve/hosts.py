"""A bound of the load on every rank for each room for pieces, and plans: hosts hold sets of parts that really fit them.

Let E be what the chosen options put on every rank, and c the most that the pieces of a rank come to; the cost is E + c.
Loads are counted in steps, rounded down; a rank whose pieces come to less than r + 1 steps has *room* r. For one room,
the programme

    minimise    E
    where       each table takes one option,
                the sets of parts on the hosts hold the parts of the options used (:mod:`sets`: a set fits),
                no more sets are used than there are hosts,
                the ways to fill ranks hold the free pieces of the options used,
                no more ways are used than ranks are left by the sets, for each load of the parts on a rank

has an answer wherever the room suffices. Its fractional optimum bounds E: for any prices for parts, with V the value
function of a knapsack for free pieces (:mod:`knapsack`) and top for the best set on a host with its ranks filled up,

    E  >=  sum over tables of the least (load on every rank + V of its free pieces + prices of its parts)  -  H top

and columns are generated. Columns stay when another room is looked at: sets and ways know what room they need. A slot
for a part holds any part that is nowhere larger, a rank with less on it is as good as one with more.

Prices that come of one solution are far from those of the next, and bound little. So columns are made, and the bound
is taken, for prices between them and the best so far (Wentges, "Weighted Dantzig-Wolfe decomposition for linear
mixed-integer programming", 1997); the best for one room are where the next begins.

Solved for whole numbers, the programme says what is on each host and each rank: a plan, but for the rounding.

Shapes: G steps, O options, H hosts of L ranks, K kinds of parts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from shardrec.planner.solve.encode import Encoded, Floats, Ints
from shardrec.planner.solve.hostcolumns import HostColumns
from shardrec.planner.solve.hostplan import unpacked, whole_numbers
from shardrec.planner.solve.inside import Inside
from shardrec.planner.solve.knapsack import knapsack
from shardrec.planner.solve.packing import Packing
from shardrec.planner.solve.rows import Rows
from shardrec.planner.solve.sets import Found, best_sets

__all__ = ["Hosts"]

GRID = 1000
_ROUNDS = 200
_CLOSE = 1e-4
_SLACK = 1e-9
_TIE = 5e-4
"""What all hosts' best sets may be worth more than is known, against the cost, to be as good as known."""
_BRIEF = 1e-3
"""By how much no bound is enough, against the cost, when a room is left."""
_PULL = 0.7
"""Share of the best prices so far in those that are looked at."""
_WAYS, _SETS, _OPTIONS = 30, 8, 3
"""Columns of a kind that are added at a time: per programme, per programme, and per group."""
_LESS, _SPREAD = 0.1, 0.02
"""What sets may be worth less than a host and still say how good its best one is; and less than that, to be added."""
_BEAM = 30
_NEAR, _NEAR_SETS, _NEAR_OPTIONS = 0.1, 100, 150
"""Sets that are worth nearly as much as the best, when whole numbers are wanted."""


@dataclass(frozen=True, eq=False)
class _Prices:
    """Prices of rows, and what they make of everything.

    Args:
        rows: (rows,) at the time.
        free: (G + 1,) V.
        part: (K,) of each kind of part.
        bound: of the load on every rank, in the room they were made for.
        added: whether they led to columns.
        open: whether the best sets may be worth more than is known.
    """

    rows: Floats
    free: Floats
    part: Floats
    bound: float
    added: bool
    open: bool


class Hosts:
    """The programme, for all rooms.

    Args:
        encoded: the problem.
        most: load of room G.
        rows: other limits.
        small: part of G up to which parts count as free pieces.

    Attributes:
        step: load of a step.
        reached: if the last room was left as no bound was enough, what none is above; else infinite.
    """

    def __init__(self, encoded: Encoded, most: float, rows: Rows, small: float) -> None:
        self.encoded, self._rows, self.most = encoded, rows, most
        self.step = most / GRID
        self.inside = Inside(encoded, self.step, GRID, int(small * GRID))
        self._hosts = len(self.inside.hosts)
        self._need: Ints = np.where(rows.fits, self.inside.need, GRID + 1)
        self._starts = np.array([span.start for span in encoded.group_options], dtype=np.int64)
        self._base: Floats = encoded.base_load / most
        kinds = self.inside.kinds
        none: Ints = np.zeros((0, self.inside.local), dtype=np.int64)
        self._ways: Ints = np.minimum(np.concatenate([none, *kinds]), GRID)
        self._first_ways = np.cumsum([0, *(len(ways) for ways in kinds[:-1])]) if kinds else none[:, 0]
        self.columns = HostColumns(encoded, self.inside, self._need, rows, most, self.step)
        self._best: _Prices | None = None
        self._best_of: dict[object, _Prices] = {}
        self.reached = np.inf

    def price(self, room: int, enough: float, stop: Callable[[], bool], *, brief: bool = False) -> float:
        """A bound of E for a room, and so for all below it.

        Args:
            room: in steps.
            enough: a bound that is as good as any.
            stop: asked between rounds.
            brief: whether to leave it as soon as it is known that no bound is enough.
        """
        self.reached = np.inf
        if not self._possible(room):
            return np.inf
        columns, best, case = self.columns, -np.inf, tuple(sorted(self.columns.counts.items()))
        columns.open(room)
        self._best = self._best_of.get(case, self._best)

        def learn(prices: _Prices) -> _Prices:
            nonlocal best
            if prices.bound > best:
                best, self._best = prices.bound, prices
                self._best_of[case] = prices
            return prices

        if self._best is not None:
            learn(self._look(self._pulled(None, room), room, pulled=True))
        for _ in range(_ROUNDS):
            if best * self.most > enough or stop():
                break
            rows, objective = columns.run()
            if brief and objective * self.most < enough - _BRIEF * self.most and best > -np.inf:
                self.reached = objective * self.most
                break
            found = learn(self._look(self._pulled(rows, room), room, pulled=self._best is not None))
            if best * self.most <= enough and objective - best > _CLOSE + _TIE:
                if not found.added and self._best is not None:
                    found = learn(self._look(rows, room, pulled=False))
                if not found.added and found.open:
                    # Nothing better was found in haste: now look at all of them.
                    found = learn(self._look(rows, room, pulled=False, beam=0))
                if found.added:
                    continue
            if best * self.most > enough or not columns.add_limits():
                break
        return (best - _SLACK) * self.most

    def _look(self, rows: Floats, room: int, *, pulled: bool, beam: int = _BEAM) -> _Prices:
        """Take a bound from some prices, and add the columns that pay at them."""
        free, ways, part = self._values(rows)
        price, paid = self._prices(rows, free, part)
        price = np.where(self._need <= room, price, np.inf)
        lowest = np.minimum.reduceat(price, self._starts)
        rent = max(-float(rows[self.columns.host_row]), 0.0)
        least = rent * (1 - _LESS) if pulled else rent if beam else rent + _TIE / self._hosts
        found = best_sets(self.inside, room, self._own(part), free, least=least, beam=beam, near=_SPREAD * rent)
        added = self._add_sets(found, rent, _SETS)
        added |= self._add_ways(free, ways, rows, room, found.loads[0].tolist() if len(found.loads) else [])
        added |= self._add_options(price, lowest, rows)
        rows = rows.copy()
        rows[self.columns.host_row] = -found.most
        bound = float(lowest @ self.encoded.sizes) - paid - self._hosts * found.most
        return _Prices(rows, free, part, bound, added, bool(beam) and found.most > rent * (1 + 1e-7) + 1e-12)

    def _pulled(self, rows: Floats | None, room: int) -> Floats:
        """Prices between those of a solution and the best so far; without a solution, the best."""
        best, columns = self._best, self.columns
        if best is None:
            assert rows is not None, "there are best prices before a room is looked at without a solution"
            return rows
        known = len(best.rows)
        pulled: Floats = np.append(best.rows, np.zeros(columns.rows - known))
        # Rows that were not there have the prices that stood for theirs.
        for size, row in columns.size_rows.items():
            if row >= known:
                pulled[row] = best.free[size]
        for kind, row in columns.part_rows.items():
            if row >= known:
                pulled[row] = best.part[kind]
        filled = np.array(list(columns.filled_rows), dtype=np.int64)
        pulled[list(columns.filled_rows.values())] = best.free[np.maximum(room - filled, 0)]
        if rows is None:
            return pulled
        pulled[: len(rows)] = _PULL * pulled[: len(rows)] + (1 - _PULL) * rows
        return pulled

    def plan(self, room: int, cutoff: float, *, nodes: int, seconds: float) -> Packing | None:
        """A packing whose rooms are about so many steps; None if none was found.

        Args:
            room: that was priced.
            cutoff: a load on every rank that is of no use.
            nodes: most branches.
            seconds: time limit.
        """
        if not self._possible(room):
            return None
        columns = self.columns
        columns.open(room)
        rows, objective = columns.run()
        if objective * self.most >= cutoff:
            return None
        free, _, part = self._values(rows)
        rent = max(-float(rows[columns.host_row]), 0.0)
        own, least = self._own(part), rent * (1 - _NEAR)
        near = best_sets(self.inside, room, own, free, least=least, beam=_BEAM, near=rent * _NEAR, every=True)
        self._add_sets(near, -1.0, _NEAR_SETS)
        price, _ = self._prices(rows, free, part)
        extra = np.where(self._need <= room, price - rows[self.encoded.option_group], np.inf)
        for option in np.argsort(extra, kind="stable")[:_NEAR_OPTIONS].tolist():
            if extra[option] < cutoff / self.most - objective:
                columns.add_option(option)
        columns.open(room)
        _, objective = columns.run()
        extra = np.array(columns.solver.getSolution().col_dual)
        most = np.where(extra > cutoff / self.most - objective, 0.0, columns.most_of_each())
        values = whole_numbers(columns.solver, most, cutoff=cutoff / self.most, nodes=nodes, seconds=seconds)
        return None if values is None else unpacked(self.encoded, self.inside, columns.tags, values)

    def extra(self, room: int) -> Floats:
        """(O,) by how much an option's price is above the least of its group, at the best prices for a room."""
        assert self._best is not None, "a room was priced before"
        rows = self._pulled(None, room)
        free, _, part = self._values(rows)
        price = np.where(self._need <= room, self._prices(rows, free, part)[0], np.inf)
        return (price - np.minimum.reduceat(price, self._starts)[self.encoded.option_group]) * self.most

    def _possible(self, room: int) -> bool:
        fits = self._need <= room
        return all(fits[span.start : span.stop].any() for span in self.encoded.group_options)

    def _values(self, rows: Floats) -> tuple[Floats, Callable[[int], dict[int, int]], Floats]:
        """V, the ways that have it, and the price of each kind of part."""
        sizes, prices = self._priced(self.columns.size_rows, rows)
        free, pieces = knapsack(sizes, prices, GRID)
        # A set with another part could have smaller ones, or free pieces, in its place.
        part: Floats = np.zeros(len(self.inside.kinds))
        if len(part):
            part = np.minimum.reduceat(free[self._ways].sum(axis=1), self._first_ways)
            kinds, prices = self._priced(self.columns.part_rows, rows)
            if len(kinds):
                part = np.maximum(part, (self.inside.under[:, kinds] * prices).max(axis=1))
                part[kinds] = prices
        return free, lambda size: {s: n for s, n in zip(sizes.tolist(), pieces(size).tolist(), strict=True) if n}, part

    @staticmethod
    def _priced(row_of: dict[int, int], rows: Floats) -> tuple[Ints, Floats]:
        """What has a row, and its price."""
        names = np.array(sorted(name for name, row in row_of.items() if row < len(rows)), dtype=np.int64)
        return names, np.maximum(rows[[row_of[name] for name in names.tolist()]], 0.0)

    def _own(self, part: Floats) -> Floats:
        """Prices without those of kinds that have none of their own."""
        own = np.zeros(len(part))
        kinds = list(self.columns.part_rows)
        own[kinds] = part[kinds]
        return own

    def _prices(self, rows: Floats, free: Floats, part: Floats) -> tuple[Floats, float]:
        """(O,) load on every rank, value and use of other limits of each option; and what all of those limits cost."""
        options = len(self.encoded.options)
        price, paid = self._base.copy(), 0.0
        pieces, parts = self.inside.free, self.inside.parts
        price += np.bincount(pieces[:, 0], free[np.minimum(pieces[:, 1], GRID)] * pieces[:, 2], options)
        price += np.bincount(parts[:, 0], part[parts[:, 1]] * parts[:, 2], options)
        for number, row in self.columns.limit_rows.items():
            dual = max(-float(rows[row]), 0.0)
            price += dual * self._rows.matrix[number]
            paid += dual * self.columns.limit(number)
        for load, (lower, upper) in self.columns.counts.items():
            row, there = self.columns.count_rows[load]
            limit = lower if rows[row] > 0 else upper
            if np.isfinite(limit):
                price -= rows[row] * there
                paid -= float(rows[row]) * limit
        return price, paid

    def _add_sets(self, found: Found, rent: float, most: int) -> bool:
        added, seen = 0, set()
        for value, kinds, loads in zip(found.values.tolist(), found.sets.tolist(), found.loads, strict=True):
            if value <= rent * (1 + 1e-7) + 1e-12 or added >= most:
                break
            parts = tuple(kind for kind in kinds if kind >= 0)
            if parts not in seen:
                seen.add(parts)
                added += self.columns.add_set(parts, loads)
        return bool(added)

    def _add_ways(
        self, free: Floats, ways: Callable[[int], dict[int, int]], rows: Floats, room: int, also: Sequence[int]
    ) -> bool:
        """Ways to fill up ranks that pay, and for ranks of a set."""
        there = [
            (filled, row) for filled, row in self.columns.filled_rows.items() if filled <= room and row < len(rows)
        ]
        filled, at = (np.array(each, dtype=np.int64) for each in zip(*there, strict=True))
        over = free[room - filled] - rows[at] * (1 + 1e-7) - 1e-12
        some = [number for number in np.argsort(-over, kind="stable")[:_WAYS].tolist() if over[number] > 0]
        new = [load for load in also if self.columns.filled_rows.get(load, len(rows)) >= len(rows)]
        added = False
        for load in dict.fromkeys([*filled[some].tolist(), *new]):
            added |= self.columns.add_way(ways(room - load), load)
        return added

    def _add_options(self, price: Floats, lowest: Floats, rows: Floats) -> bool:
        added = False
        for group in np.flatnonzero(lowest < rows[: len(lowest)] - 1e-9).tolist():
            span = self.encoded.group_options[group]
            part = price[span.start : span.stop]
            for option in np.argsort(part, kind="stable")[:_OPTIONS].tolist():
                if part[option] < rows[group] - 1e-9:
                    added |= self.columns.add_option(span.start + option)
        return added

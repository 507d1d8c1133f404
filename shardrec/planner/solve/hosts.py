"""A bound of the load on every rank for each room for pieces, and plans: hosts hold sets of parts that really fit them.

As :mod:`curve` has it, E is what the chosen options put on every rank, and c the most that the pieces of a rank come
to; loads are counted in steps, rounded down. For one *room*, the programme

    minimise    E
    where       each table takes one option,
                the sets of parts on the hosts hold the parts of the options used (:mod:`inside`: a set fits),
                no more sets are used than there are hosts,
                the ways to fill ranks hold the free pieces of the options used,
                no more ways are used than ranks are left by the sets, for each load of the parts on a rank

has an answer wherever the room suffices. Its fractional optimum bounds E by the same reasoning as in :mod:`curve`: with
prices for parts, V for free pieces and top for the best set on a host with its ranks filled up,

    E  >=  sum over tables of the least (load on every rank + V of its free pieces + prices of its parts)  -  H top

and columns are generated. What differs is that there, a host's parts had only to fit by their least pieces, and their
other pieces could be anywhere. Columns stay when another room is looked at: sets and ways know what room they need.
A slot for a part holds any part that is nowhere larger, a rank with less on it is as good as one with more.

Solved for whole numbers, the programme says what is on each host and each rank: a plan, but for the rounding.

Shapes: G steps, O options, H hosts of L ranks, K kinds of parts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import highspy
import numpy as np

from shardrec.planner.solve.encode import Encoded, Floats, Ints
from shardrec.planner.solve.hostplan import unpacked, whole_numbers
from shardrec.planner.solve.inside import Found, Inside, best_sets
from shardrec.planner.solve.knapsack import knapsack
from shardrec.planner.solve.packing import Packing
from shardrec.planner.solve.rows import Rows

__all__ = ["Hosts"]

GRID = 1000
_ROUNDS = 200
_CLOSE = 1e-4
_SLACK = 1e-9
_TIE = 5e-4
"""What all hosts' best sets may be worth more than is known, against the cost, to be as good as known."""
_WAYS, _SETS, _OPTIONS = 12, 8, 3
"""Columns of a kind that are added at a time: per programme, per programme, and per group."""
_BEAMS = (30,)
_NEAR, _NEAR_SETS, _NEAR_OPTIONS = 0.1, 100, 150
"""Sets that are worth nearly as much as the best, when whole numbers are wanted."""
_NOTHING = np.zeros(0, dtype=np.int32)


class Hosts:
    """The programme, for all rooms.

    Args:
        encoded: the problem.
        most: load of room G.
        rows: other limits.
        small: part of G up to which parts count as free pieces.
    """

    def __init__(self, encoded: Encoded, most: float, rows: Rows, small: float) -> None:
        self.encoded, self._rows, self.most = encoded, rows, most
        self.step = most / GRID
        self.inside = Inside(encoded, self.step, GRID, int(small * GRID))
        self._count_hosts = len(self.inside.hosts)
        self._need: Ints = np.where(rows.fits, self.inside.need, GRID + 1)
        self._starts = np.array([span.start for span in encoded.group_options], dtype=np.int64)
        self._base: Floats = encoded.base_load / most
        self._begin()

    def _begin(self) -> None:
        self._solver: Any = highspy.Highs()  # type: ignore[no-untyped-call]
        for name, value in (("output_flag", False), ("threads", 1), ("random_seed", 0), ("presolve", "off")):
            self._solver.setOptionValue(name, value)
        self._rows_made = 0
        self._columns: list[tuple[Any, ...]] = []
        self._needs: list[int] = []
        self._made: set[object] = set()
        for size in self.encoded.sizes.tolist():
            self._row(float(size), float(size))
        self._host_row = self._row(-highspy.kHighsInf, float(self._count_hosts))
        self._part_rows: dict[int, int] = {}
        self._size_rows: dict[int, int] = {}
        self._filled_rows: dict[int, int] = {}
        self._limit_rows: dict[int, int] = {}
        self._option_columns: dict[int, int] = {}
        self._count_rows: dict[float, tuple[int, Floats]] = {}
        self._counts: dict[float, tuple[float, float]] = {}
        for group in range(len(self.encoded.groups)):
            self._column(4.0, {group: 1.0}, 0, ("out", group))  # a table may stay out, at a price that no plan pays
        self._add_set((), np.zeros(self.inside.local, dtype=np.int64))

    def price(self, room: int, enough: float, stop: Callable[[], bool]) -> float:
        """A bound of E for a room, and so for all below it.

        Args:
            room: in steps.
            enough: a bound that is as good as any.
            stop: asked between rounds.
        """
        if not self._possible(room):
            return np.inf
        self._open(room)
        best = -np.inf
        for _ in range(_ROUNDS):
            if stop():
                break
            duals, objective = self._run()
            free, ways, part = self._values(duals, room)
            price, paid = self._prices(duals, free, part)
            price = np.where(self._need <= room, price, np.inf)
            lowest = np.minimum.reduceat(price, self._starts)
            rent = max(-float(duals[self._host_row]), 0.0)
            total = float(lowest @ self.encoded.sizes) - paid
            for beam in _BEAMS:
                found = best_sets(self.inside, room, self._own(part), free, least=rent, beam=beam)
                added = self._add_sets(found, rent)
                if added:
                    break
            best_loads = found.loads[0].tolist() if added else []
            added |= self._add_ways(free, ways, duals, room, best_loads)
            added |= self._add_options(price, duals)
            if found.most > rent * (1 + 1e-7) + 1e-12 and not added:
                # Nothing better was found in haste: now look at all of them.
                found = best_sets(self.inside, room, self._own(part), free, least=rent + _TIE / self._count_hosts)
                added |= self._add_sets(found, rent)
            best = max(best, total - self._count_hosts * max(found.most, rent))
            if best * self.most > enough or objective - best <= _CLOSE + _TIE:
                if best * self.most <= enough and self._add_limits():
                    continue
                break
            if not added and not self._add_limits():
                break
        return (best - _SLACK) * self.most

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
        self._open(room)
        duals, objective = self._run()
        if objective * self.most >= cutoff:
            return None
        free, _, part = self._values(duals, room)
        rent = max(-float(duals[self._host_row]), 0.0)
        near = best_sets(
            self.inside, room, self._own(part), free, least=rent * (1 - _NEAR), beam=_BEAMS[-1], near=rent * _NEAR
        )
        self._add_sets(near, -1.0, _NEAR_SETS)
        price, _ = self._prices(duals, free, part)
        extra = np.where(self._need <= room, price - duals[self.encoded.option_group], np.inf)
        for option in np.argsort(extra, kind="stable")[:_NEAR_OPTIONS].tolist():
            if extra[option] < cutoff / self.most - objective:
                self._add_option(option)
        self._open(room)
        self._run()
        extra = np.array(self._solver.getSolution().col_dual)
        room_left = cutoff / self.most - float(self._solver.getInfo().objective_function_value)
        barred = [
            number
            for number, tag in enumerate(self._columns)
            if tag[0] == "out" or (tag[0] == "option" and not self.inside.exact[tag[1]]) or extra[number] > room_left
        ]
        values = whole_numbers(
            self._solver, np.array(barred, dtype=np.int64), cutoff=cutoff / self.most, nodes=nodes, seconds=seconds
        )
        return None if values is None else unpacked(self.encoded, self.inside, self._columns, values)

    def _possible(self, room: int) -> bool:
        fits = self._need <= room
        return all(fits[span.start : span.stop].any() for span in self.encoded.group_options)

    def _open(self, room: int) -> None:
        """Allow the columns that the room has room for."""
        upper = np.where(np.array(self._needs) <= room, highspy.kHighsInf, 0.0)
        columns = len(upper)
        self._solver.changeColsBounds(columns, np.arange(columns, dtype=np.int32), np.zeros(columns), upper)
        for number, row in self._limit_rows.items():
            self._solver.changeRowBounds(row, -highspy.kHighsInf, self._limit(number))
        for load, (row, _) in self._count_rows.items():
            self._solver.changeRowBounds(row, *self._counts.get(load, (-highspy.kHighsInf, highspy.kHighsInf)))
        self._room = room

    def restrict(self, counts: dict[float, tuple[float, float]]) -> None:
        """Set how many tables may take an option with at least so much load on every rank: (least, most) by load."""
        for load in counts:
            if load not in self._count_rows:
                there = (self.encoded.base_load >= load).astype(np.float64)
                self._count_rows[load] = self._row(-highspy.kHighsInf, highspy.kHighsInf, there), there
        self._counts = dict(counts)

    def chosen(self) -> Floats:
        """(O,) how many tables take each option in the last solution."""
        found = np.zeros(len(self.encoded.options))
        values = np.array(self._solver.getSolution().col_value)
        there = {option: column for option, column in self._option_columns.items() if column < len(values)}
        found[list(there)] = values[list(there.values())]
        return found

    def _run(self) -> tuple[Floats, float]:
        self._solver.run()
        return np.array(self._solver.getSolution().row_dual), float(self._solver.getInfo().objective_function_value)

    def _values(self, duals: Floats, room: int) -> tuple[Floats, Callable[[int], Ints], Floats]:
        """V, the ways that have it, and the price of each kind of part."""
        sizes = sorted(self._size_rows)
        worth = np.maximum(duals[[self._size_rows[size] for size in sizes]], 0.0) if sizes else np.zeros(0)
        free, pieces = knapsack(np.array(sizes, dtype=np.int64), worth, GRID)
        price = np.zeros(len(self.inside.kinds))
        for kind, row in self._part_rows.items():
            price[kind] = max(float(duals[row]), 0.0)
        for kind, ways in enumerate(self.inside.kinds):
            if kind not in self._part_rows:
                # A set with such a part could have smaller ones, or free pieces, in its place.
                alike = float(free[np.minimum(ways, GRID)].sum(axis=1).min())
                smaller = [float(price[other]) for other in self.inside.below[kind] if other in self._part_rows]
                price[kind] = max([alike, *smaller])
        self._sizes = sizes
        return free, pieces, price

    def _own(self, part: Floats) -> Floats:
        """Prices without those of kinds that have none of their own."""
        own = np.zeros(len(part))
        kinds = list(self._part_rows)
        own[kinds] = part[kinds]
        return own

    def _prices(self, duals: Floats, free: Floats, part: Floats) -> tuple[Floats, float]:
        """(O,) load on every rank, value and use of other limits of each option; and what all of those limits cost."""
        options = len(self.encoded.options)
        price, paid = self._base.copy(), 0.0
        pieces, parts = self.inside.free, self.inside.parts
        price += np.bincount(pieces[:, 0], free[np.minimum(pieces[:, 1], GRID)] * pieces[:, 2], options)
        price += np.bincount(parts[:, 0], part[parts[:, 1]] * parts[:, 2], options)
        for number, row in self._limit_rows.items():
            dual = max(-float(duals[row]), 0.0)
            price += dual * self._rows.matrix[number]
            paid += dual * self._limit(number)
        for load, (lower, upper) in self._counts.items():
            row, there = self._count_rows[load]
            limit = lower if duals[row] > 0 else upper
            if np.isfinite(limit):
                price -= duals[row] * there
                paid -= float(duals[row]) * limit
        return price, paid

    def _limit(self, number: int) -> float:
        return float(self._rows.limits[number] + self._rows.slopes[number] * (self._room + 1) * self.step)

    def _add_limits(self) -> bool:
        """Take in the limits that the solution breaks; whether there are any."""
        used = self._rows.matrix @ self.chosen()
        limits = self._rows.limits + self._rows.slopes * ((self._room + 1) * self.step)
        broken = [int(n) for n in np.flatnonzero(used > limits * (1 + 1e-7) + 1e-9) if int(n) not in self._limit_rows]
        for number in broken:
            self._limit_rows[number] = self._row(-highspy.kHighsInf, self._limit(number), self._rows.matrix[number])
        return bool(broken)

    def _row(self, lower: float, upper: float, of_options: Floats | None = None) -> int:
        columns, entries = _NOTHING, np.zeros(0)
        if of_options is not None:
            columns, entries = (
                np.array(list(self._option_columns.values()), dtype=np.int32),
                of_options[list(self._option_columns)],
            )
        self._solver.addRow(lower, upper, len(columns), columns, entries)
        self._rows_made += 1
        return self._rows_made - 1

    def _column(self, cost: float, entries: dict[int, float], need: int, tag: tuple[Any, ...]) -> None:
        rows = np.array(list(entries), dtype=np.int32)
        self._solver.addCol(cost, 0.0, highspy.kHighsInf, len(rows), rows, np.array(list(entries.values())))
        self._columns.append(tag)
        self._needs.append(need)

    def _new(self, key: object) -> bool:
        if key in self._made:
            return False
        self._made.add(key)
        return True

    def _filled_row(self, filled: int) -> int:
        """Ranks with so much of parts on them: those of the sets, less the ways to fill them up, at least 0."""
        if filled not in self._filled_rows:
            self._filled_rows[filled] = self._row(0.0, highspy.kHighsInf)
            order = sorted(self._filled_rows)
            at = order.index(filled)
            for less, more in zip(order[max(at - 1, 0) : at + 1], order[max(at, 1) : at + 2], strict=False):
                self._column(
                    0.0, {self._filled_rows[less]: -1.0, self._filled_rows[more]: 1.0}, 0, ("less", less, more)
                )
        return self._filled_rows[filled]

    def _add_sets(self, found: Found, rent: float, most: int = _SETS) -> bool:
        added, seen = 0, set()
        for value, kinds, loads in zip(found.values.tolist(), found.sets.tolist(), found.loads, strict=True):
            if value <= rent * (1 + 1e-7) + 1e-12 or added >= most:
                break
            parts = tuple(kind for kind in kinds if kind >= 0)
            if parts not in seen:
                seen.add(parts)
                added += self._add_set(parts, loads)
        return bool(added)

    def _add_set(self, parts: tuple[int, ...], loads: Ints) -> bool:
        if not self._new(("set", tuple(sorted(parts)), tuple(sorted(loads.tolist())))):
            return False
        entries = {self._host_row: 1.0}
        for kind in parts:
            entries[self._part_rows[kind]] = entries.get(self._part_rows[kind], 0.0) + 1.0
        for filled in loads.tolist():
            row = self._filled_row(filled)
            entries[row] = entries.get(row, 0.0) + 1.0
        self._column(0.0, entries, int(loads.max()), ("set", parts, tuple(loads.tolist())))
        return True

    def _add_ways(self, free: Floats, ways: Callable[[int], Ints], duals: Floats, room: int, also: list[int]) -> bool:
        over = {
            filled: float(free[room - filled] - duals[row] * (1 + 1e-7) - 1e-12)
            for filled, row in self._filled_rows.items()
            if filled <= room and row < len(duals)
        }
        added = False
        some = sorted(over, key=lambda filled: -over[filled])[:_WAYS]
        for filled in dict.fromkeys([*some, *also]):
            if over.get(filled, 1.0) > 0:
                way = zip(self._sizes, ways(room - filled).tolist(), strict=True)
                added |= self._add_way({size: count for size, count in way if count}, filled)
        return added

    def _add_way(self, way: dict[int, int], filled: int) -> bool:
        if not self._new(("way", filled, tuple(sorted(way.items())))):
            return False
        entries = {self._filled_row(filled): -1.0} | {self._size_rows[size]: float(n) for size, n in way.items()}
        self._column(0.0, entries, filled + sum(size * n for size, n in way.items()), ("way", filled, way))
        return True

    def _add_options(self, price: Floats, duals: Floats) -> bool:
        added = False
        for group, span in enumerate(self.encoded.group_options):
            part = price[span.start : span.stop]
            for option in np.argsort(part, kind="stable")[:_OPTIONS].tolist():
                if part[option] < duals[group] - 1e-9:
                    added |= self._add_option(span.start + option)
        return added

    def _add_option(self, option: int) -> bool:
        if option in self._option_columns:
            return False
        entries = {int(self.encoded.option_group[option]): 1.0}
        for _, size, count in self.inside.free[self.inside.free[:, 0] == option].tolist():
            if size not in self._size_rows:
                self._size_rows[size] = self._row(0.0, highspy.kHighsInf)
                for many in {1, max(1, self._room // size)}:
                    self._add_way({size: many}, 0)
            entries[self._size_rows[size]] = -float(count)
        for _, kind, count in self.inside.parts[self.inside.parts[:, 0] == option].tolist():
            entries[self._part_row(kind)] = -float(count)
        for number, row in self._limit_rows.items():
            if self._rows.matrix[number, option]:
                entries[row] = float(self._rows.matrix[number, option])
        for row, there in self._count_rows.values():
            if there[option]:
                entries[row] = 1.0
        self._option_columns[option] = len(self._columns)
        self._column(float(self._base[option]), entries, int(self._need[option]), ("option", option))
        return True

    def _part_row(self, kind: int) -> int:
        """Parts of a kind: those that sets have slots for, less those of options, at least 0."""
        if kind not in self._part_rows:
            self._part_rows[kind] = self._row(0.0, highspy.kHighsInf)
            self._add_set((kind,), self.inside.kinds[kind][0])
            below, there = self.inside.below, self._part_rows
            smaller = [other for other in there if other in below[kind]]
            larger = [other for other in there if kind in below[other]]
            links = [(kind, other) for other in smaller if not any(other in below[between] for between in smaller)]
            links += [(other, kind) for other in larger if not any(between in below[other] for between in larger)]
            for large, small in links:
                self._column(0.0, {there[large]: -1.0, there[small]: 1.0}, 0, ("slot", large, small))
        return self._part_rows[kind]

"""The linear programme of :mod:`hosts`: its rows and columns, and what they are for.

A column is one of

    out      a table stays out, at a price that no plan pays
    option   a table takes it
    set      a host holds these parts, each in one of its ways
    slot     a slot of a set for one kind of part holds a smaller kind
    way      a rank with so much of parts on it is filled up with these free pieces
    less     a rank with less of parts on it counts as one with more

Columns know what room they need, and stay when another room is looked at.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import highspy
import numpy as np

from shardrec.planner.solve.encode import Encoded, Floats, Ints
from shardrec.planner.solve.inside import Inside
from shardrec.planner.solve.rows import Rows

__all__ = ["HostColumns"]

_OUT = 4.0
"""What it costs that a table stays out: more than any plan."""
_NOTHING = np.zeros(0, dtype=np.int32)
_DUAL, _PRIMAL = 1, 4
"""How the simplex method goes on: from prices that are right, or from a solution that is."""


class HostColumns:
    """The programme.

    Args:
        encoded: the problem.
        inside: its loads in steps.
        need: (O,) the least room of each option.
        rows: other limits.
        most: the load that counts as 1.
        step: load of a step.

    Attributes:
        solver: what solves it.
        rows: how many there are.
        tags: what each column is.
        host_row: no more sets than hosts.
        part_rows: per kind of part, slots of sets less parts of options, at least 0.
        size_rows: per size, pieces of ways less those of options, at least 0.
        filled_rows: per load of parts on a rank, ranks of sets less ways to fill them up, at least 0.
        limit_rows: per limit that is taken in, at most its value.
        count_rows: per load, its row and (O,) which options have at least that on every rank.
        counts: the limits of those rows, where there are any.
    """

    def __init__(self, encoded: Encoded, inside: Inside, need: Ints, rows: Rows, most: float, step: float) -> None:
        self._encoded, self._inside, self._need, self._rows = encoded, inside, need, rows
        self._base: Floats = encoded.base_load / most
        self._step, self._room = step, 0
        self.solver: Any = highspy.Highs()  # type: ignore[no-untyped-call]
        for name, value in (("output_flag", False), ("threads", 1), ("random_seed", 0), ("presolve", "off")):
            self.solver.setOptionValue(name, value)
        self.rows = 0
        self.tags: list[tuple[Any, ...]] = []
        self._needs: list[int] = []
        self._made: set[object] = set()
        self._waiting: list[tuple[float, dict[int, float]]] = []
        for size in encoded.sizes.tolist():
            self._row(float(size), float(size))
        self.host_row = self._row(-highspy.kHighsInf, float(len(inside.hosts)))
        self.part_rows: dict[int, int] = {}
        self.size_rows: dict[int, int] = {}
        self.filled_rows: dict[int, int] = {}
        self.limit_rows: dict[int, int] = {}
        self.count_rows: dict[float, tuple[int, Floats]] = {}
        self.counts: dict[float, tuple[float, float]] = {}
        self._options: dict[int, int] = {}
        self._free_of, self._parts_of = _by_option(inside.free), _by_option(inside.parts)
        for group in range(len(encoded.groups)):
            self._column(_OUT, {group: 1.0}, 0, ("out", group))
        self.add_set((), np.zeros(inside.local, dtype=np.int64))

    def open(self, room: int) -> None:
        """Allow the columns that the room has room for."""
        self._flush()
        self._room = room
        upper = np.where(np.array(self._needs) <= room, highspy.kHighsInf, 0.0)
        columns = len(upper)
        self.solver.changeColsBounds(columns, np.arange(columns, dtype=np.int32), np.zeros(columns), upper)
        for number, row in self.limit_rows.items():
            self.solver.changeRowBounds(row, -highspy.kHighsInf, self.limit(number))
        for load, (row, _) in self.count_rows.items():
            self.solver.changeRowBounds(row, *self.counts.get(load, (-highspy.kHighsInf, highspy.kHighsInf)))
        self.solver.setOptionValue("simplex_strategy", _DUAL)

    def restrict(self, counts: dict[float, tuple[float, float]]) -> None:
        """Set how many tables may take an option with at least so much load on every rank: (least, most) by load."""
        for load in counts:
            if load not in self.count_rows:
                there = (self._encoded.base_load >= load).astype(np.float64)
                self.count_rows[load] = self._row(-highspy.kHighsInf, highspy.kHighsInf, there), there
        self.counts = dict(counts)

    def run(self) -> tuple[Floats, float]:
        """The rows' prices, and the objective."""
        self._flush()
        self.solver.run()
        # What follows adds columns, and leaves the solution one.
        self.solver.setOptionValue("simplex_strategy", _PRIMAL)
        return np.array(self.solver.getSolution().row_dual), float(self.solver.getInfo().objective_function_value)

    def chosen(self) -> Floats:
        """(O,) how many tables take each option in the last solution."""
        found = np.zeros(len(self._encoded.options))
        values = np.array(self.solver.getSolution().col_value)
        there = {option: column for option, column in self._options.items() if column < len(values)}
        found[list(there)] = values[list(there.values())]
        return found

    def most_of_each(self) -> Floats:
        """(columns,) how often a plan may use each at most: not those that are not what they count as."""
        hosts, ranks = len(self._inside.hosts), self._encoded.ranks
        slots = hosts * max((len(tag[1]) for tag in self.tags if tag[0] == "set"), default=0)
        most = {"out": 0, "set": hosts, "slot": slots, "way": ranks, "less": ranks}
        found = np.array([most.get(tag[0], 0) for tag in self.tags], dtype=np.float64)
        for option, column in self._options.items():
            found[column] = self._encoded.sizes[self._encoded.option_group[option]] * self._inside.exact[option]
        return found

    def limit(self, number: int) -> float:
        """What a limit is in the room that is open."""
        return float(self._rows.limits[number] + self._rows.slopes[number] * (self._room + 1) * self._step)

    def add_limits(self) -> bool:
        """Take in the limits that the solution breaks; whether there are any."""
        used = self._rows.matrix @ self.chosen()
        limits = self._rows.limits + self._rows.slopes * ((self._room + 1) * self._step)
        broken = [int(n) for n in np.flatnonzero(used > limits * (1 + 1e-7) + 1e-9) if int(n) not in self.limit_rows]
        for number in broken:
            self.limit_rows[number] = self._row(-highspy.kHighsInf, self.limit(number), self._rows.matrix[number])
        return bool(broken)

    def add_set(self, parts: Sequence[int], loads: Ints) -> bool:
        """A host with these parts; whether it is new."""
        if not self._new(("set", tuple(sorted(parts)), tuple(sorted(loads.tolist())))):
            return False
        entries = {self.host_row: 1.0}
        for kind in parts:
            entries[self.part_rows[kind]] = entries.get(self.part_rows[kind], 0.0) + 1.0
        for filled in loads.tolist():
            row = self._filled_row(filled)
            entries[row] = entries.get(row, 0.0) + 1.0
        self._column(0.0, entries, int(loads.max()), ("set", tuple(parts), tuple(loads.tolist())))
        return True

    def add_way(self, way: dict[int, int], filled: int) -> bool:
        """A rank with so much on it is filled up with these numbers of free pieces by size; whether that is new."""
        if not self._new(("way", filled, tuple(sorted(way.items())))):
            return False
        entries = {self._filled_row(filled): -1.0} | {self.size_rows[size]: float(n) for size, n in way.items()}
        self._column(0.0, entries, filled + sum(size * n for size, n in way.items()), ("way", filled, way))
        return True

    def add_option(self, option: int) -> bool:
        """A table takes it; whether that is new."""
        if option in self._options:
            return False
        entries = {int(self._encoded.option_group[option]): 1.0}
        for size, count in self._free_of.get(option, ()):
            if size not in self.size_rows:
                self.size_rows[size] = self._row(0.0, highspy.kHighsInf)
                for many in {1, max(1, self._room // size)}:
                    self.add_way({size: many}, 0)
            entries[self.size_rows[size]] = -float(count)
        for kind, count in self._parts_of.get(option, ()):
            entries[self._part_row(kind)] = -float(count)
        for number, row in self.limit_rows.items():
            if self._rows.matrix[number, option]:
                entries[row] = float(self._rows.matrix[number, option])
        for row, there in self.count_rows.values():
            if there[option]:
                entries[row] = 1.0
        self._options[option] = len(self.tags)
        self._column(float(self._base[option]), entries, int(self._need[option]), ("option", option))
        return True

    def _filled_row(self, filled: int) -> int:
        if filled not in self.filled_rows:
            self.filled_rows[filled] = self._row(0.0, highspy.kHighsInf)
            order = sorted(self.filled_rows)
            at = order.index(filled)
            for less, more in zip(order[max(at - 1, 0) : at + 1], order[max(at, 1) : at + 2], strict=False):
                self._column(0.0, {self.filled_rows[less]: -1.0, self.filled_rows[more]: 1.0}, 0, ("less", less, more))
        return self.filled_rows[filled]

    def _part_row(self, kind: int) -> int:
        if kind not in self.part_rows:
            self.part_rows[kind] = self._row(0.0, highspy.kHighsInf)
            self.add_set((kind,), self._inside.kinds[kind][0])
            below, there = self._inside.below, self.part_rows
            smaller = [other for other in there if other in below[kind]]
            larger = [other for other in there if kind in below[other]]
            links = [(kind, other) for other in smaller if not any(other in below[between] for between in smaller)]
            links += [(other, kind) for other in larger if not any(between in below[other] for between in larger)]
            for large, small in links:
                self._column(0.0, {there[large]: -1.0, there[small]: 1.0}, 0, ("slot", large, small))
        return self.part_rows[kind]

    def _new(self, key: object) -> bool:
        if key in self._made:
            return False
        self._made.add(key)
        return True

    def _row(self, lower: float, upper: float, of_options: Floats | None = None) -> int:
        columns, entries = _NOTHING, np.zeros(0)
        if of_options is not None:
            self._flush()
            columns = np.array(list(self._options.values()), dtype=np.int32)
            entries = of_options[list(self._options)]
        self.solver.addRow(lower, upper, len(columns), columns, entries)
        self.rows += 1
        return self.rows - 1

    def _column(self, cost: float, entries: dict[int, float], need: int, tag: tuple[Any, ...]) -> None:
        self._waiting.append((cost, entries))
        self.tags.append(tag)
        self._needs.append(need)

    def _flush(self) -> None:
        """Add the columns that wait for it, all at once."""
        count = len(self._waiting)
        if not count:
            return
        starts = np.cumsum([0, *(len(entries) for _, entries in self._waiting)])
        rows = np.array([row for _, entries in self._waiting for row in entries], dtype=np.int32)
        values = np.array([value for _, entries in self._waiting for value in entries.values()])
        costs = np.array([cost for cost, _ in self._waiting])
        unlimited = np.full(count, highspy.kHighsInf)
        self.solver.addCols(
            count, costs, np.zeros(count), unlimited, len(rows), starts[:-1].astype(np.int32), rows, values
        )
        self._waiting.clear()


def _by_option(items: Ints) -> dict[int, list[tuple[int, int]]]:
    """By option, the rest of its items."""
    found: dict[int, list[tuple[int, int]]] = {}
    for option, what, count in items.tolist():
        found.setdefault(option, []).append((what, count))
    return found

"""Options and ways to fill ranks chosen together, in time and memory at once.

:mod:`patterns` fills ranks by time and looks at memory when it is done. Where memory is nearly full on every rank, what
it finds does not fit. Here a *way* is a multiset of pieces that fits a rank's room in every quantity: time, and each
tier of memory that has a limit.

::

    room                        time 67.9   memory 177
    48.6 / 38.8                                          pieces: time / memory
    3.9 / 38.4   x 3
    2.0 / 19.3
    1.9 / 0.5    x 2            left  1.7          2.3   for what is too small to be counted piece by piece

The programme has a row for each group of tables, each class of equal ranks, each kind of piece in use, and each
quantity that small pieces take of what the ways leave. Columns are generated (:mod:`vectors`), options as well as ways.
A slot for a piece may hold a smaller one. Of the smaller pieces, some may do without a slot, at a price.

Sizes are in coarse steps when ways are looked for, and true when they are made: not all ways are found that are of use.
So this leads to plans (:mod:`dive`) and proves nothing.

Shapes: Q quantities, K kinds of pieces, C classes of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import highspy
import numpy as np
from numpy.typing import NDArray

from shardrec.planner.solve.encode import Encoded, Floats, Ints
from shardrec.planner.solve.packing import Packing
from shardrec.planner.solve.vectors import VectorKnapsack

__all__ = ["JointProgramme", "quantities", "unbound"]

_SMALL, _SMALLER = (0.02, 0.005), (0.05, 0.01)
"""Parts of a rank, in time and memory, up to which pieces are not counted one by one, and need not be."""
_TIME, _MEMORY = 150, (300, 50, 15)
"""Steps of time, and of each tier of memory."""
_STATES = (200, 1500)
"""Of the search for ways; the second where nothing is found otherwise."""
_WAYS, _OPTIONS = 8, 2
"""Columns added at a time, for each class of ranks and for each group."""
_OUT = 4.0
"""Price of a table that stays out, which no plan pays, against the room."""
_LOOSE = 0.3
"""Price of a piece without a slot, against its part of all ranks."""
_CLASSES = 12
_ROUNDINGS = (0.0, 1e-3, 4e-3, 2e-2, 0.1)
_STALLED, _CLOSE = 6, 2e-4
"""Rounds of generating columns that gain less than so much of the room: then it is enough."""
_ROUNDS = 120
_EASE, _UNEVEN = 2e-3, 0.3
"""Reserve of time, of the room; and part of the reserves that may be used."""
_TOTAL = 20.0
"""Weight of what an option takes of all ranks against its largest piece, where a table was left out."""
_NODES = 50
"""Most branches when the options are chosen."""
_EPS, _FEASIBLE = 1e-9, 2
_NOTHING = np.zeros(0, dtype=np.int32)


def quantities(encoded: Encoded, load: Floats, memory: Floats) -> Floats:
    """(N, Q) of loads (N,) and bytes (N, M): those tiers that have a limit."""
    return np.column_stack([load, memory[:, np.isfinite(encoded.capacity)]])


def unbound(encoded: Encoded) -> NDArray[np.bool_]:
    """(O,) whether each of an option's parts is one piece that may be on any rank."""
    free = np.array([kind.single and len(kind.names) == encoded.ranks for kind in encoded.blocks], dtype=bool)
    return np.array([all(free[block] for block, _ in blocks) for blocks in encoded.option_blocks], dtype=bool)


class JointProgramme:
    """The programme for one room.

    Args:
        encoded: the problem.
        room: load that all the pieces of a rank may come to.
        everywhere: (M,) bytes that what is on every rank takes, about.
        reserve: (M,) bytes of each rank that are not to be used, but for what does not come out even.
        kept: tables that have their places.
        allowed: (O,) options that may be used. Their pieces may be on any rank, or are taken as if they could.

    Attributes:
        scale: (Q,) what sizes are parts of: the room, and the capacity of each tier.
        sizes: (K, Q) of the kinds of pieces.
        small: (K,) whether a kind's pieces are not counted one by one.
        class_of: (R,) class of each rank.
        many: (C,) ranks of each class.
        awkward: (O,) how hard it is to find room for an option's pieces when the others are placed; infinite if it is
            not allowed.
    """

    def __init__(
        self,
        encoded: Encoded,
        room: float,
        everywhere: Floats,
        reserve: Floats,
        kept: Packing,
        allowed: NDArray[np.bool_],
    ) -> None:
        self.encoded, self.kept = encoded, kept
        self.scale = quantities(encoded, np.array([room]), encoded.capacity[None])[0]
        shared = quantities(encoded, np.zeros(1), everywhere[None])[0] / self.scale
        spare = quantities(encoded, np.array([_EASE * room]), reserve[None])[0] / self.scale
        base = kept.counts.astype(np.float64) @ encoded.base_memory
        used = quantities(encoded, kept.loads - kept.base, kept.memory - base) / self.scale
        self._rooms, self.class_of, self.many = _classes(np.maximum(1 - shared - used - np.append(0.0, spare[1:]), 0.0))
        self._tables = encoded.sizes - np.bincount(encoded.option_group, kept.counts, len(encoded.groups)).astype(int)
        sizes = quantities(encoded, encoded.piece_load, encoded.piece_memory) / self.scale
        self.sizes, kinds = np.unique(sizes, axis=0, return_inverse=True)
        self._kind_of: Ints = kinds.ravel()
        self.small = _within(self.sizes, _SMALL)
        top = self._rooms.max(axis=0)
        steps = np.array([_TIME, *(_MEMORY[min(len(top) - 2, 2)],) * (len(top) - 1)], dtype=np.int64)
        self._step, self._steps = np.maximum(top, _EPS) / steps, steps
        unfit = (self.sizes > top + _EPS).any(axis=1)
        there = np.bincount(encoded.piece_option[unfit[self._kind_of]], minlength=len(encoded.options)) == 0
        self._allowed = allowed & there & (self._tables[encoded.option_group] > 0)
        self._on_every = quantities(encoded, encoded.base_load, encoded.base_memory) / self.scale
        self._uneven = _UNEVEN * spare
        self.awkward = self._hardness()
        self._begin(shared - quantities(encoded, np.zeros(1), base[None])[0] / self.scale)

    def _hardness(self) -> Floats:
        """(O,) what options take in all, and their largest piece, which must fit somewhere."""
        encoded = self.encoded
        largest = np.zeros(len(encoded.options))
        np.maximum.at(largest, encoded.piece_option, self.sizes.max(axis=1)[self._kind_of])
        total = (quantities(encoded, encoded.total_load, encoded.total_memory) / self.scale).sum(axis=1)
        return np.where(self._allowed, _TOTAL * total / encoded.ranks + largest, np.inf)

    def _begin(self, shared: Floats) -> None:
        self._solver: Any = highspy.Highs()  # type: ignore[no-untyped-call]
        for name, value in (("output_flag", False), ("threads", 1), ("random_seed", 0), ("presolve", "off")):
            self._solver.setOptionValue(name, value)
        self._rows, self._columns, self._made = 0, list[tuple[Any, ...]](), set[object]()
        self._kind_rows: dict[int, int] = {}
        groups = np.flatnonzero(self._tables).tolist()
        self._group_rows = {
            group: self._row(float(self._tables[group]), float(self._tables[group])) for group in groups
        }
        self._class_rows = [self._row(float(many), float(many)) for many in self.many]
        # What options put on every rank, beyond what is taken off the rooms, is taken from what the ways leave.
        self._least_left: Floats = -self.encoded.ranks * shared
        self._left_rows = [self._row(float(least), highspy.kHighsInf) for least in self._least_left]
        self._shared_rows = [self._row(-highspy.kHighsInf, float(most)) for most in (shared + self._uneven)[1:]]
        for group, row in self._group_rows.items():
            self._column(_OUT, {row: 1.0}, ("out", group))
        for number in range(len(self.many)):
            self._add_way({}, number)
        price = self._prices(np.zeros(self._rows), self.sizes.sum(axis=1) / self.encoded.ranks)
        for group in self._group_rows:
            span = self.encoded.group_options[group]
            self._add_option(span.start + int(price[span.start : span.stop].argmin()))

    def generate(self, stop: Callable[[], bool], enough: int = _ROUNDS) -> float:
        """Add columns until they gain little; the load on every rank of the programme's solution.

        Args:
            stop: asked between rounds.
            enough: rounds, where all tables have their places.
        """
        history: list[float] = []
        for _ in range(_ROUNDS):
            duals, objective = self._run()
            history.append(objective)
            stalled = len(history) > _STALLED and history[-1 - _STALLED] - objective < _CLOSE
            complete = self.left_out() < _EPS
            if (complete and (stalled or len(history) >= enough)) or stop() or not self._improved(duals):
                break
        return self._run()[1] * float(self.scale[0])

    def left_out(self) -> float:
        """How many tables have no place in the solution."""
        return float(sum(self._solver.getSolution().col_value[: len(self._group_rows)]))

    def chosen(self) -> Floats:
        """(O,) how many tables take each option in the solution."""
        found = np.zeros(len(self.encoded.options))
        for value, tag in zip(self._solver.getSolution().col_value, self._columns, strict=True):
            if tag[0] == "option":
                found[tag[1]] = value
        return found

    def values(self) -> Floats:
        """How many there are of each column in the solution."""
        return np.array(self._solver.getSolution().col_value)

    def ways(self) -> dict[int, tuple[int, dict[int, int]]]:
        """The columns that are ways: class of ranks, and how many pieces of each kind."""
        return {number: (tag[1], tag[2]) for number, tag in enumerate(self._columns) if tag[0] == "way"}

    def fix(self, number: int, least: int) -> None:
        """Use a way so many times at least."""
        self._solver.changeColBounds(number, float(least), highspy.kHighsInf)

    def choose(self, ways: Mapping[int, int]) -> Floats:
        """(O,) how many tables take each option, about whole numbers, where the ways are used so many times."""
        solver, columns, before = self._solver, np.arange(len(self._columns), dtype=np.int32), self.chosen()
        for number, (_, way) in self.ways().items():
            many = float(ways.get(number, 0))
            solver.changeColBounds(number, many, many if way else highspy.kHighsInf)
        for row, least in zip(self._left_rows, self._least_left - self.encoded.ranks * self._uneven, strict=True):
            solver.changeRowBounds(row, float(least), highspy.kHighsInf)
        kinds = np.full(len(columns), highspy.HighsVarType.kInteger.value, dtype=np.uint8)
        solver.changeColsIntegrality(len(columns), columns, kinds)
        for name, value in (("presolve", "on"), ("mip_max_nodes", _NODES), ("mip_rel_gap", 1e-3)):
            solver.setOptionValue(name, value)
        solver.run()
        return self.chosen() if solver.getInfo().primal_solution_status == _FEASIBLE else before

    def _run(self) -> tuple[Floats, float]:
        self._solver.run()
        return np.array(self._solver.getSolution().row_dual), float(self._solver.getInfo().objective_function_value)

    def _improved(self, duals: Floats) -> bool:
        """Add the columns that are worth more than they cost, of those looked at; whether there were any."""
        left = np.maximum(duals[self._left_rows], 0.0)
        kinds = np.array(sorted(self._kind_rows), dtype=np.int64)
        worth = np.maximum(duals[[self._kind_rows[kind] for kind in kinds.tolist()]], 0.0)
        knapsack = VectorKnapsack(self.sizes[kinds], worth, left, self._step, self._steps)
        added = False
        for number, row in enumerate(self._class_rows):
            for states in _STATES:
                ways, values = knapsack.ways(self._rooms[number], states)
                many = min(_WAYS, int((values > -duals[row] * (1 + 1e-6) + 1e-9).sum()))
                for way in ways[:many]:
                    added |= self._add_way({int(kinds[at]): int(way[at]) for at in np.flatnonzero(way)}, number)
                if added:
                    break
        value = np.where(self.small, self.sizes @ left, knapsack.value(self.sizes))
        value[kinds[worth > 0]] = worth[worth > 0]
        price = self._prices(duals, value)
        for group, row in self._group_rows.items():
            span = self.encoded.group_options[group]
            part = price[span.start : span.stop]
            for option in np.argsort(part, kind="stable")[:_OPTIONS].tolist():
                if part[option] < duals[row] - 1e-8:
                    added |= self._add_option(span.start + option)
        return added

    def _prices(self, duals: Floats, value: Floats) -> Floats:
        """(O,) of options, with values of pieces by kind."""
        encoded = self.encoded
        price: Floats = self._on_every[:, 0] + np.bincount(
            encoded.piece_option, value[self._kind_of] * encoded.piece_count, len(encoded.options)
        )
        left = duals[self._left_rows[1:]] * encoded.ranks
        price += self._on_every[:, 1:] @ (left - duals[self._shared_rows])
        return np.where(self._allowed, price, np.inf)

    def _row(self, lower: float, upper: float) -> int:
        self._solver.addRow(lower, upper, 0, _NOTHING, np.zeros(0))
        self._rows += 1
        return self._rows - 1

    def _column(self, cost: float, entries: dict[int, float], tag: tuple[Any, ...]) -> None:
        rows = np.array(list(entries), dtype=np.int32)
        self._solver.addCol(cost, 0.0, highspy.kHighsInf, len(rows), rows, np.array(list(entries.values())))
        self._columns.append(tag)

    def _new(self, key: object) -> bool:
        if key in self._made:
            return False
        self._made.add(key)
        return True

    def _add_way(self, way: dict[int, int], number: int) -> bool:
        if not self._new((number, tuple(sorted(way.items())))):
            return False
        left = self._rooms[number] - sum(count * self.sizes[kind] for kind, count in way.items())
        entries = {self._class_rows[number]: 1.0} | dict(
            zip(self._left_rows, np.maximum(left, 0.0).tolist(), strict=True)
        )
        entries |= {self._kind_rows[kind]: float(count) for kind, count in way.items()}
        self._column(0.0, entries, ("way", number, way))
        return True

    def _add_option(self, option: int) -> bool:
        if not self._allowed[option] or not self._new(option):
            return False
        encoded = self.encoded
        entries: dict[int, float] = {}
        for piece in np.flatnonzero(encoded.piece_option == option).tolist():
            kind, count = int(self._kind_of[piece]), float(encoded.piece_count[piece])
            if self.small[kind]:
                for row, size in zip(self._left_rows, self.sizes[kind].tolist(), strict=True):
                    entries[row] = entries.get(row, 0.0) - count * size
            else:
                row = self._kind_row(kind)
                entries[row] = entries.get(row, 0.0) - count
        entries[self._group_rows[int(encoded.option_group[option])]] = 1.0
        for left, shared, size in zip(
            self._left_rows[1:], self._shared_rows, self._on_every[option, 1:].tolist(), strict=True
        ):
            entries[shared] = size
            entries[left] = entries.get(left, 0.0) - encoded.ranks * size
        self._column(float(self._on_every[option, 0]), entries, ("option", option))
        return True

    def _kind_row(self, kind: int) -> int:
        """Slots for a kind of piece, less the pieces of options, at least 0."""
        if kind in self._kind_rows:
            return self._kind_rows[kind]
        row = self._kind_rows[kind] = self._row(0.0, highspy.kHighsInf)
        size = self.sizes[kind]
        for number, room in enumerate(self._rooms):
            if (size <= room).all():
                self._add_way({kind: int((room[size > 0] / size[size > 0] + _EPS).min())}, number)
        if _within(size[None], _SMALLER)[0]:
            entries = dict(zip(self._left_rows, (-size).tolist(), strict=True)) | {row: 1.0}
            self._column(_LOOSE * float(size.max()) / self.encoded.ranks, entries, ("loose", kind))
        others = [other for other in self._kind_rows if other != kind]
        larger = [other for other in others if (self.sizes[other] >= size).all()]
        smaller = [other for other in others if (self.sizes[other] <= size).all()]
        links = [(big, kind) for big in _extreme(self.sizes, larger, -1)]
        links += [(kind, less) for less in _extreme(self.sizes, smaller, 1)]
        for big, less in links:
            spare = dict(zip(self._left_rows, (self.sizes[big] - self.sizes[less]).tolist(), strict=True))
            self._column(0.0, spare | {self._kind_rows[big]: -1.0, self._kind_rows[less]: 1.0}, ("slot", big, less))
        return row


def _classes(rooms: Floats) -> tuple[Floats, Ints, Ints]:
    """Rooms (C, Q) of the classes of ranks, (R,) class of each, (C,) how many; rounded down as far as makes few."""
    for step in _ROUNDINGS:
        found = np.floor(rooms / step) * step if step else rooms
        values, which, many = np.unique(found, axis=0, return_inverse=True, return_counts=True)
        if len(values) <= _CLASSES:
            break
    return values, which.ravel(), many


def _within(sizes: Floats, most: tuple[float, float]) -> NDArray[np.bool_]:
    """(N,) whether sizes (N, Q) are at most so much, in time and in memory."""
    found: NDArray[np.bool_] = (sizes[:, 0] <= most[0]) & (sizes[:, 1:] <= most[1]).all(axis=1)
    return found


def _extreme(sizes: Floats, kinds: list[int], sign: int) -> list[int]:
    """Those of the kinds than which no other is nearer: the least ones for -1, the largest for 1."""
    part = sign * sizes[kinds]
    return [
        kind
        for kind, size in zip(kinds, part, strict=True)
        if not ((part >= size).all(axis=1) & (part > size).any(axis=1)).any()
    ]

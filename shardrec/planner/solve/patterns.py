"""Options and patterns chosen together: which option each table takes, and how many ranks are filled in which way.

A *pattern* is a multiset of piece sizes that fits the room of a rank. For a given room, the integer programme

    minimise    the load on every rank, E
    where       each table takes one option,
                for each size, the patterns used hold the pieces of the options used,
                no more patterns are used than there are ranks of their room

has an answer wherever the room suffices, and it does not care which rank is which or which table a piece is of: a few
dozen rows describe hundreds of tables on hundreds of ranks. Columns are generated (:mod:`knapsack`), options as
well as patterns: from prices for the sizes in use, the knapsack's value function has one for every size, and so for
every option. With them,

    E  >=  sum over tables of the least (load on every rank + value of the pieces) - value of all the ranks' room

is a bound for this room, whatever was generated so far (Lagrange). At the end the columns in hand are solved for whole
numbers; that is a heuristic, as others might do better.

Ranks may have different rooms, so that some tables can stay where they are. Only options whose pieces are free take
part. Sizes are rounded down to steps of 1/G, and memory is looked at when it is done.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import highspy
import numpy as np
from numpy.typing import NDArray

from shardrec.planner.solve.encode import Encoded, Floats, Ints
from shardrec.planner.solve.knapsack import GRID, knapsack
from shardrec.planner.solve.packing import Packing

__all__ = ["Filled", "PatternProgramme"]

_ROUNDS = 300
_DIVE_ROUNDS = 8
_CLOSE = 5e-4
_FEASIBLE = 2


@dataclass(frozen=True, eq=False)
class Filled:
    """What the programme came to.

    Args:
        bound: no choice for this room has a lower load on every rank.
        counts: (O,) how many tables take each option; None without a solution.
        ranks: per rank, the sizes, in steps, of the pieces it is to hold.
    """

    bound: float
    counts: Ints | None = None
    ranks: tuple[tuple[int, ...], ...] = ()


class PatternProgramme:
    """The programme for one room.

    Args:
        encoded: the problem.
        rooms: (R,) load of pieces that each rank has room for.
        tables: (G,) how many of each group are to be placed.
    """

    def __init__(self, encoded: Encoded, rooms: Floats, tables: Ints) -> None:
        self.encoded = encoded
        self._room = float(rooms.max())
        self.steps = np.floor(encoded.piece_load / self._room * GRID + 1e-6).astype(np.int64)
        widths = np.floor(np.maximum(rooms, 0.0) / self._room * GRID + 1e-6).astype(np.int64)
        self._widths, self._class_of, self._many = np.unique(widths, return_inverse=True, return_counts=True)
        self._tables = tables
        self._allowed = self._usable()
        self._solver: Any = highspy.Highs()  # type: ignore[no-untyped-call]
        for name, value in (("output_flag", False), ("threads", 1), ("random_seed", 0), ("presolve", "off")):
            self._solver.setOptionValue(name, value)
        self._group_rows = {int(group): row for row, group in enumerate(np.flatnonzero(tables))}
        self._class_rows = range(len(self._group_rows), len(self._group_rows) + len(self._many))
        self._size_rows: dict[int, int] = {}
        self._columns: list[tuple[int, dict[int, int], int]] = []  # option or -1, pattern, its class
        self._rows = 0

    def _usable(self) -> NDArray[np.bool_]:
        """(O,) options of the tables at hand, with free pieces that fit, or none."""
        encoded = self.encoded
        allowed: NDArray[np.bool_] = self._tables[encoded.option_group] > 0
        unfit = (self.steps > GRID) | (encoded.piece_reach > 0)
        allowed &= np.bincount(encoded.piece_option[unfit], minlength=len(allowed)) == 0
        for option in np.flatnonzero(allowed):
            allowed[option] = all(encoded.blocks[block].single for block, _ in encoded.option_blocks[option])
        return allowed

    def bound(self, cutoff: float) -> float:
        """A bound of the load on every rank; not much above ``cutoff``."""
        spans = [self.encoded.group_options[group] for group in self._group_rows]
        if not all(self._allowed[span.start : span.stop].any() for span in spans):
            return np.inf
        self._begin()
        return self._generate(cutoff, _ROUNDS)

    def solve(self, cutoff: float, *, dives: int, nodes: int, stop: Callable[[], bool], seconds: float) -> Filled:
        """Generate columns, then choose whole numbers of them.

        Args:
            cutoff: a load on every rank that is too much to be of use.
            dives: most steps of rounding.
            nodes: most branches.
            stop: asked between steps; ends the rounding.
            seconds: time limit of the branches.
        """
        bound = self.bound(cutoff)
        if bound > cutoff:
            return Filled(bound)
        self._dive(cutoff, dives, stop)
        return self._whole(bound, cutoff, nodes, seconds)

    def _generate(self, cutoff: float, rounds: int) -> float:
        """Add columns until the programme is as low as its bound; that bound."""
        groups = list(self._group_rows)
        bound = -np.inf
        for _ in range(rounds):
            self._solver.run()
            values = np.array(self._solver.getSolution().row_dual)
            objective = float(self._solver.getInfo().objective_function_value)
            sizes = np.array(sorted(self._size_rows), dtype=np.int64)
            worth = np.maximum(values[[self._size_rows[size] for size in sizes.tolist()]], 0.0)
            best, find = knapsack(sizes, worth, GRID)
            room_price = np.maximum(-values[self._class_rows.start : self._class_rows.stop], 0.0)
            lowest, choice = self._cheapest(self._prices(best))
            bound = max(bound, float(lowest @ self._tables[groups]) - float(best[self._widths] @ self._many))
            if bound > cutoff or objective - bound <= _CLOSE * self._room:
                break
            added = False
            for number, width in enumerate(self._widths.tolist()):
                if best[width] > room_price[number] * (1 + 1e-7) + 1e-12:
                    self._add_pattern(dict(zip(sizes.tolist(), find(width).tolist(), strict=True)), number)
                    added = True
            for row in range(len(groups)):
                if lowest[row] < values[row] - 1e-9 * self._room:
                    self._add_option(int(choice[row]))
                    added = True
            if not added:
                break
        return bound

    def _dive(self, cutoff: float, steps: int, stop: Callable[[], bool]) -> None:
        """Round patterns up one after the other, and generate for what is left the columns that whole numbers need."""
        solver = self._solver
        least: dict[int, float] = {}
        for _ in range(steps):
            values = np.array(solver.getSolution().col_value)
            if float(solver.getInfo().objective_function_value) > cutoff or stop():
                break
            patterns = np.array([n for n, column in enumerate(self._columns) if column[2] >= 0], dtype=np.int64)
            parts = values[patterns] - np.floor(values[patterns] + 1e-6)
            if parts.max(initial=0.0) < 1e-5:
                break
            # What is whole stays, and the one that is nearest to it goes up.
            for number in patterns[values[patterns] > 1 - 1e-6].tolist():
                whole = float(np.floor(values[number] + 1e-6))
                if whole > least.get(number, 0.0):
                    least[number] = whole
                    solver.changeColBounds(number, whole, highspy.kHighsInf)
            up = int(patterns[parts.argmax()])
            least[up] = float(np.floor(values[up] + 1e-6)) + 1
            solver.changeColBounds(up, least[up], highspy.kHighsInf)
            self._generate(np.inf, _DIVE_ROUNDS)
        for number in least:
            solver.changeColBounds(number, 0.0, highspy.kHighsInf)

    def _prices(self, best: Floats) -> Floats:
        """(O,) load on every rank and value of the pieces of each option."""
        encoded = self.encoded
        worth = best[np.minimum(self.steps, GRID)] * encoded.piece_count
        price: Floats = encoded.base_load + np.bincount(encoded.piece_option, worth, len(encoded.options))
        return np.where(self._allowed, price, np.inf)

    def _cheapest(self, price: Floats) -> tuple[Floats, Ints]:
        """Per group, the least price and the option that has it."""
        spans = [self.encoded.group_options[group] for group in self._group_rows]
        choice = np.array([span.start + int(price[span.start : span.stop].argmin()) for span in spans])
        return price[choice], choice

    def _begin(self) -> None:
        groups = list(self._group_rows)
        empty = (0, np.zeros(0, dtype=np.int32), np.zeros(0))
        for group in groups:
            self._solver.addRow(float(self._tables[group]), float(self._tables[group]), *empty)
        for many in self._many:
            self._solver.addRow(-highspy.kHighsInf, float(many), *empty)
        self._rows = len(groups) + len(self._many)
        # A table may stay out, at a price that no plan pays.
        for row in range(len(groups)):
            self._column(4.0 * self._room, {row: 1.0})
            self._columns.append((-1, {}, -1))
        linear: Floats = np.arange(GRID + 1, dtype=np.float64) * (self._room / GRID / self.encoded.ranks)
        for option in self._cheapest(self._prices(linear))[1]:
            self._add_option(int(option))

    def _column(self, cost: float, entries: dict[int, float]) -> None:
        rows = np.array(list(entries), dtype=np.int32)
        self._solver.addCol(cost, 0.0, highspy.kHighsInf, len(rows), rows, np.array(list(entries.values())))

    def _size_row(self, size: int) -> int:
        if size not in self._size_rows:
            self._solver.addRow(0.0, highspy.kHighsInf, 0, np.zeros(0, dtype=np.int32), np.zeros(0))
            self._size_rows[size], self._rows = self._rows, self._rows + 1
            for number, width in enumerate(self._widths.tolist()):
                if width >= size:
                    self._add_pattern({size: width // size}, number)
        return self._size_rows[size]

    def _add_option(self, option: int) -> None:
        encoded = self.encoded
        entries = {self._group_rows[int(encoded.option_group[option])]: 1.0}
        for piece in np.flatnonzero(encoded.piece_option == option):
            if self.steps[piece] > 0:
                row = self._size_row(int(self.steps[piece]))
                entries[row] = entries.get(row, 0.0) - float(encoded.piece_count[piece])
        self._column(float(encoded.base_load[option]), entries)
        self._columns.append((option, {}, -1))

    def _add_pattern(self, pattern: dict[int, int], number: int) -> None:
        pattern = {size: count for size, count in pattern.items() if count}
        entries = {self._class_rows[number]: 1.0}
        for size, count in pattern.items():
            entries[self._size_rows[size]] = float(count)
        self._column(0.0, entries)
        self._columns.append((-1, pattern, number))

    def _whole(self, bound: float, cutoff: float, nodes: int, seconds: float) -> Filled:
        solver, count = self._solver, len(self._columns)
        outside = len(self._group_rows)
        solver.changeColsBounds(outside, np.arange(outside, dtype=np.int32), np.zeros(outside), np.zeros(outside))
        kinds = np.full(count, highspy.HighsVarType.kInteger.value, dtype=np.uint8)
        solver.changeColsIntegrality(count, np.arange(count, dtype=np.int32), kinds)
        for name, value in (
            ("presolve", "on"),
            ("mip_max_nodes", nodes),
            ("mip_rel_gap", 1e-3),
            ("mip_abs_gap", _CLOSE * self._room),
            ("objective_bound", cutoff),
            ("time_limit", min(seconds, 1e9)),
        ):
            solver.setOptionValue(name, value)
        solver.run()
        if solver.getInfo().primal_solution_status != _FEASIBLE:
            return Filled(bound)
        values = np.rint(solver.getSolution().col_value).astype(np.int64)
        counts = np.zeros(len(self.encoded.options), dtype=np.int64)
        patterns: list[list[dict[int, int]]] = [[] for _ in self._many]
        for (option, pattern, number), value in zip(self._columns, values.tolist(), strict=True):
            if option >= 0:
                counts[option] += value
            elif number >= 0:
                patterns[number] += [pattern] * value
        ranks = tuple(
            tuple(size for size, many in patterns[kind].pop().items() for _ in range(many)) if patterns[kind] else ()
            for kind in self._class_of.tolist()
        )
        return Filled(bound, counts, ranks)

    def packed(self, filled: Filled, kept: Packing | None) -> Packing | None:
        """The packing of a solution, together with what was kept; None if it breaks a memory limit.

        Args:
            filled: with counts.
            kept: the tables that were not to be placed.
        """
        encoded = self.encoded
        assert filled.counts is not None, "there is a solution to pack"
        counts = filled.counts if kept is None else filled.counts + kept.counts
        packing = Packing(encoded, counts)
        for block, at in {} if kept is None else kept.at.items():
            for place in np.flatnonzero(at).tolist():
                packing.put(block, place, int(at[place]))
        waiting: dict[int, list[int]] = {}
        for option in np.flatnonzero(filled.counts).tolist():
            for block, count in encoded.option_blocks[option]:
                size = int(np.floor(encoded.blocks[block].loads[0] / self._room * GRID + 1e-6))
                waiting.setdefault(size, []).extend([block] * (count * int(filled.counts[option])))
        for rank, sizes in enumerate(filled.ranks):
            for size in sizes:
                if waiting.get(size):
                    packing.put(waiting[size].pop(), rank)
        # Pieces of next to no load are in no pattern.
        rest = [block for blocks in waiting.values() for block in blocks]
        return packing if all(packing.place_best(block) for block in rest) and packing.fits() else None

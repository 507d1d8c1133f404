"""A bound of the load on every rank, for a given room for pieces: hosts and ranks filled in fractions of ways.

What :mod:`patterns` says of ranks, one level higher. Some parts put something on each rank of a host. Such a part is
taken as its least piece n on all L ranks, and what its other pieces have beyond that as free pieces. Then a host with
parts of n1, n2, ... has ranks with room for room - n1 - n2 - ... of free pieces, and with V the value of free pieces by
size and W that of parts by n, no host is worth more than

    top = max over N of  W(N) + L V(room - N)

so that every choice of options has E >= sum over tables of (load on every rank + V of its free pieces + W of its parts)
- H top. V and W are the value functions of knapsacks whose prices are the dual values of a programme with a column for
each option, each way to fill a rank that has so much room, and each set of parts on a host; columns are generated.

A part's largest piece, e beyond n, must fit a rank of the same host: parts are on a host only if e <= room - N. So W
depends on the largest e that is allowed, and a part is worth what those with no larger e than its own are worth. That
is all that is said of where on the host the rest of the pieces are; and memory is left out.

Shapes: G steps of size, H hosts of L ranks (or R of one rank, where no part is bound to a host).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import highspy
import numpy as np

from shardrec.planner.solve.encode import Block, Encoded, Floats, Ints
from shardrec.planner.solve.knapsack import GRID, knapsack, knapsacks

__all__ = ["RoomBound"]

_ROUNDS = 250
_CLOSE = 5e-4
_WAYS = 12
"""Ways to fill a rank that are added at a time."""
_NOTHING = np.zeros(0, dtype=np.int32)


class RoomBound:
    """The parts of a problem, for bounds with any room.

    Args:
        encoded: the problem.
    """

    def __init__(self, encoded: Encoded) -> None:
        self.encoded = encoded
        self._local, host_blocks = _host_blocks(encoded)
        self.hosts = encoded.ranks // self._local
        free: list[tuple[int, float, float]] = []
        bound: list[tuple[int, float, float]] = []
        beyond: list[tuple[int, float, float]] = []
        for option, blocks in enumerate(encoded.option_blocks):
            for block, count in blocks:
                loads = encoded.blocks[block].loads
                least = 0.0
                if block in host_blocks:
                    least = float(loads.min())
                    bound.append((option, least, float(count)))
                    beyond.append((option, float(loads.max()) - least, float(count)))
                free += [(option, float(load) - least, float(count)) for load in loads if load > least]
        self._free, self._bound, self._beyond = _items(free), _items(bound), _items(beyond)[1]

    def solve(self, room: float, cutoff: float) -> tuple[float, Floats]:
        """The bound, not much above ``cutoff``, and the value of sizes: (G + 1,), 1 for all the room."""
        return _Programme(self, room).solve(cutoff)


Part = tuple[int, int]
"""Steps of a part's least piece, and of its largest beyond that."""


@dataclass(frozen=True, eq=False)
class _Worth:
    """W by size, for parts whose e is at most an edge.

    Args:
        edges: ascending, the first is 0.
        values: (edges, G + 1).
        parts: kinds of parts.
        pieces: for a size and the number of an edge, how many of each are in the best set.
    """

    edges: list[int]
    values: Floats
    parts: list[Part]
    pieces: Callable[[int, int], Ints]

    def of(self, sizes: Ints, most: Ints) -> Floats:
        """W of sizes, with parts whose e is at most so many steps."""
        found: Floats = self.values[np.searchsorted(self.edges, most, side="right") - 1, sizes]
        return found

    def set(self, filled: int) -> dict[Part, int]:
        """The best set of parts that take so much of each rank, and leave room for their largest pieces."""
        edge = int(np.searchsorted(self.edges, GRID - filled, side="right")) - 1
        return dict(zip(self.parts, self.pieces(filled, edge).tolist(), strict=True))


class _Programme:
    def __init__(self, parts: RoomBound, room: float) -> None:
        encoded = self.encoded = parts.encoded
        self._room, self._hosts, self._local = room, parts.hosts, parts._local
        (self._free_option, free, self._free_count), (self._bound_option, bound, self._bound_count) = (
            parts._free,
            parts._bound,
        )
        self._free_steps, self._bound_steps = _steps(free, room), _steps(bound, room)
        self._beyond_steps = _steps(parts._beyond, room)
        options = len(encoded.options)
        over = np.bincount(self._free_option[self._free_steps > GRID], minlength=options)
        over += np.bincount(self._bound_option[self._bound_steps + self._beyond_steps > GRID], minlength=options)
        self._allowed = over == 0
        self._solver: Any = highspy.Highs()  # type: ignore[no-untyped-call]
        for name, value in (("output_flag", False), ("threads", 1), ("random_seed", 0), ("presolve", "off")):
            self._solver.setOptionValue(name, value)
        # Rows: one per group, one for the hosts, then those of sizes, of parts and of rooms as they are needed.
        for size in encoded.sizes.tolist():
            self._solver.addRow(float(size), float(size), 0, _NOTHING, np.zeros(0))
        self._solver.addRow(-highspy.kHighsInf, float(self._hosts), 0, _NOTHING, np.zeros(0))
        self._host_row = len(encoded.groups)
        self._rows = self._host_row + 1
        self._size_rows: dict[int, int] = {}
        self._part_rows: dict[Part, int] = {}
        self._room_rows: dict[int, int] = {}

    def solve(self, cutoff: float) -> tuple[float, Floats]:
        encoded = self.encoded
        line: Floats = np.arange(GRID + 1, dtype=np.float64) / GRID
        if not all(self._allowed[span.start : span.stop].any() for span in encoded.group_options):
            return np.inf, line
        for row in range(len(encoded.groups)):
            self._column(4.0 * self._room, {row: 1.0})  # a table may stay out, at a price that no plan pays
        self._add_set({})
        flat = _Worth(
            edges=[0],
            values=(line * (self._room / self._hosts))[None],
            parts=[],
            pieces=lambda size, edge: np.zeros(0, dtype=np.int64),
        )
        for option in self._cheapest(line * (self._room / encoded.ranks), flat)[1]:
            self._add_option(int(option))
        bound, value = -np.inf, line
        for _ in range(_ROUNDS):
            self._solver.run()
            duals = np.array(self._solver.getSolution().row_dual)
            objective = float(self._solver.getInfo().objective_function_value)
            sizes, best, pieces = self._knapsack(self._size_rows, duals)
            worth = self._worth(duals)
            values = worth.of(np.arange(GRID + 1), GRID - np.arange(GRID + 1)) + self._local * best[::-1]
            lowest, choice = self._cheapest(best, worth)
            bound = max(bound, float(lowest @ encoded.sizes) - self._hosts * float(values.max()))
            value = best / best[-1] if best[-1] > 0 else line
            if bound > cutoff or objective - bound <= _CLOSE * self._room:
                break
            added = False
            if values.max() > -duals[self._host_row] * (1 + 1e-7) + 1e-12:
                self._add_set(worth.set(int(values.argmax())))
                added = True
            over = {
                filled: best[GRID - filled] + duals[row] * (1 + 1e-7) - 1e-12
                for filled, row in self._room_rows.items()
                if row < len(duals)
            }
            for filled in sorted(over, key=lambda filled: -over[filled])[:_WAYS]:
                if over[filled] > 0:
                    self._add_pattern(dict(zip(sizes, pieces(GRID - filled).tolist(), strict=True)), filled)
                    added = True
            for group in np.flatnonzero(lowest < duals[: len(lowest)] - 1e-9 * self._room):
                self._add_option(int(choice[group]))
                added = True
            if not added:
                break
        return bound, value

    def _knapsack(self, rows: dict[int, int], duals: Floats) -> tuple[list[int], Floats, Any]:
        sizes = sorted(rows)
        values = np.maximum(duals[[rows[size] for size in sizes]], 0.0) if sizes else np.zeros(0)
        return sizes, *knapsack(np.array(sizes, dtype=np.int64), values, GRID)

    def _worth(self, duals: Floats) -> _Worth:
        """W, for each limit of e that makes a difference."""
        parts = sorted(self._part_rows, key=lambda part: (part[1], part[0]))
        edges = sorted({0, *(beyond for _, beyond in parts)})
        ends = np.searchsorted([beyond for _, beyond in parts], edges, side="right").tolist()
        prices = np.maximum(duals[[self._part_rows[part] for part in parts]], 0.0) if parts else np.zeros(0)
        values, pieces = knapsacks(np.array([least for least, _ in parts], dtype=np.int64), prices, GRID, ends)
        return _Worth(edges=edges, values=values, parts=parts, pieces=pieces)

    def _cheapest(self, best: Floats, worth: _Worth) -> tuple[Floats, Ints]:
        """Per group, the least load on every rank and value, and the option that has it."""
        encoded, count = self.encoded, len(self.encoded.options)
        price = encoded.base_load + np.bincount(
            self._free_option, best[np.minimum(self._free_steps, GRID)] * self._free_count, count
        )
        part = worth.of(np.minimum(self._bound_steps, GRID), self._beyond_steps)
        price += np.bincount(self._bound_option, part * self._bound_count, count)
        price = np.where(self._allowed, price, np.inf)
        choice = np.array([span.start + int(price[span.start : span.stop].argmin()) for span in encoded.group_options])
        return price[choice], choice

    def _column(self, cost: float, entries: dict[int, float]) -> None:
        rows = np.array(list(entries), dtype=np.int32)
        self._solver.addCol(cost, 0.0, highspy.kHighsInf, len(rows), rows, np.array(list(entries.values())))

    def _row(self, lower: float, upper: float) -> int:
        self._solver.addRow(lower, upper, 0, _NOTHING, np.zeros(0))
        self._rows += 1
        return self._rows - 1

    def _room_row(self, filled: int) -> int:
        """Ranks whose hosts' parts take so many steps: ways to fill them, less what the hosts provide, at most 0."""
        if filled not in self._room_rows:
            self._room_rows[filled] = self._row(-highspy.kHighsInf, 0.0)
        return self._room_rows[filled]

    def _add_set(self, parts: dict[Part, int]) -> None:
        """A set of parts on a host."""
        filled = sum(part[0] * count for part, count in parts.items())
        entries = {self._host_row: 1.0, self._room_row(filled): -float(self._local)}
        for part, count in parts.items():
            if count:
                entries[self._part_rows[part]] = float(count)
        self._column(0.0, entries)

    def _add_pattern(self, pattern: dict[int, int], filled: int) -> None:
        entries = {self._room_row(filled): 1.0}
        for step, count in pattern.items():
            if count:
                entries[self._size_rows[step]] = float(count)
        self._column(0.0, entries)

    def _add_option(self, option: int) -> None:
        encoded = self.encoded
        entries = {int(encoded.option_group[option]): 1.0}
        for item in np.flatnonzero((self._free_option == option) & (self._free_steps > 0)):
            step = int(self._free_steps[item])
            if step not in self._size_rows:
                self._size_rows[step] = self._row(0.0, highspy.kHighsInf)
                self._add_pattern({step: GRID // step}, 0)
            row = self._size_rows[step]
            entries[row] = entries.get(row, 0.0) - float(self._free_count[item])
        for item in np.flatnonzero((self._bound_option == option) & (self._bound_steps > 0)):
            part = (int(self._bound_steps[item]), int(self._beyond_steps[item]))
            if part not in self._part_rows:
                self._part_rows[part] = self._row(0.0, highspy.kHighsInf)
                self._add_set({part: 1})
            row = self._part_rows[part]
            entries[row] = entries.get(row, 0.0) - float(self._bound_count[item])
        self._column(float(encoded.base_load[option]), entries)


def _host_blocks(encoded: Encoded) -> tuple[int, set[int]]:
    """Ranks of a host, and the kinds of parts that have a piece on each of a host's ranks, on any host."""
    found: dict[tuple[frozenset[int], ...], set[int]] = {}
    for number, kind in enumerate(encoded.blocks):
        hosts = _partition(kind, encoded.ranks)
        if hosts:
            found.setdefault(hosts, set()).add(number)
    if not found:
        return 1, set()
    hosts = max(found, key=lambda hosts: len(found[hosts]))
    return len(hosts[0]), found[hosts]


def _partition(kind: Block, ranks: int) -> tuple[frozenset[int], ...]:
    """The sets of ranks of a kind's places, if these are all the ranks in equal parts; else nothing."""
    if kind.single or len(kind.names) < 2:
        return ()
    hosts = dict.fromkeys(frozenset(place) for place in kind.names)
    if len(hosts) * len(kind.loads) != ranks or len(frozenset().union(*hosts)) != ranks:
        return ()
    return tuple(hosts)


def _items(items: Sequence[tuple[int, float, float]]) -> tuple[Ints, Floats, Floats]:
    return (
        np.array([item[0] for item in items], dtype=np.int64),
        np.array([item[1] for item in items], dtype=np.float64),
        np.array([item[2] for item in items], dtype=np.float64),
    )


def _steps(loads: Floats, room: float) -> Ints:
    """In steps of 1/G of the room, rounded down: a bound must not round up."""
    return np.maximum(np.floor(loads / room * GRID - 1e-6), 0).astype(np.int64)

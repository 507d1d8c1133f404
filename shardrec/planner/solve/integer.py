"""The integer programme of a box: options, the hosts that their parts are on, and ways to fill ranks, in whole numbers.

For a host of share S whose ranks have room r there, c is S + r: here it is known which parts are on which of two hosts,
so that pieces are on ranks of their own host, and c is at least what either host makes it. The programmes in fractions
(:mod:`cells`) only have the mean of both.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import highspy
import numpy as np
from scipy.sparse import coo_matrix

from shardrec.planner.solve.cells import Box
from shardrec.planner.solve.encode import Floats
from shardrec.planner.solve.fillings import Kind
from shardrec.planner.solve.pricing import Pricing
from shardrec.planner.solve.sizes import GRID

__all__ = ["Chosen", "Slot", "Way", "Whole"]

_NODES = 200
_SLACK = 1e-6
_FEASIBLE = 2
_HEURISTICS = ("feasibility_jump", "rens", "rins", "root_reduced_cost", "shifting", "zi_round")
"""That are not run: they take nine tenths of the time, and branching comes to a solution as well, if there is one."""

Slot = tuple[int, int]
"""Steps of a piece's load, and of its memory."""
Way = tuple[Slot, ...]
"""Of the pieces on a rank, descending."""


@dataclass(frozen=True, eq=False)
class Chosen:
    """What a programme came to.

    Args:
        bound: of the cost in the box, of the most load; at least the target if the box is closed.
        counts: options of the smaller problem, and how many tables take them; None without a solution.
        first: kinds of parts, and how many of them are on the first host.
        ways: per class of ranks, the ways to fill its ranks.
    """

    bound: float
    counts: Mapping[int, int] | None = None
    first: Mapping[int, int] = field(default_factory=dict)
    ways: tuple[tuple[Way, ...], ...] = ()


class Whole:
    """The programme.

    Args:
        pricing: with prices for the box.
        box: rooms.
        options: that tables may take.
        listed: per class of ranks, ways to fill one.
        ranks: of each class. With one class of ranks on two hosts no option has parts on hosts.
    """

    def __init__(
        self,
        pricing: Pricing,
        box: Box,
        options: Sequence[int],
        listed: Sequence[Sequence[tuple[Kind, ...]]],
        ranks: Sequence[int],
    ) -> None:
        alike = pricing.alike
        self._pricing, self._box, self._options, self._ranks = pricing, box, list(options), ranks
        self._costs: list[float] = []
        self._most: list[float] = []
        self._lower: list[float] = []
        self._upper: list[float] = []
        self._entries: list[tuple[int, int, float]] = []
        sizes = alike.sizes[alike.group[self._options]].astype(float).tolist()
        base = alike.base[self._options].tolist()
        self._option = {o: self._column(most, cost) for o, most, cost in zip(options, sizes, base, strict=True)}
        self._ways = {
            self._column(float(ranks[kind])): (kind, way) for kind, found in enumerate(listed) for way in found
        }
        hosts = len(ranks) > 1
        there = set(self._option)
        self._first = {
            part: self._column(float(alike.part_count[part] * alike.sizes[alike.group[option]]))
            for part, option in enumerate(alike.part_option.tolist())
            if hosts and option in there
        }
        self._whole = len(self._most)
        self._cost = self._column(np.inf, 1.0)  # c
        for group, many in enumerate(alike.sizes.astype(float).tolist()):
            mine = [(column, 1.0) for option, column in self._option.items() if alike.group[option] == group]
            self._row(mine, many, many)
        for kind, many in enumerate(ranks):
            self._row([(column, 1.0) for column, (its, _) in self._ways.items() if its == kind], -np.inf, float(many))
        self._hold()
        self._share()
        self._limit()

    def _hold(self) -> None:
        """Ranks hold the pieces of the options used, each in its place or that of a larger one."""
        pieces = self._pieces()
        kinds = sorted({kind for held in pieces.values() for kind in held})
        frees = {}
        if self._first:
            for kind in kinds:
                wanted = [(self._option[o], n[kind]) for (o, part), n in pieces.items() if part < 0 and kind in n]
                if wanted:
                    frees[kind] = self._column(np.inf)
                    self._row([*wanted, (frees[kind], -1.0)], 0.0, np.inf)
        for its in range(len(self._ranks)):
            rows: dict[Kind, list[tuple[int, float]]] = {kind: [] for kind in kinds}
            for column, (of, way) in self._ways.items():
                if of == its:
                    for kind in set(way):
                        rows[kind].append((column, float(way.count(kind))))
            for less, more in _steps_down(kinds):
                column = self._column(np.inf)
                rows[more].append((column, -1.0))
                rows[less].append((column, 1.0))
            for (option, part), held in pieces.items():
                for kind, count in held.items():
                    rows[kind] += self._held(its, option, part, count)
            for kind, column in frees.items():
                rows[kind].append((column, 1.0 if its else -1.0))
            for row in rows.values():
                self._row(row, 0.0, np.inf)

    def _held(self, kind: int, option: int, part: int, count: float) -> list[tuple[int, float]]:
        """What a class of ranks has to hold of so many pieces of a part, or of free ones."""
        column = self._option[option]
        if not self._first:
            return [(column, -count)]
        if part < 0:
            return [(column, -count)] if kind else []
        each = float(self._pricing.alike.part_count[part])
        first = self._first[part]
        return [(first, count / each), (column, -count)] if kind else [(first, -count / each)]

    def _pieces(self) -> dict[tuple[int, int], dict[Kind, float]]:
        """By option and part, -1 for free pieces, how many pieces of each kind."""
        found: dict[tuple[int, int], dict[Kind, float]] = {}
        for option, part, kind, count in self._pricing.items():
            if option in self._option:
                held = found.setdefault((option, part), {})
                held[kind] = held.get(kind, 0.0) + count
        return found

    def _share(self) -> None:
        """c is at least the room of a host's ranks and its share, and less than a step above."""
        alike, box = self._pricing.alike, self._box
        for kind in range(len(self._ranks)):
            entries = [(self._cost, 1.0)]
            for part, column in self._first.items():
                share = float(alike.part_share[part])
                if kind:
                    its = self._option[int(alike.part_option[part])]
                    entries += [(column, share), (its, -share * float(alike.part_count[part]))]
                else:
                    entries.append((column, -share))
            self._row(entries, box.low[kind] / GRID - _SLACK, (box.high[kind] + 1) / GRID + _SLACK)

    def _limit(self) -> None:
        alike, box = self._pricing.alike, self._box
        if self._first:
            self._options_row((alike.share > 0).astype(np.float64), box.least, box.most)
        for number in self._pricing.limits:
            self._options_row(alike.rows[number], -np.inf, float(alike.limits[number]) * (1 + _SLACK))

    def _column(self, most: float, cost: float = 0.0) -> int:
        self._most.append(most)
        self._costs.append(cost)
        return len(self._most) - 1

    def _row(self, entries: Iterable[tuple[int, float]], low: float, high: float) -> None:
        self._entries += [(len(self._lower), column, value) for column, value in entries if value]
        self._lower.append(float(low))
        self._upper.append(float(high))

    def _options_row(self, values: Floats, low: float, high: float) -> None:
        self._row([(column, float(values[option])) for option, column in self._option.items()], low, high)

    def solve(self, target: float, bound: float, seconds: float) -> Chosen:
        """Whether there is a plan below a target.

        Args:
            target: of the most load.
            bound: of the cost in the box that is proven already.
            seconds: time limit.
        """
        solver = self._passed(target + _SLACK, seconds)
        solver.run()
        status, info = solver.getModelStatus(), solver.getInfo()
        proven = float(info.mip_dual_bound)
        # It may come with a solution above the target: what is cut off is only known to be no better than the target.
        if status == highspy.HighsModelStatus.kInfeasible or target <= proven < np.inf:
            return Chosen(target)
        # A programme that was stopped has proven no more than this.
        bound = max(bound, proven - _SLACK) if np.isfinite(proven) else bound
        if info.primal_solution_status != _FEASIBLE:
            return Chosen(bound)
        values = np.rint(solver.getSolution().col_value).astype(np.int64).tolist()
        ways: list[list[Way]] = [[] for _ in self._ranks]
        for column, (kind, way) in self._ways.items():
            ways[kind] += [tuple((size, heavy) for size, heavy, _ in way)] * values[column]
        return Chosen(
            bound,
            counts={option: values[column] for option, column in self._option.items() if values[column]},
            first={part: values[column] for part, column in self._first.items() if values[column]},
            ways=tuple(map(tuple, ways)),
        )

    def _passed(self, most: float, seconds: float) -> Any:
        solver: Any = highspy.Highs()  # type: ignore[no-untyped-call]
        for name in _HEURISTICS:
            solver.setOptionValue(f"mip_heuristic_run_{name}", False)
        for name, value in (
            ("output_flag", False),
            ("threads", 1),
            ("random_seed", 0),
            # It takes far longer than the rest, and cuts and reduced costs do as well.
            ("presolve", "off"),
            # One below the target is enough.
            ("mip_max_improving_sols", 1),
            ("mip_max_nodes", _NODES),
            ("mip_heuristic_effort", 0.0),
            # Not a row: without this bound, reduced costs fix nothing, and a heuristic for a first solution is run.
            ("objective_bound", most),
            ("time_limit", min(seconds, 1e9)),
        ):
            solver.setOptionValue(name, value)
        rows, columns, values = zip(*self._entries, strict=True)
        count = len(self._most)
        matrix = coo_matrix((values, (rows, columns)), shape=(len(self._lower), count)).tocsr()
        solver.passModel(
            count,
            len(self._lower),
            matrix.nnz,
            highspy.MatrixFormat.kRowwise.value,
            highspy.ObjSense.kMinimize.value,
            0.0,
            np.array(self._costs),
            np.zeros(count),
            np.array(self._most),
            np.array(self._lower),
            np.array(self._upper),
            matrix.indptr[:-1].astype(np.int32),
            matrix.indices.astype(np.int32),
            matrix.data,
            (np.arange(count) < self._whole).astype(np.int32),
        )
        return solver


def _steps_down(kinds: Sequence[Kind]) -> list[tuple[Kind, Kind]]:
    """Pairs of kinds, of which the first can take the place of the second; others follow from these.

    To the next smaller load of the same memory, and to the largest load of each lesser memory: of the same table, and
    of any.
    """
    found: list[tuple[Kind, Kind]] = []
    for kind in kinds:
        below = [less for less in kinds if less != kind and less[0] <= kind[0] and less[1] <= kind[1]]
        # Ascending, so that the largest stays.
        best = {less[1:]: less for less in below if less[2] in (-1, kind[2])}
        found += [(less, kind) for less in best.values()]
    return found

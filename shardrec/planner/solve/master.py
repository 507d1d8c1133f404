"""A linear programme whose columns are generated, and wait in a pool while they are of no use: a restricted master.

The same columns serve one programme after the other, which differ in the room that columns may need and in some rows'
limits. Each begins with the columns that cost least at prices that are known, and at the basis of that one before which
was most like it: an iteration takes time by the columns that are there, and few of thousands are of use in one.
Lübbecke and Desrosiers, "Selected topics in column generation" (2005).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import highspy
import numpy as np
from numpy.typing import NDArray

from shardrec.planner.solve.encode import Floats, Ints

__all__ = ["Master"]

_FIRST = 4
"""Columns with which a programme begins, for each row."""
_DUAL, _PRIMAL = 1, 4
"""How the simplex method goes on: from prices that are right, or from a solution that is."""
_ITERATIONS = 20
"""Of the simplex method, for each row and column: far more than it needs."""
_ANY = 2**31 - 1


@dataclass(frozen=True, eq=False)
class _Basis:
    """What a programme was about, and its basis: numbers of columns, and the status of each row."""

    about: Mapping[object, float]
    columns: Ints
    rows: list[Any]

    def distance(self, about: Mapping[object, float]) -> float:
        keys = self.about.keys() | about.keys()
        return sum(abs(self.about.get(key, 0.0) - about.get(key, 0.0)) for key in keys)


class Master:
    """The programme, in which no column is used less than 0 times.

    Attributes:
        solver: HiGHS, with the programme.
        here: number of each column that is in the programme, in its order there.
        lower: (rows,) limits; likewise ``upper``.
    """

    def __init__(self) -> None:
        self.solver: Any = highspy.Highs()  # type: ignore[no-untyped-call]
        for name, value in (
            ("output_flag", False),
            ("threads", 1),
            ("random_seed", 0),
            ("presolve", "off"),
            ("simplex_scale_strategy", 0),
            ("simplex_primal_edge_weight_strategy", 1),
        ):
            self.solver.setOptionValue(name, value)
        self.here: list[int] = []
        self._place: dict[int, int] = {}
        self.lower: list[float] = []
        self.upper: list[float] = []
        # Of each column: cost, and the room of a kind that it needs; of the entries of all: column, row and value.
        self._cost, self._need, self._kind = _Growing(np.float64), _Growing(np.int64), _Growing(np.int64)
        self._column, self._row, self._value = _Growing(np.int64), _Growing(np.int64), _Growing(np.float64)
        self._always: list[int] = []
        self._waiting: list[tuple[float, Sequence[int], Sequence[float]]] = []
        self._about: Mapping[object, float] = {}
        self._bases: list[_Basis] = []
        self._values: Floats = np.zeros(0)

    @property
    def rows(self) -> int:
        """How many there are."""
        return len(self.lower)

    @property
    def columns(self) -> int:
        """How many there are in the pool."""
        return len(self._cost)

    def row(self, lower: float, upper: float, entries: Mapping[int, float] | None = None) -> int:
        """A new row, with entries by column; its number."""
        self._flush()
        number, entries = self.rows, entries or {}
        self.lower.append(lower)
        self.upper.append(upper)
        self._column.extend(entries)
        self._row.extend([number] * len(entries))
        self._value.extend(entries.values())
        here = {self._place[column]: value for column, value in entries.items() if column in self._place}
        at = np.array(list(here), dtype=np.int32)
        self.solver.addRow(lower, upper, len(here), at, np.array(list(here.values()), dtype=np.float64))
        return number

    def limit(self, row: int, lower: float, upper: float) -> None:
        """Change a row's limits, for the next programme."""
        self.lower[row], self.upper[row] = lower, upper

    def column(
        self, cost: float, entries: Mapping[int, float], need: int = 0, kind: int = 0, *, always: bool = False
    ) -> int:
        """A new column, which is in the programme; its number.

        Args:
            cost: of one.
            entries: by row.
            need: room that it needs.
            kind: of room.
            always: whether it is in all programmes that have the room.
        """
        number = self.columns
        self._cost.extend([cost])
        self._need.extend([need])
        self._kind.extend([kind])
        self._column.extend([number] * len(entries))
        self._row.extend(entries)
        self._value.extend(entries.values())
        if always:
            self._always.append(number)
        self._enter(number, list(entries), list(entries.values()))
        return number

    def enter(self, column: int) -> bool:
        """Put a column of the pool into the programme; whether it was not there."""
        if column in self._place:
            return False
        at = np.flatnonzero(self._column.all == column)
        self._enter(column, self._row.all[at].tolist(), self._value.all[at].tolist())
        return True

    def begin(self, rooms: Sequence[int], about: Mapping[object, float], prices: Floats | None = None) -> None:
        """A programme for other rooms.

        Args:
            rooms: of each kind.
            about: what is particular to it; those that differ least in this are most alike.
            prices: (rows,) about what the rows will be worth; all columns that have the room are there without.
        """
        self._waiting.clear()
        able = self._need.all <= np.array(rooms)[self._kind.all]
        basis = min(self._bases, key=lambda other: other.distance(about), default=None)
        some, most = np.flatnonzero(able), _FIRST * self.rows
        if prices is not None and len(some) > most:
            some = some[np.argpartition(self._reduced(prices)[some], most)[:most]]
        into = np.zeros(self.columns, dtype=bool)
        into[some] = into[self._always] = True
        if basis is not None:
            into[basis.columns] = True
        self.here = np.flatnonzero(into).tolist()
        self._place = {number: place for place, number in enumerate(self.here)}
        self._pass(np.where(able, highspy.kHighsInf, 0.0))
        if basis is not None:
            self._start(basis)
        self._about = about
        self.solver.setOptionValue("simplex_strategy", _DUAL)

    def run(self) -> tuple[Floats, float]:
        """Solve it; (rows,) prices, and the value."""
        self._flush()
        self.solver.setOptionValue("simplex_iteration_limit", _ITERATIONS * (self.rows + len(self.here)))
        self.solver.run()
        if self.solver.getModelStatus() == highspy.HighsModelStatus.kIterationLimit:
            # It may go in circles from where it began. From the beginning, it does not.
            self.solver.clearSolver()
            self.solver.setOptionValue("simplex_iteration_limit", _ANY)
            self.solver.setOptionValue("simplex_strategy", _DUAL)
            self.solver.run()
        # What follows adds columns, and leaves the solution one.
        self.solver.setOptionValue("simplex_strategy", _PRIMAL)
        solution = self.solver.getSolution()
        self._values = np.array(solution.col_value)
        return np.array(solution.row_dual), float(self.solver.getInfo().objective_function_value)

    def keep(self) -> None:
        """Keep the basis for programmes to come."""
        _, basic = self.solver.getBasicVariables()
        columns = np.array(self.here, dtype=np.int64)[basic[basic >= 0]]
        self._bases.append(_Basis(self._about, columns, list(self.solver.getBasis().row_status)))

    def values(self) -> Floats:
        """(columns,) the last solution."""
        found = np.zeros(self.columns)
        found[self.here[: len(self._values)]] = self._values
        return found

    def _reduced(self, prices: Floats) -> Floats:
        """(columns,) what each costs more than it is worth."""
        worth = np.bincount(self._column.all, self._value.all * prices[self._row.all], self.columns)
        found: Floats = self._cost.all - worth
        return found

    def _pass(self, upper: Floats) -> None:
        """Hand the programme to the solver."""
        place = np.full(self.columns, -1)
        place[self.here] = np.arange(len(self.here))
        column = place[self._column.all]
        entries = np.flatnonzero(column >= 0)
        # Those of limits came later than the others of their column.
        entries = entries[np.argsort(column[entries], kind="stable")]
        starts = np.searchsorted(column[entries], np.arange(len(self.here)))
        self.solver.passModel(
            len(self.here),
            self.rows,
            len(entries),
            int(highspy.MatrixFormat.kColwise),
            int(highspy.ObjSense.kMinimize),
            0.0,
            self._cost.all[self.here],
            np.zeros(len(self.here)),
            upper[self.here],
            np.array(self.lower),
            np.array(self.upper),
            starts.astype(np.int32),
            self._row.all[entries].astype(np.int32),
            self._value.all[entries],
            np.zeros(len(self.here), dtype=np.int32),
        )

    def _start(self, basis: _Basis) -> None:
        """Begin at a basis; rows that were not there when it was kept are basic."""
        status, its = highspy.HighsBasisStatus, highspy.HighsBasis()
        columns = [status.kLower] * len(self.here)
        for number in basis.columns.tolist():
            columns[self._place[number]] = status.kBasic
        its.col_status = columns
        its.row_status = basis.rows + [status.kBasic] * (self.rows - len(basis.rows))
        its.valid = True
        self.solver.setBasis(its)

    def _enter(self, number: int, rows: Sequence[int], values: Sequence[float]) -> None:
        self._place[number] = len(self.here)
        self.here.append(number)
        self._waiting.append((float(self._cost.all[number]), rows, values))

    def _flush(self) -> None:
        """Add the columns that wait for it, all at once."""
        count = len(self._waiting)
        if not count:
            return
        starts = np.cumsum([0, *(len(rows) for _, rows, _ in self._waiting)])
        rows = np.array([row for _, rows, _ in self._waiting for row in rows], dtype=np.int32)
        values = np.array([value for _, _, values in self._waiting for value in values])
        costs, unlimited = np.array([cost for cost, _, _ in self._waiting]), np.full(count, highspy.kHighsInf)
        lower = np.zeros(count)
        self.solver.addCols(count, costs, lower, unlimited, len(rows), starts[:-1].astype(np.int32), rows, values)
        self._waiting.clear()


class _Growing:
    """Numbers in an array with room for more."""

    def __init__(self, dtype: type) -> None:
        self._held: NDArray[Any] = np.zeros(64, dtype=dtype)
        self._count = 0

    def __len__(self) -> int:
        return self._count

    @property
    def all(self) -> NDArray[Any]:
        return self._held[: self._count]

    def extend(self, values: Iterable[float]) -> None:
        new = list(values)
        count = self._count + len(new)
        if count > len(self._held):
            self._held = np.concatenate([self._held, np.zeros(max(count, len(self._held)), dtype=self._held.dtype)])
        self._held[self._count : count] = new
        self._count = count

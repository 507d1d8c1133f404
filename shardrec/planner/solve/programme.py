"""Linear programs over "how many tables take which option", and small integer ones, by HiGHS."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import highspy
import numpy as np

from shardrec.planner.solve.encode import Floats, Ints

__all__ = ["InIntegers", "Outcome", "Programme", "minimise_in_integers"]


@dataclass(frozen=True, eq=False)
class Outcome:
    """A solution.

    Args:
        values: one per column; None if the search ended without a solution.
        objective: its value.
        bound: no solution has a lower objective.
    """

    values: Floats | None
    objective: float
    bound: float


class Programme:
    """Minimise, where each group of columns adds up to its size and rows are at most their limits.

    The basis of one solution is where the next begins, if it has the same rows.

    Args:
        group_of: (O,) group of each column.
        sizes: (G,) sum of each group's columns.
    """

    def __init__(self, group_of: Ints, sizes: Ints) -> None:
        self._by_group = np.argsort(group_of, kind="stable")
        self._starts = np.searchsorted(group_of[self._by_group], np.arange(len(sizes)))
        self._sizes = sizes.astype(np.float64)
        self._basis: dict[tuple[int, ...], Any] = {}
        self._solver = _highs(presolve="off")

    def minimise(
        self,
        objective: Floats,
        upper: Floats,
        rows: Floats,
        limits: Floats,
        *,
        key: tuple[int, ...] = (),
    ) -> Outcome | None:
        """The best solution, or None if there is none.

        Args:
            objective: (O,).
            upper: (O,) most of each column; the least is 0.
            rows: (N, O).
            limits: (N,).
            key: which rows these are.
        """
        solver, columns, groups = self._solver, len(objective), len(self._sizes)
        top = float(np.abs(objective).max(initial=0.0)) or 1.0
        # A column is in the row of its group, which comes first, and in few others: never as a full matrix.
        row_of, column_of = np.nonzero(rows)
        starts = np.concatenate([self._starts, columns + np.searchsorted(row_of, np.arange(len(rows)))])
        solver.clearModel()
        solver.passModel(
            columns,
            groups + len(rows),
            columns + len(row_of),
            highspy.MatrixFormat.kRowwise.value,
            highspy.ObjSense.kMinimize.value,
            0.0,
            objective / top,
            np.zeros(columns),
            upper,
            np.concatenate([self._sizes, np.full(len(limits), -highspy.kHighsInf)]),
            np.concatenate([self._sizes, limits]),
            starts.astype(np.int32),
            np.concatenate([self._by_group, column_of]).astype(np.int32),
            np.concatenate([np.ones(columns), rows[row_of, column_of]]),
            np.zeros(columns, dtype=np.int32),
        )
        if key in self._basis:
            solver.setBasis(self._basis[key])
        solver.run()
        status = solver.getModelStatus()
        if status in (highspy.HighsModelStatus.kInfeasible, highspy.HighsModelStatus.kUnboundedOrInfeasible):
            return None
        solution = solver.getSolution()
        info = solver.getInfo()
        if status != highspy.HighsModelStatus.kOptimal:
            return Outcome(None, np.inf, -np.inf)
        self._basis[key] = solver.getBasis()
        value = float(info.objective_function_value) * top
        return Outcome(np.array(solution.col_value), value, value)


@dataclass(frozen=True, kw_only=True, eq=False)
class InIntegers:
    """How a search through integers ended.

    Args:
        values: the best that was found; None if nothing was.
        bound: no solution has a lower objective.
        is_optimal: nothing better exists, but for the gap.
        is_infeasible: nothing exists.
        timed_out: the time ended it.
    """

    values: Floats | None
    bound: float
    is_optimal: bool
    is_infeasible: bool
    timed_out: bool


def minimise_in_integers(
    matrix: Floats,
    lower: Floats,
    upper: Floats,
    least: Floats,
    most: Floats,
    *,
    nodes: int,
    seconds: float,
    gap: float,
) -> InIntegers:
    """Minimise the last column by branch and bound; the others are whole numbers.

    Args:
        matrix: (N, C).
        lower: (N,) the least that a row may come to.
        upper: (N,) the most.
        least: (C,) least of each column.
        most: (C,) most of each column.
        nodes: most branches.
        seconds: time limit.
        gap: stop at this relative gap.
    """
    solver, (row_count, columns) = _highs(), matrix.shape
    for name, value in (("mip_max_nodes", nodes), ("time_limit", min(seconds, 1e9)), ("mip_rel_gap", gap)):
        solver.setOptionValue(name, value)
    row_of, column_of = np.nonzero(matrix)
    solver.passModel(
        columns,
        row_count,
        len(row_of),
        highspy.MatrixFormat.kRowwise.value,
        highspy.ObjSense.kMinimize.value,
        0.0,
        np.eye(1, columns, columns - 1)[0],
        least,
        most,
        lower,
        upper,
        np.searchsorted(row_of, np.arange(row_count)).astype(np.int32),
        column_of.astype(np.int32),
        matrix[row_of, column_of],
        np.eye(1, columns, columns - 1, dtype=np.int32)[0] ^ 1,
    )
    solver.run()
    status, info = solver.getModelStatus(), solver.getInfo()
    found = info.primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible
    return InIntegers(
        values=np.array(solver.getSolution().col_value) if found else None,
        bound=float(info.mip_dual_bound),
        is_optimal=status == highspy.HighsModelStatus.kOptimal,
        is_infeasible=status == highspy.HighsModelStatus.kInfeasible,
        timed_out=status == highspy.HighsModelStatus.kTimeLimit,
    )


def _highs(presolve: str = "choose") -> Any:
    solver: Any = highspy.Highs()  # type: ignore[no-untyped-call]
    for name, value in (("output_flag", False), ("threads", 1), ("random_seed", 0), ("presolve", presolve)):
        solver.setOptionValue(name, value)
    return solver

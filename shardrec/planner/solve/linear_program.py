"""Linear programs over "how many tables take which option", and small integer ones, by HiGHS."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import highspy
import numpy as np

from shardrec.planner.solve.encode import Floats, Ints

_ABSOLUTE_GAP = 1e-6


@dataclass(frozen=True, kw_only=True, eq=False)
class Outcome:
    """How a search ended.

    Args:
        values: the best solution, one value per column. None if none was found.
        bound: lower bound of the objective. Infinite if the program is infeasible.
        finished: whether the solution is optimal, up to the gap.
        timed_out: the time ended it.
    """

    values: Floats | None
    bound: float
    finished: bool
    timed_out: bool


class LinearProgram:
    """Minimise, where each group of columns adds up to its size and rows are at most their limits.

    The basis of one solution is where the next begins, if it has the same rows.

    Args:
        group_of: (O,) group per column.
        sizes: (G,) sum of each group's columns.
    """

    def __init__(self, group_of: Ints, sizes: Ints) -> None:
        self._by_group = np.argsort(group_of, kind="stable")
        self._starts = np.searchsorted(group_of[self._by_group], np.arange(len(sizes)))
        self._sizes = sizes.astype(np.float64)
        self._basis: dict[tuple[int, ...], highspy.HighsBasis] = {}
        self._solver: Any = _highs(presolve="off")  # highspy's stubs lack getDualRay

    def minimise(
        self, objective: Floats, upper: Floats, rows: Floats, limits: Floats, *, key: tuple[int, ...] = ()
    ) -> Outcome:
        """The best solution.

        Args:
            objective: (O,).
            upper: (O,) most per column, the size of its group or 0. The least is 0.
            rows: (N, O).
            limits: (N,).
            key: which rows these are.
        """
        solver, columns = self._solver, len(objective)
        top = float(np.abs(objective[upper > 0]).max(initial=0.0)) or 1.0
        # A column is in the row of its group, which comes first, and in few others: never as a full matrix.
        row_of, column_of = np.nonzero(rows)
        starts = np.concatenate([self._starts, columns + np.searchsorted(row_of, np.arange(len(rows)))])
        solver.clearModel()
        _pass(
            solver,
            objective=objective / top,
            columns=(np.zeros(columns), upper),
            rows=(
                np.concatenate([self._sizes, np.full(len(limits), -highspy.kHighsInf)]),
                np.concatenate([self._sizes, limits]),
            ),
            matrix=(
                starts,
                np.concatenate([self._by_group, column_of]),
                np.concatenate([np.ones(columns), rows[row_of, column_of]]),
            ),
            integers=np.zeros(columns),
        )
        if key in self._basis:
            solver.setBasis(self._basis[key])
        solver.run()
        status = solver.getModelStatus()
        if status == highspy.HighsModelStatus.kOptimal:
            self._basis[key] = solver.getBasis()
            solution = solver.getSolution()
            duals = np.array(solution.row_dual)[len(self._sizes) :] * top
            bound = self._proven(objective, upper, rows, limits, duals)
            return Outcome(values=np.array(solution.col_value), bound=bound, finished=True, timed_out=False)
        infeasible = False
        if status in (highspy.HighsModelStatus.kInfeasible, highspy.HighsModelStatus.kUnboundedOrInfeasible):
            _, exists, ray = solver.getDualRay()
            rays = np.array(ray)[len(self._sizes) :]
            infeasible = exists and self._proven(np.zeros(columns), upper, rows, limits, rays) > 0
        return Outcome(values=None, bound=np.inf if infeasible else -np.inf, finished=infeasible, timed_out=False)

    def _proven(self, objective: Floats, upper: Floats, rows: Floats, limits: Floats, duals: Floats) -> float:
        """What the objective comes to at least, by duals of the rows (N,), whichever they are.

        HiGHS' own value is exact to a tolerance that is relative to the largest coefficient, not to the value.
        """
        duals = np.minimum(duals, 0.0)
        reduced = np.where(upper > 0, objective - np.einsum("n,no->o", duals, rows), np.inf)
        least = np.minimum.reduceat(reduced[self._by_group], self._starts)
        return float(np.einsum("g,g->", least, self._sizes) + np.einsum("n,n->", duals, limits))


def minimise_in_integers(
    matrix: Floats,
    rows: tuple[Floats, Floats],
    columns: tuple[Floats, Floats],
    *,
    nodes: int,
    seconds: float,
    gap: float,
) -> Outcome:
    """Minimise the last column by branch and bound. The others are whole numbers.

    Args:
        matrix: (N, C).
        rows: (N,) the least that each may come to, and (N,) the most.
        columns: (C,) the least of each, and (C,) the most.
        nodes: most branches.
        seconds: time limit.
        gap: stop at this relative gap.
    """
    solver, (row_count, count) = _highs(), matrix.shape
    for name, value in (("mip_max_nodes", nodes), ("time_limit", min(seconds, 1e9)), ("mip_rel_gap", gap)):
        solver.setOptionValue(name, value)
    row_of, column_of = np.nonzero(matrix)
    last = np.eye(1, count, count - 1)[0]
    starts = np.searchsorted(row_of, np.arange(row_count))
    entries = (starts, column_of, matrix[row_of, column_of])
    _pass(solver, objective=last, columns=columns, rows=rows, matrix=entries, integers=1 - last)
    solver.run()
    status, info = solver.getModelStatus(), solver.getInfo()
    feasible = info.primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible
    bound = float(info.mip_dual_bound)
    if feasible:
        # HiGHS' bound leaves out branches that it cut off because they are within the gap of the best.
        best = float(info.objective_function_value)
        bound = min(bound, best - max(gap * abs(best), _ABSOLUTE_GAP))
    return Outcome(
        values=np.array(solver.getSolution().col_value) if feasible else None,
        bound=bound,
        finished=status in (highspy.HighsModelStatus.kOptimal, highspy.HighsModelStatus.kInfeasible),
        timed_out=status == highspy.HighsModelStatus.kTimeLimit,
    )


def _pass(
    solver: highspy.Highs,
    *,
    objective: Floats,
    columns: tuple[Floats, Floats],
    rows: tuple[Floats, Floats],
    matrix: tuple[Ints, Ints, Floats],
    integers: Floats,
) -> None:
    """Give a solver its model. The matrix is given by the start of each row, and by each entry's column and value."""
    starts, column_of, values = matrix
    solver.passModel(
        len(objective),
        len(rows[0]),
        len(values),
        highspy.MatrixFormat.kRowwise.value,
        highspy.ObjSense.kMinimize.value,
        0.0,
        objective,
        *columns,
        *rows,
        starts.astype(np.int32),
        column_of.astype(np.int32),
        values,
        integers.astype(np.int32),
    )


def _highs(presolve: str = "choose") -> highspy.Highs:
    solver = highspy.Highs()  # type: ignore[no-untyped-call]
    for name, value in (("output_flag", False), ("threads", 1), ("random_seed", 0), ("presolve", presolve)):
        solver.setOptionValue(name, value)
    return solver

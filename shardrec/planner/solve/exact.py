"""The whole problem as one integer program, for problems small enough."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate

import numpy as np

from shardrec.planner.solve.encode import Encoded, Floats
from shardrec.planner.solve.linear_program import Outcome, minimise_in_integers
from shardrec.planner.solve.packing import Packing

_MAX_VARIABLES = 400
_SMALL = 1e-3
"""Part of the largest load. A bound below it cannot serve as a scale for loads."""


def solve_exactly(
    encoded: Encoded, best: Packing | None, bound: float, *, gap: float, nodes: int, seconds: float
) -> tuple[Packing | None, Outcome] | None:
    """Solve the problem by branch and bound. None if it is too large for that.

    Args:
        encoded: the problem.
        best: the best packing so far.
        bound: proven already.
        gap: stop at this relative gap.
        nodes: most branches.
        seconds: time limit.

    Returns:
        A packing, if it improves on the present one; and how the search ended, with the bound of all packings.
    """
    # Columns: the options, then each kind's places, and at the end the cost. A kind of gang is counted per option:
    # gangs of two tables may be equal, and both counts must come out.
    options, kinds, groups = len(encoded.base), encoded.kinds, len(encoded.groups)
    kind_column = [*accumulate((len(kind.names) for kind in kinds), initial=options)]
    count = kind_column[-1]
    if count > _MAX_VARIABLES:
        return None
    ranks, tiers = encoded.ranks, np.flatnonzero(np.isfinite(encoded.capacity))
    # HiGHS' tolerances are absolute: the cost has to be about 1. A bound may be next to nothing, where only memory
    # keeps tables from their cheapest options.
    largest = float(encoded.total[:, 0].max(initial=0.0))
    least_scale = bound if bound > _SMALL * largest else largest or 1.0
    load_scale = 1.0 / (least_scale if best is None else best.cost or least_scale)
    # Rows: one per group, one per kind of gang, then load and memory per rank.
    first = groups + len(kinds)
    matrix = np.zeros((first + ranks * (1 + len(tiers)), count + 1))
    matrix[encoded.option_group, np.arange(options)] = 1.0
    for option, gangs in enumerate(encoded.option_gangs):
        for number, gang_count in gangs:
            matrix[groups + number, option] -= gang_count

    def in_units(size: Floats) -> Floats:
        """(D, n) of n options or items, (n, D): load, and bytes of each tier with a limit, which is 1."""
        memory = size[:, 1 + tiers] / np.maximum(encoded.capacity[tiers], 1.0)
        return np.column_stack([size[:, 0] * load_scale, memory]).T

    for dim, of_options in enumerate(in_units(encoded.base)):
        matrix[first + ranks * dim : first + ranks * (dim + 1), :options] = of_options
    matrix[first : first + ranks, count] = -1.0
    for number, kind in enumerate(kinds):
        sizes = in_units(kind.size)
        for column, place in enumerate(kind.places, kind_column[number]):
            matrix[groups + number, column] = 1.0
            for dim, of_items in enumerate(sizes):
                np.add.at(matrix[:, column], first + ranks * dim + place, of_items)
    lower = np.concatenate([encoded.sizes, np.zeros(len(kinds)), np.full(matrix.shape[0] - first, -np.inf)])
    upper = np.concatenate([encoded.sizes, np.zeros(len(kinds) + ranks), np.ones(ranks * len(tiers))])
    most = np.full(count + 1, np.inf)
    if best is not None:
        most[count] = best.cost * load_scale
        most[:options][encoded.base[:, 0] > best.cost] = 0.0
    least = np.zeros(count + 1)
    least[count] = bound * load_scale
    outcome = minimise_in_integers(matrix, (lower, upper), (least, most), nodes=nodes, seconds=seconds, gap=gap / 2)
    packing = None
    if outcome.values is not None:
        values = np.rint(outcome.values).astype(np.int64)
        places = ((number, place) for number, kind in enumerate(kinds) for place in range(len(kind.names)))
        counted = zip(places, values[options:count].tolist(), strict=True)
        placed = ((kind, place, gangs) for (kind, place), gangs in counted if gangs)
        packing = Packing.fitting(encoded, values[:options], placed)
    if np.isfinite(outcome.bound):
        bound = max(bound, outcome.bound / load_scale * (1 - 1e-7))
    # Without values, there is nothing below the best that was known.
    finished = outcome.finished and (outcome.values is None or packing is not None)
    return packing, replace(outcome, bound=bound, finished=finished)

"""The whole problem as one integer program, for problems small enough."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from shardrec.planner.solve.encode import Encoded, Floats
from shardrec.planner.solve.linear_program import minimise_in_integers
from shardrec.planner.solve.packing import Packing

_MAX_VARIABLES = 400
_SMALL = 1e-3
"""Part of the largest load. A bound below it cannot serve as a scale for loads."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Exact:
    """The result of HiGHS: a packing, if it improves on the present one, a bound, and whether the packing is
    optimal."""

    packing: Packing | None
    bound: float
    timed_out: bool
    finished: bool


def solve_exactly(
    encoded: Encoded, best: Packing | None, bound: float, *, gap: float, nodes: int, seconds: float
) -> Exact | None:
    """Solve the problem by branch and bound. None if it is too large for that.

    Args:
        encoded: the problem.
        best: the best packing so far.
        bound: proven already.
        gap: stop at this relative gap.
        nodes: most branches.
        seconds: time limit.
    """
    # A kind of gang is counted per option: gangs of two tables may be equal, and both counts must come out.
    used = sorted({block for blocks in encoded.option_blocks for block, _ in blocks})
    starts, count = {}, len(encoded.options)
    for block in used:
        starts[block] = count
        count += len(encoded.blocks[block].names)
    if count > _MAX_VARIABLES:
        return None
    ranks, tiers = encoded.ranks, [tier for tier, size in enumerate(encoded.capacity) if np.isfinite(size)]
    groups = len(encoded.groups)
    # HiGHS' tolerances are absolute: the cost has to be about 1. A bound may be next to nothing, where only memory
    # keeps tables from their cheapest options.
    largest = float(encoded.total_load.max(initial=0.0))
    least_scale = bound if bound > _SMALL * largest else largest or 1.0
    load_scale = 1.0 / (least_scale if best is None else best.cost or least_scale)
    # Rows: one per group, one per kind of gang, then load and memory per rank. The last column is the cost.
    matrix = np.zeros((groups + len(used) + ranks * (1 + len(tiers)), count + 1))
    for option, group in enumerate(encoded.option_group):
        matrix[int(group), option] = 1.0
    row_of = {block: groups + index for index, block in enumerate(used)}
    for option, blocks in enumerate(encoded.option_blocks):
        for block, gangs in blocks:
            matrix[row_of[block], option] -= gangs
    first = groups + len(used)

    def in_units(load: Floats, memory: Floats) -> Floats:
        """(D, n) of n options or items: load, and bytes of each tier with a limit, which is 1."""
        return np.stack([load * load_scale, *(memory[:, tier] / max(encoded.capacity[tier], 1.0) for tier in tiers)])

    for dim, of_options in enumerate(in_units(encoded.base_load, encoded.base_memory)):
        matrix[first + ranks * dim : first + ranks * (dim + 1), : len(encoded.options)] = of_options
    matrix[first : first + ranks, count] = -1.0
    for block in used:
        kind = encoded.blocks[block]
        sizes = in_units(kind.loads, kind.memory)
        for column, place in enumerate(kind.places, starts[block]):
            matrix[row_of[block], column] = 1.0
            for dim, of_items in enumerate(sizes):
                np.add.at(matrix[:, column], first + ranks * dim + place, of_items)
    lower = np.concatenate([encoded.sizes, np.zeros(len(used)), np.full(matrix.shape[0] - first, -np.inf)])
    upper = np.concatenate([encoded.sizes, np.zeros(len(used) + ranks), np.ones(ranks * len(tiers))])
    most = np.full(count + 1, np.inf)
    if best is not None:
        most[count] = best.cost * load_scale
        most[: len(encoded.options)][encoded.base_load > best.cost] = 0.0
    least = np.zeros(count + 1)
    least[count] = bound * load_scale
    outcome = minimise_in_integers(matrix, (lower, upper), (least, most), nodes=nodes, seconds=seconds, gap=gap / 2)
    packing = None
    if outcome.values is not None:
        values = np.rint(outcome.values).astype(np.int64)
        kinds = ((block, place) for block in used for place in range(len(encoded.blocks[block].names)))
        counted = zip(kinds, values[len(encoded.options) : count].tolist(), strict=True)
        placed = ((block, place, number) for (block, place), number in counted if number)
        packing = Packing.fitting(encoded, values[: len(encoded.options)], placed)
    return Exact(
        packing=packing,
        bound=max(bound, outcome.bound / load_scale * (1 - 1e-7)) if np.isfinite(outcome.bound) else bound,
        timed_out=outcome.timed_out,
        # Without values, there is nothing below the best that was known.
        finished=outcome.finished and (outcome.values is None or packing is not None),
    )

"""From measured times to a profile.

The cost model is linear in its coefficients (for a given ``cache_bytes``), so that a matrix has the part that each of
them adds to each time. The coefficients are those that explain the logarithms of the times best, none of them negative.
A soft loss keeps times that something else disturbed from bending the rest. ``cache_bytes`` is the candidate with which
that fits best.

Of a step, all of it, its forward and its backward are fitted: what is read in one and updated in the other, and how
often, differs too little between workloads to tell them apart by their sum. Replicas' steps count as a whole.

A step tells more of an all-to-all than the bare collective: ranks of a host do not use it on the CPU, and between the
steps' work it takes other times. So the exchange inside a host is also fitted to steps. Bare collectives give the bytes
of the all-reduce, and how far the links to other hosts are scaled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares, nnls

from shardrec import ConfigError, Topology
from shardrec.planner import CostModel, Profile, predicted_phases
from shardrec.trainer.calibrate.measure import Measured
from shardrec.trainer.calibrate.workload import Workload, step_plan, table_loads

Floats = NDArray[np.float64]

_FITTED = (
    "lookup_id_ns",
    "row_byte_ns",
    "update_id_ns",
    "summed_id_ns",
    "decode_ns",
    "bag_ns",
    "pooled_byte_ns",
    "route_id_ns",
    "exchange_byte_ns",
    "exchange_us",
    "replica_byte_ns",
    "shard_us",
    "forward_us",
    "backward_us",
)
_BY_CACHE = "row_byte_ns"
"""What it adds to a time depends on ``cache_bytes``."""
_CACHES = tuple(2.0**power for power in range(18, 28))
_USUAL_ERROR = 0.1
"""Relative errors beyond this count less than by their square."""


def predicted_ms(profile: Profile, workload: Workload, world: int) -> float:
    """Time of a step: the slowest rank's, and the part that no plan changes."""
    return sum(_phases(profile, workload, world))


def _phases(profile: Profile, workload: Workload, world: int) -> tuple[float, float]:
    model = CostModel(profile=profile, topology=Topology(ranks_per_host=world), batch_size=workload.batch)
    return predicted_phases(model, table_loads(workload), step_plan(workload, world))


def _times(workload: Workload, step: float, forward: float) -> list[float]:
    """The fitted parts of a step: all of it and its two parts, except for replicas, because their forward is not
    predicted."""
    return [step] if workload.cut == "data_parallel" else [step, forward, step - forward]


def relative_errors(profile: Profile, workloads: Sequence[Workload], measured: Measured) -> list[float]:
    """Predicted over measured, less one, for each workload."""
    return [
        predicted_ms(profile, workload, measured.world) / time - 1
        for workload, time in zip(workloads, measured.steps, strict=True)
    ]


def fewest_workloads(numbers_of_ranks: int) -> int:
    """The fewest workloads that determine the coefficients, if each is timed on this many numbers of ranks."""
    return -(-len(_FITTED) // numbers_of_ranks)


def fit(base: Profile, runs: Sequence[tuple[Sequence[Workload], Measured]], *, name: str, source: str) -> Profile:
    """The profile that fits the measurements best.

    Args:
        base: gives the coefficients that were not measured: exchange with other hosts is scaled as bare all-to-alls
            are.
        runs: workloads and their times, for one number of ranks each.
        name: of the profile.
        source: what was measured, for people.

    Raises:
        ConfigError: if there are fewer steps than coefficients.
    """
    steps_of = [zip(workloads, run.steps, run.forward, strict=True) for workloads, run in runs]
    times = np.array([time for each in steps_of for step in each for time in _times(*step)])
    steps = sum(len(measured.steps) for _, measured in runs)
    if steps < len(_FITTED):
        raise ConfigError(f"{steps} steps do not determine {len(_FITTED)} coefficients; measure more workloads")
    linked = _with_links(base, [measured for _, measured in runs])
    best: tuple[float, Profile] | None = None
    known: dict[str, Floats] = {}
    for cache in _CACHES:
        start = replace(linked, cache_bytes=cache, name=name, source=source)
        fitted = _solved(start, runs, times, known)
        errors = [abs(e) for workloads, measured in runs for e in relative_errors(fitted, workloads, measured)]
        score = float(np.mean(np.square(np.minimum(errors, 1.0))))
        if best is None or score < best[0]:
            percents = {"median_percent": round(100 * median(errors), 2), "worst_percent": round(100 * max(errors), 2)}
            best = score, replace(fitted, errors={**percents, "times": float(len(errors))})
    assert best is not None, "there are candidates"
    return best[1]


def _solved(
    start: Profile, runs: Sequence[tuple[Sequence[Workload], Measured]], times: Floats, known: dict[str, Floats]
) -> Profile:
    """The best coefficients for a ``cache_bytes``. ``known`` keeps the columns that do not depend on it."""

    def all_predicted(profile: Profile) -> Floats:
        predicted: list[float] = []
        for workloads, run in runs:
            for each in workloads:
                forward, backward = _phases(profile, each, run.world)
                predicted += _times(each, forward + backward, forward)
        return np.array(predicted)

    nothing: dict[str, Any] = dict.fromkeys(_FITTED, 0.0)
    fixed = all_predicted(replace(start, **nothing)) / times
    columns = dict(known)
    for name in _FITTED:
        if name not in columns:
            columns[name] = all_predicted(replace(start, **(nothing | {name: 1.0}))) / times - fixed
    known.update({name: column for name, column in columns.items() if name != _BY_CACHE})
    # What no workload used (the exchange, on one rank) stays as it was.
    used = {name: column for name, column in columns.items() if column.max() > 0}
    matrix = np.array(list(used.values())).T
    scale = matrix.max(axis=0)
    matrix /= scale
    first, _ = nnls(matrix, np.maximum(1 - fixed, 0.0))

    def logarithms(values: Floats) -> Floats:
        return np.asarray(np.log(fixed + matrix @ values))

    def slopes(values: Floats) -> Floats:
        return np.asarray(matrix / (fixed + matrix @ values)[:, None])

    # Off the bounds: from there the solver can go anywhere.
    begin = np.maximum(first, 1e-6)
    fitted = least_squares(
        logarithms, begin, jac=slopes, bounds=(0.0, np.inf), loss="soft_l1", f_scale=_USUAL_ERROR, max_nfev=200
    )
    return replace(start, **dict(zip(used, (fitted.x / scale).tolist(), strict=True)))


def _with_links(base: Profile, runs: Sequence[Measured]) -> Profile:
    """Time per byte of the all-reduce and of other hosts' links, by lines through the bare collectives' times."""
    exchange = [point for run in runs for point in run.all_to_all]
    # Of nothing, an all-reduce is nothing.
    reduce = [point for run in runs for point in run.all_reduce if point[0]]
    if not exchange or not reduce:
        return base
    exchange_byte, reduce_byte = _slope(exchange), _slope(reduce)
    factor = exchange_byte * 1e6 / base.exchange_byte_ns if base.exchange_byte_ns else 1.0
    return replace(base, host_exchange_byte_ns=base.host_exchange_byte_ns * factor, reduce_byte_ns=reduce_byte * 1e6)


def _slope(points: Sequence[tuple[float, float]]) -> float:
    """Of the line of the least relative error with an intercept and a slope that are not negative."""
    sizes, times = np.array(points, dtype=np.float64).T
    top = max(float(sizes.max()), 1.0)
    (_, slope), _ = nnls(np.stack([1 / times, sizes / top / times], axis=1), np.ones(len(times)))
    return float(slope / top)

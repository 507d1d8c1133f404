"""A single table takes another option: the most loaded rank's tables try each of theirs.

What counts is not the highest rank alone but a high norm of all ranks' loads: where many ranks are almost as loaded as
the first, each has to come down before the cost does.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from shardrec.planner.solve.encode import Floats
from shardrec.planner.solve.packing import Packing

__all__ = ["switch_options"]

_NORM = 80
_MOST_TRIALS = 1500
_LEAST_GAIN = 1e-4


def switch_options(packing: Packing) -> Packing | None:
    """A better packing in which one table that is on one of the most loaded ranks has another option, or None.

    Args:
        packing: is not changed.
    """
    reference = packing.cost
    before = _norm(packing.loads, reference)
    trials = 0
    for rank in np.argsort(-packing.loads, kind="stable")[:3]:
        for option, others in _candidates(packing, int(rank)):
            best: Packing | None = None
            best_norm = before * (1 - _LEAST_GAIN)
            for other in others:
                trials += 1
                found = _switched(packing, option, other, int(rank))
                if found is None:
                    continue
                norm = _norm(found.loads, reference)
                if norm < best_norm:
                    best, best_norm = found, norm
            if best is not None:
                return best
            if trials > _MOST_TRIALS:
                return None
    return None


def _norm(loads: Floats, reference: float) -> float:
    return float(((loads / reference) ** _NORM).sum())


def _candidates(packing: Packing, rank: int) -> Iterator[tuple[int, list[int]]]:
    """The options in use on a rank, and those that their tables might take instead."""
    encoded = packing.encoded
    here = set()
    for block, at in packing.at.items():
        if (at[(encoded.blocks[block].places == rank).any(axis=1)] > 0).any():
            here.add(block)
    room = packing.cost * (1 + 1e-9) - packing.loads.mean()
    for option in np.flatnonzero(packing.counts):
        if not (any(block in here for block, _ in encoded.option_blocks[option]) or encoded.base_load[option] > 0):
            continue
        # What is added in all must go somewhere below the top, and what is added everywhere is added at the top.
        span = encoded.group_options[encoded.option_group[option]]
        added = (encoded.total_load[span.start : span.stop] - encoded.total_load[option]) / encoded.ranks
        others = [other for other in span if other != option and added[other - span.start] < room]
        if others:
            yield int(option), others


def _switched(packing: Packing, option: int, other: int, rank: int) -> Packing | None:
    encoded = packing.encoded
    trial = packing.copy()
    trial.counts[option] -= 1
    trial.counts[other] += 1
    trial.loads += encoded.base_load[other] - encoded.base_load[option]
    trial.memory += encoded.base_memory[other] - encoded.base_memory[option]
    for block, count in encoded.option_blocks[option]:
        kind = encoded.blocks[block]
        for _ in range(count):
            at = trial.at[block]
            heaviest = np.where(at > 0, trial.loads[kind.places].max(axis=1), -np.inf)
            on_rank = (at > 0) & (kind.places == rank).any(axis=1)
            trial.put(block, int(on_rank.argmax() if on_rank.any() else heaviest.argmax()), -1)
    if trial.cost > packing.cost * (1 + 1e-9) or not trial.fits():
        return None
    demand: dict[int, int] = {}
    for block, count in encoded.option_blocks[other]:
        demand[block] = demand.get(block, 0) + count
    if not trial.fill(demand.items()):
        return None
    if trial.cost > packing.cost * 1.02:
        return None
    if trial.cost > packing.cost * (1 - 1e-9):
        trial.improve(4)
    return trial if trial.cost <= packing.cost * (1 + 1e-9) else None

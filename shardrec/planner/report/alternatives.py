"""Why the next-best cut of a table lost: what the plan would cost with it, all else as it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from shardrec.planner.candidate import Candidate
from shardrec.planner.solve.encode import Floats, Ints
from shardrec.planner.solve.problem import Option, Place, Solution

__all__ = ["next_best"]

_GIB = 2**30


def next_best(
    candidates: Mapping[str, Sequence[Candidate]], solution: Solution, capacity: float
) -> dict[str, tuple[str, str]]:
    """Per table, the label of its best other cut and the reason why it lost.

    Tables with the same candidates and choice share their answer, worked out for the first of them.

    Args:
        candidates: of each table.
        solution: the plan.
        capacity: bytes of a rank.
    """
    loads = np.array(solution.loads)
    memory = np.array(solution.memory)[:, 0]
    known: dict[tuple[int, int], tuple[str, str]] = {}
    # (items, places), by identity of the places, of which there are few and which the candidates keep.
    arrays: dict[int, Ints] = {}
    found = {}
    for name, options in candidates.items():
        chosen = solution.choice[name]
        key = (id(options), chosen)
        if key not in known:
            known[key] = _compare(options, chosen, solution.places[name], loads, memory, capacity, arrays)
        found[name] = known[key]
    return found


def _compare(
    options: Sequence[Candidate],
    chosen: int,
    places: Sequence[Place],
    loads: Floats,
    memory: Floats,
    capacity: float,
    arrays: dict[int, Ints],
) -> tuple[str, str]:
    rest_loads, rest_memory = loads.copy(), memory.copy()
    _add(options[chosen].option, places, rest_loads, rest_memory, -1)
    now, ranks = float(loads.max()), len(loads)
    highest, lowest = float(rest_loads.max()), float(rest_loads.min())
    total = _total(options[chosen].option, ranks)
    others = []
    for number, candidate in enumerate(options):
        if number != chosen and candidate.cut != options[chosen].cut:
            option = candidate.option
            largest = max((item.load for gang in option.gangs for item in gang.items), default=0.0)
            others.append((max(highest, lowest + largest) + option.everywhere.load, _total(option, ranks), number))
    best: tuple[float, float, str, str] | None = None
    # By the least that they can cost, so that most need not be placed.
    for least, work, number in sorted(others):
        if best is not None and (least, work) >= best[:2]:
            break
        option = options[number].option
        cost, missing = _with(option, rest_loads, rest_memory, capacity, arrays)
        rank = (np.inf, missing) if missing > 0 else (cost, work)
        if missing > 0:
            reason = f"{missing / _GIB:,.2f} GiB over a rank's limit"
        elif cost > now * (1 + 1e-6):
            reason = f"slowest rank {cost - now:+,.3f} ms ({(cost / now - 1) * 100:+.1f}%)"
        else:
            reason = f"no faster, all ranks together {work - total:+,.3f} ms"
        if best is None or rank < best[:2]:
            best = *rank, option.label, reason
    return ("", "no other cut is allowed") if best is None else best[2:]


def _add(option: Option, places: Sequence[Place], loads: Floats, memory: Floats, sign: int) -> None:
    loads += sign * option.everywhere.load
    memory += sign * option.everywhere.memory[0]
    spots = iter(places)
    for gang in option.gangs:
        for _ in range(gang.count):
            for item, rank in zip(gang.items, next(spots), strict=True):
                loads[rank] += sign * item.load
                memory[rank] += sign * item.memory[0]


def _with(
    option: Option, loads: Floats, memory: Floats, capacity: float, arrays: dict[int, Ints]
) -> tuple[float, float]:
    """Cost with an option added where it hurts least, and the bytes by which a rank is over."""
    loads, memory = loads + option.everywhere.load, memory + option.everywhere.memory[0]
    for gang in sorted(option.gangs, key=lambda gang: -max(item.load for item in gang.items)):
        if id(gang.places) not in arrays:
            arrays[id(gang.places)] = np.array(gang.places).T.copy()
        ranks = arrays[id(gang.places)]
        time = np.array([[item.load] for item in gang.items])
        size = np.array([[item.memory[0]] for item in gang.items])
        for _ in range(gang.count):
            score = (loads[ranks] + time).max(axis=0)
            if memory.max() + size.max() > capacity:
                over = np.maximum(memory[ranks] + size - capacity, 0).max(axis=0)
                score[over > over.min()] = np.inf
            place = ranks[:, score.argmin()]
            np.add.at(loads, place, time[:, 0])
            np.add.at(memory, place, size[:, 0])
    return float(loads.max()), float(max(memory.max() - capacity, 0.0))


def _total(option: Option, ranks: int) -> float:
    items = sum(gang.count * item.load for gang in option.gangs for item in gang.items)
    return option.everywhere.load * ranks + items

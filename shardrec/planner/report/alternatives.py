"""Why the next-best cut of a table was not chosen: the cost of the plan with it, everything else unchanged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from shardrec.planner.cut_option import Candidate, add_option
from shardrec.planner.solve.encode import Floats
from shardrec.planner.solve.problem import Option, Place, Solution

_GIB = 2**30


def next_best(
    candidates: Mapping[str, Sequence[Candidate]], solution: Solution, capacity: float
) -> dict[str, tuple[str, str]]:
    """Per table, the label of its best other cut and the reason why it lost.

    Tables with the same candidates and choice share their answer, worked out for the first of them.
    """
    loads = np.array(solution.loads)
    memory = np.array(solution.memory)[:, 0]
    limits = np.full(len(loads), capacity)
    known: dict[tuple[int, int], tuple[str, str]] = {}
    compared = {}
    for name, options in candidates.items():
        chosen = solution.choice[name]
        key = (id(options), chosen)
        if key not in known:
            known[key] = _compare(options, chosen, solution.places[name], loads, memory, limits)
        compared[name] = known[key]
    return compared


def _compare(
    options: Sequence[Candidate],
    chosen: int,
    places: Sequence[Place],
    loads: Floats,
    memory: Floats,
    limits: Floats,
) -> tuple[str, str]:
    rest_loads, rest_memory = loads.copy(), memory.copy()
    _take_off(options[chosen].option, places, rest_loads, rest_memory)
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
        new_loads, new_memory = rest_loads.copy(), rest_memory.copy()
        add_option(option, new_loads, new_memory, limits)
        cost, missing = float(new_loads.max()), max(float((new_memory - limits).max()), 0.0)
        rank = (np.inf, missing) if missing > 0 else (cost, work)
        if missing > 0:
            reason = f"{missing / _GIB:,.2f} GiB over a rank's limit"
        elif cost > now * (1 + 1e-6):
            reason = f"slowest rank {_more(cost - now)} ({(cost / now - 1) * 100:+.1f}%)"
        else:
            reason = f"no faster, all ranks together {_more(work - total)}"
        if best is None or rank < best[:2]:
            best = *rank, option.label, reason
    return ("", "no other cut is allowed") if best is None else best[2:]


def _more(ms: float) -> str:
    return f"{ms:+,.3f} ms" if abs(ms) >= 0.0005 else f"{'+' if ms > 0 else '-'}<0.001 ms"


def _take_off(option: Option, places: Sequence[Place], loads: Floats, memory: Floats) -> None:
    loads -= option.everywhere.load
    memory -= option.everywhere.memory[0]
    items = (gang.items for gang in option.gangs for _ in range(gang.count))
    for place, gang_items in zip(places, items, strict=True):
        for item, rank in zip(gang_items, place, strict=True):
            loads[rank] -= item.load
            memory[rank] -= item.memory[0]


def _total(option: Option, ranks: int) -> float:
    items = sum(gang.count * item.load for gang in option.gangs for item in gang.items)
    return option.everywhere.load * ranks + items

"""Plans from the programme of :mod:`hosts`: whole numbers of its columns, and what they say put on hosts and ranks.

A column is one of

    option   a table takes it
    set      a host holds these parts, each in one of its ways
    slot     a slot of a set for one kind of part holds a smaller kind
    way      a rank with so much of parts on it is filled up with these free pieces
    less     a rank with less of parts on it counts as one with more

Sizes are whole steps, rounded down, so a rank may come out a little above the room; its load is what it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import highspy
import numpy as np

from shardrec.planner.solve.encode import Encoded, Floats, Ints
from shardrec.planner.solve.inside import Inside
from shardrec.planner.solve.packing import Packing, demand

__all__ = ["unpacked", "whole_numbers"]

_FEASIBLE = 2
_GAP = 1e-3


def whole_numbers(solver: Any, most: Floats, *, cutoff: float, nodes: int, seconds: float) -> Ints | None:
    """Solve a programme for whole numbers; it is left as it was.

    Args:
        solver: with a linear programme.
        most: of each column. HiGHS goes through all the values that one could have, so there should be a limit.
        cutoff: an objective that is of no use.
        nodes: most branches.
        seconds: time limit.

    Returns:
        The value of each column; None if no solution was found below the cutoff.
    """
    count = int(solver.getNumCol())
    every = np.arange(count, dtype=np.int32)
    upper = np.array(solver.getLp().col_upper_)
    options = {
        name: solver.getOptionValue(name)[1]
        for name in ("presolve", "simplex_strategy", "objective_bound", "time_limit", "mip_max_nodes")
    }
    solver.changeColsBounds(count, every, np.zeros(count), np.minimum(most, upper))
    solver.changeColsIntegrality(count, every, np.full(count, highspy.HighsVarType.kInteger.value, dtype=np.uint8))
    for name, value in (
        ("presolve", "on"),
        ("simplex_strategy", 1),
        ("mip_rel_gap", 0.0),
        ("mip_abs_gap", _GAP),
        ("mip_max_nodes", nodes),
        ("mip_heuristic_effort", 0.3),
        ("objective_bound", cutoff),
        ("time_limit", min(seconds, 1e9)),
    ):
        solver.setOptionValue(name, value)
    solver.run()
    values = None
    info = solver.getInfo()
    if info.primal_solution_status == _FEASIBLE and info.objective_function_value < cutoff:
        values = np.rint(solver.getSolution().col_value).astype(np.int64)
    for name, value in options.items():
        solver.setOptionValue(name, value)
    solver.changeColsIntegrality(count, every, np.full(count, highspy.HighsVarType.kContinuous.value, dtype=np.uint8))
    solver.changeColsBounds(count, every, np.zeros(count), upper)
    solver.clearSolver()
    return values


def unpacked(encoded: Encoded, inside: Inside, columns: Sequence[tuple[Any, ...]], values: Ints) -> Packing | None:
    """The packing that whole numbers of columns stand for; None if it breaks a memory limit.

    Args:
        encoded: the problem.
        inside: its loads in steps.
        columns: what each column is.
        values: how often each is used.
    """
    used = [(column, int(value)) for column, value in zip(columns, values.tolist(), strict=True) if value > 0]
    counts = np.zeros(len(encoded.options), dtype=np.int64)
    for column, value in used:
        if column[0] == "option":
            counts[column[1]] += value
    packing = Packing(encoded, counts)
    slots, ranks = _hosts_filled(inside, used)
    _narrow(inside, slots, used)
    wanted = demand(encoded, counts)
    rest = _put_parts(encoded, inside, packing, slots, wanted)
    rest += _put_pieces(inside, packing, ranks, used, wanted)
    rest.sort(key=lambda block: -float(encoded.blocks[block].loads.max()))
    return packing if all(packing.place_best(block) for block in rest) and packing.fits() else None


Slots = dict[int, list[tuple[int, tuple[int, ...]]]]
"""Per kind of part, the hosts that hold one, and in what way."""


def _hosts_filled(inside: Inside, used: Sequence[tuple[tuple[Any, ...], int]]) -> tuple[Slots, dict[int, list[int]]]:
    """The slots of all hosts, and the ranks by what of parts is on them."""
    slots: Slots = {}
    ranks: dict[int, list[int]] = {}
    left = list(range(len(inside.hosts)))
    for column, value in used:
        if column[0] != "set":
            continue
        parts, loads = column[1], column[2]
        ways = _ways_of(inside, parts, loads)
        for _ in range(value):
            host = left.pop()
            for kind, way in zip(parts, ways, strict=True):
                slots.setdefault(kind, []).append((host, way))
            for rank, filled in zip(inside.hosts[host], loads, strict=True):
                ranks.setdefault(filled, []).append(rank)
    for host in left:
        ranks.setdefault(0, []).extend(inside.hosts[host])
    return slots, ranks


def _ways_of(inside: Inside, parts: tuple[int, ...], loads: tuple[int, ...]) -> list[tuple[int, ...]]:
    """A way for each part, such that together they come to these loads."""
    if not parts:
        return []
    for way in inside.kinds[parts[0]].tolist():
        after = tuple(load - own for load, own in zip(loads, way, strict=True))
        if min(after) < 0 or (len(parts) == 1 and any(after)):
            continue
        found = _ways_of(inside, parts[1:], after)
        if len(found) == len(parts) - 1:
            return [tuple(way), *found]
    return []


def _narrow(inside: Inside, slots: Slots, used: Sequence[tuple[tuple[Any, ...], int]]) -> None:
    """Give slots to smaller kinds, the largest first, as a slot may change hands more than once."""
    moves = [(column[1], column[2], value) for column, value in used if column[0] == "slot"]
    for kind, other, value in sorted(moves, key=lambda move: -int(inside.kinds[move[0]].sum(axis=1).max())):
        for _ in range(min(value, len(slots.get(kind, ())))):
            host, way = slots[kind].pop()
            fitting = (inside.kinds[other] <= np.array(way)).all(axis=1)
            slots.setdefault(other, []).append((host, tuple(inside.kinds[other][int(fitting.argmax())].tolist())))


def _put_parts(encoded: Encoded, inside: Inside, packing: Packing, slots: Slots, wanted: dict[int, int]) -> list[int]:
    """Put parts into their slots; those that are left."""
    left: list[int] = []
    for block, count in wanted.items():
        if block not in inside.kind_of:
            continue
        at = {inside.on_host(block, place): place for place in reversed(range(len(encoded.blocks[block].names)))}
        mine = slots.get(inside.kind_of[block], [])
        for _ in range(count):
            place = at.get(mine.pop()) if mine else None
            if place is None:
                left.append(block)
            else:
                packing.put(block, place)
    return left


def _put_pieces(
    inside: Inside,
    packing: Packing,
    ranks: dict[int, list[int]],
    used: Sequence[tuple[tuple[Any, ...], int]],
    wanted: dict[int, int],
) -> list[int]:
    """Put free pieces on the ranks that are to hold pieces of their sizes; those that are left."""
    waiting: dict[int, list[int]] = {}
    for block, count in wanted.items():
        if block not in inside.kind_of:
            size = int(inside.steps(packing.encoded.blocks[block].loads)[0])
            waiting.setdefault(size, []).extend([block] * count)
    for less, more, value in sorted((column[1], column[2], value) for column, value in used if column[0] == "less"):
        for _ in range(min(value, len(ranks.get(less, ())))):
            ranks.setdefault(more, []).append(ranks[less].pop())
    for column, value in used:
        if column[0] == "way":
            for rank in [ranks[column[1]].pop() for _ in range(min(value, len(ranks.get(column[1], ()))))]:
                for size, many in column[2].items():
                    for _ in range(many):
                        if waiting.get(size):
                            packing.put(waiting[size].pop(), rank)
    return [block for blocks in waiting.values() for block in blocks]

"""Plans where memory binds: room for time, and a reserve of memory, are tried one after the other.

A plan that is as good as the programme of :mod:`joint` says has each rank full to the brim. So a little room is added
in time, and a part of what memory is to spare is kept from the programme, for the last pieces to be put in
(:mod:`settle`). Parts that are bound to sets of ranks are chosen and placed first: the programme takes their pieces as
if they could be anywhere.

Where ranks have a great many pieces, small ones fill any gap, in time and memory: what the rows alone choose is
rounded, and all of its pieces are put where they go over the limits least, and settled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from shardrec.planner.solve.dive import dive
from shardrec.planner.solve.encode import Encoded, Floats, Ints
from shardrec.planner.solve.joint import JointProgramme, unbound
from shardrec.planner.solve.packing import Packing, demand, rounded
from shardrec.planner.solve.problem import SolveLimits
from shardrec.planner.solve.relax import Interval, Relaxation
from shardrec.planner.solve.settle import settled

__all__ = ["many_tables", "tight_plans"]

_MANY, _SOME, _MOST = 6, 2, 40
"""Tables, against ranks, from which on this is tried, in any case and where memory binds; and up to which the programme
is: with more of them on a rank, nearly any choice can be packed, so those of the rows are."""
_GROUPS = 50
"""Most kinds of tables: the programme has a row for each kind of piece."""
_RANKS = 32
"""Least number of them, where memory does not bind: on fewer, :mod:`patterns` does as well."""
_BINDING = 0.9
"""Part of the memory of all ranks that the tables take at least, from which on it binds."""
_BOUND = 0.25
"""Most of the load that options whose parts are bound to sets of ranks may have: they are rounded with little care."""
_TRIES = ((1.004, 0.65), (1.008, 0.65), (1.002, 0.4), (1.006, 0.4), (1.012, 0.8), (1.006, 0.2))
"""Rooms, against the one that decides; and parts of the spare memory that are kept from the programme."""
_EFFORT_PER_TRY, _AIM = 10, 0.85
"""The latter of the gap that is good enough: the cost that pieces are moved and swapped for."""
_SHARES, _LEFT_OUT = (1.0, 0.4, 0.15, 0.0), 1e-3
"""Parts of the reserve, the next where with one there is no choice of options, or so many tables have no place."""
_MOST_KEPT = 0.02
"""Of the capacity."""
_PLACING = ((1.0, 0.9), (0.0, 0.9), (1.0, 0.0))
_MOVES = 2000


def _spare(encoded: Encoded) -> Floats:
    """(M,) part of the memory of all ranks that is left if each table takes the least it can."""
    starts = np.array([span.start for span in encoded.group_options], dtype=np.int64)
    least = np.minimum.reduceat(encoded.total_memory, starts, axis=0).T @ encoded.sizes.astype(np.float64)
    spare: Floats = 1 - least / np.maximum(encoded.ranks * encoded.capacity, 1.0)
    return spare


def many_tables(encoded: Encoded) -> bool:
    """Whether there are many tables for the ranks, but not too many, or some and hardly any memory to spare."""
    tables, binds = int(encoded.sizes.sum()), bool((_spare(encoded) < 1 - _BINDING).any())
    if len(encoded.groups) > _GROUPS or (encoded.capacity <= 0).any() or (not binds and encoded.ranks < _RANKS):
        return False
    return (_SOME * encoded.ranks <= tables) if binds else _MANY * encoded.ranks <= tables <= _MOST * encoded.ranks


def tight_plans(
    encoded: Encoded, relaxation: Relaxation, first: Interval, limits: SolveLimits, stop: Callable[[], bool]
) -> Iterator[Packing]:
    """Packings that fit memory, one for each try that comes to one.

    Args:
        encoded: the problem.
        relaxation: its rows.
        first: the interval that decides.
        limits: what gap is good enough, and how many tries are made.
        stop: asked between steps.
    """
    room, aim = first.high, first.bound * (1 + _AIM * limits.gap)
    spare = np.clip(_spare(encoded), 0.0, 1.0)
    if not np.isfinite(room):
        return
    for factor, kept in _TRIES[: max(1, limits.effort // _EFFORT_PER_TRY)]:
        if stop():
            return
        for share in _SHARES:
            reserve = share * np.minimum(kept * spare, _MOST_KEPT)
            found = relaxation.least_base(room * factor, memory_share=1 - float(reserve.min(initial=_MOST_KEPT)))
            if found is not None and found.values is not None:
                break
        else:
            continue
        reserve = reserve * np.where(np.isfinite(encoded.capacity), encoded.capacity, 0.0)
        if encoded.sizes.sum() > _MOST * encoded.ranks:
            packing = _packed(encoded, found.values, room * factor, aim)
        else:
            packing = _planned(encoded, room * factor, found.values @ encoded.base_memory, reserve, aim, stop)
        if packing is not None:
            yield packing


def _packed(encoded: Encoded, chosen: Floats, room: float, aim: float) -> Packing | None:
    """A packing of options as they were chosen, but for the rounding; None if none was found that fits memory."""
    counts = rounded(encoded, chosen)
    packing = Packing(encoded, counts)
    return packing if settled(packing, demand(encoded, counts), max(aim, room + packing.base), _MOVES) else None


def _planned(
    encoded: Encoded, room: float, everywhere: Floats, reserve: Floats, aim: float, stop: Callable[[], bool]
) -> Packing | None:
    """A packing for one room; None if none was found that fits memory."""
    kept = Packing(encoded, np.zeros(len(encoded.options), dtype=np.int64))
    free = unbound(encoded)
    if not free.all():
        programme = JointProgramme(encoded, room, everywhere, reserve, kept, np.ones(len(encoded.options), dtype=bool))
        programme.generate(stop)
        loads = programme.chosen() * encoded.total_load
        if loads[~free].sum() > _BOUND * loads.sum():
            return None
        bound_to_places = _placed(encoded, np.where(free, 0, np.rint(programme.chosen())).astype(np.int64), everywhere)
        if bound_to_places is None or stop():
            return None
        kept = bound_to_places
    for share in _SHARES:
        programme = JointProgramme(encoded, room, everywhere, share * reserve, kept, free)
        programme.generate(stop)
        if programme.left_out() < _LEFT_OUT or stop():
            break
    packing, rest = dive(programme, stop)
    if not settled(packing, rest, max(aim, room + packing.base), _MOVES):
        return None
    return packing


def _placed(encoded: Encoded, counts: Ints, everywhere: Floats) -> Packing | None:
    """The parts of some options, placed so that memory is full evenly, where all the tables take so much everywhere."""
    for memory_weight, memory_order in _PLACING:
        packing = Packing(encoded, counts)
        others = np.maximum(everywhere - counts.astype(np.float64) @ encoded.base_memory, 0.0)
        packing.memory += others
        if packing.fits() and packing.fill(demand(encoded, counts).items(), memory_weight, memory_order):
            packing.memory -= others
            return packing
    return None

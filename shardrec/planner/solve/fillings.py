"""The ways to fill a rank: multisets of pieces that have no room for more and are worth nearly as much as the room."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np

from shardrec.planner.native import address, library
from shardrec.planner.solve.encode import Floats

__all__ = ["Kind", "fillings"]

Kind = tuple[int, int]
"""Steps of a piece's load, and of its memory."""

_TRIES_PER_WAY = 30
_NUMBERS = 1 << 14
"""For which there is room at first."""


def fillings(
    kinds: Sequence[Kind], worth: Sequence[float], value: Floats, room: int, memory: int, budget: float, most: int
) -> list[tuple[Kind, ...]] | None:
    """The ways to fill a room that cannot have another or a larger piece, and are worth nearly as much as it.

    Args:
        kinds: of pieces, each once; a piece may take the place of one that is no smaller in load and memory.
        worth: of a piece of each kind.
        value: (G + 1,) the most that pieces within each load are worth, if memory is as large as the rank's.
        room: of the rank, at most G.
        memory: of the rank.
        budget: what a way may be worth less than the room.
        most: ways to list.

    Returns:
        Kinds of each way, descending; None if there are more.
    """
    order = sorted(range(len(kinds)), key=lambda number: kinds[number], reverse=True)
    falling, each = [kinds[number] for number in order], [float(worth[number]) for number in order]
    compiled = library()
    if compiled is None:
        return _in_python(falling, each, value, room, memory, budget, most)
    sizes, heavy = (np.array([kind[which] for kind in falling], dtype=np.int64) for which in range(2))
    worths, values = np.array(each), np.ascontiguousarray(value, dtype=np.float64)
    call, count = compiled.shardrec_solve_fillings, _NUMBERS
    call.restype = ctypes.c_int64
    while True:
        found = np.empty(count, dtype=np.int64)
        count = call(
            address(sizes),
            address(heavy),
            address(worths),
            ctypes.c_int64(len(falling)),
            address(values),
            ctypes.c_int64(room),
            ctypes.c_int64(memory),
            ctypes.c_double(budget),
            ctypes.c_int64(most),
            ctypes.c_int64(_TRIES_PER_WAY * most),
            address(found),
            ctypes.c_int64(len(found)),
        )
        if count <= len(found):
            break
    return None if count < 0 else _ways(found[:count].tolist(), falling)


def _ways(numbers: Sequence[int], kinds: Sequence[Kind]) -> list[tuple[Kind, ...]]:
    """From how many pieces each way has, and their kinds after it."""
    found, at = [], 0
    while at < len(numbers):
        end = at + 1 + numbers[at]
        found.append(tuple(kinds[number] for number in numbers[at + 1 : end]))
        at = end
    return found


def _in_python(
    kinds: Sequence[Kind],
    worth: Sequence[float],
    value: Floats,
    room: int,
    memory: int,
    budget: float,
    most: int,
) -> list[tuple[Kind, ...]] | None:
    values = value.tolist()
    found: list[tuple[Kind, ...]] = []
    tries = 0

    def extend(at: int, left: int, bytes_: int, spent: float, way: tuple[Kind, ...]) -> None:
        nonlocal tries
        tries += 1
        if values[room] - spent - values[left] > budget or tries > _TRIES_PER_WAY * most:
            return
        last = True
        for number in range(at, len(kinds)):
            size, heavy = kinds[number]
            if size <= left and heavy <= bytes_:
                last = False
                extend(number, left - size, bytes_ - heavy, spent + worth[number], (*way, kinds[number]))
        # What is left may have been too little memory for what its load is worth.
        if last and values[room] - spent <= budget and not _has_room(kinds, way, left, bytes_):
            found.append(way)

    extend(0, room, memory, 0.0, ())
    return None if tries > _TRIES_PER_WAY * most or len(found) > most else found


def _has_room(kinds: Sequence[Kind], way: tuple[Kind, ...], left: int, bytes_: int) -> bool:
    """Whether it could have another piece, or a larger one in the place of some."""
    return any(
        (size, heavy) != piece and piece[0] <= size <= left + piece[0] and piece[1] <= heavy <= bytes_ + piece[1]
        for piece in {(0, 0), *way}
        for size, heavy in kinds
    )

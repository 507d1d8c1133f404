"""The ways to fill a rank: multisets of pieces that have no room for more and are worth nearly as much as the room."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np

from shardrec.planner.native import address, library
from shardrec.planner.solve.encode import Floats

__all__ = ["Kind", "fillings"]

Kind = tuple[int, int, int]
"""Steps of a piece's load, and of its memory, and the table of which a rank has no more than one piece; -1: none."""

_TRIES_PER_WAY = 100
_COLUMNS = 20
"""Large steps of memory, of which there is to be enough for a way to be gone on with."""
_NUMBERS = 1 << 14
"""For which there is room at first."""


def fillings(
    kinds: Sequence[Kind], worth: Sequence[float], price: float, room: int, memory: int, budget: float, most: int
) -> list[tuple[Kind, ...]] | None:
    """The ways to fill a room that cannot have another or a larger piece, and are worth nearly as much as it.

    Args:
        kinds: of pieces, each once; a piece may take the place of one that is no smaller in load and memory, and is of
            the same table or takes the place of any.
        worth: of a piece of each kind.
        price: of the room.
        room: of the rank.
        memory: of the rank.
        budget: what a way may be worth less than the room.
        most: ways to list.

    Returns:
        Kinds of each way, descending; None if there are more.
    """
    order = sorted(range(len(kinds)), key=lambda number: kinds[number], reverse=True)
    falling, each = [kinds[number] for number in order], [float(worth[number]) for number in order]
    coarse = max(1, memory // _COLUMNS) if any(heavy for _, heavy, _ in kinds) else memory + 1
    compiled = library()
    if compiled is None:
        return _in_python(falling, each, price - budget, coarse, room, memory, most)
    sizes, heavy, table = (np.array([kind[which] for kind in falling], dtype=np.int64) for which in range(3))
    worths = np.array(each)
    call, count = compiled.shardrec_solve_fillings, _NUMBERS
    call.restype = ctypes.c_int64
    while True:
        found = np.empty(count, dtype=np.int64)
        count = call(
            address(sizes),
            address(heavy),
            address(table),
            address(worths),
            ctypes.c_int64(len(falling)),
            ctypes.c_double(price - budget),
            ctypes.c_int64(coarse),
            ctypes.c_int64(room),
            ctypes.c_int64(memory),
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
    least: float,
    coarse: int,
    room: int,
    memory: int,
    most: int,
) -> list[tuple[Kind, ...]] | None:
    rest = _rest(kinds, worth, room, memory, coarse)
    smallest = kinds[-1][0] if kinds else 0
    found: list[tuple[Kind, ...]] = []
    tries = 0

    def extend(at: int, left: int, bytes_: int, spent: float, way: tuple[Kind, ...]) -> None:
        nonlocal tries
        tries += 1
        if spent + rest[at][left, bytes_ // coarse] < least or tries > _TRIES_PER_WAY * most:
            return
        last, heaviest = True, -1
        for number, (size, heavy, table) in enumerate(kinds):
            if size <= left and heavy <= bytes_ and not _barred(kinds[number], way):
                last = False
                # Where nothing fits beside it, one that fits and is no smaller would do instead.
                if left - size >= smallest or table >= 0 or heavy > heaviest:
                    heaviest = max(heaviest, heavy)
                    if number >= at:
                        extend(number, left - size, bytes_ - heavy, spent + worth[number], (*way, kinds[number]))
        if last and spent >= least and not _has_larger(kinds, way, left, bytes_):
            found.append(way)

    extend(0, room, memory, 0.0, ())
    return None if tries > _TRIES_PER_WAY * most or len(found) > most else found


def _rest(kinds: Sequence[Kind], worth: Sequence[float], room: int, memory: int, coarse: int) -> list[Floats]:
    """Per kind, the most that it and smaller ones are worth within a load and so many large steps of memory."""
    found = [np.zeros((room + 1, memory // coarse + 1))]
    for (size, heavy, _), value in zip(reversed(kinds), reversed(worth), strict=True):
        here, up = found[-1].copy(), heavy // coarse
        for load in range(size, room + 1):
            some = here[load, up:]
            np.maximum(some, here[load - size, : len(some)] + value, out=some)
        found.append(here)
    return found[::-1]


def _has_larger(kinds: Sequence[Kind], way: tuple[Kind, ...], left: int, bytes_: int) -> bool:
    """Whether it could have a larger piece in the place of some."""
    return any(
        kind != piece
        and piece[0] <= kind[0] <= left + piece[0]
        and piece[1] <= kind[1] <= bytes_ + piece[1]
        and (kind[2] == piece[2] or (piece[2] < 0 and not _barred(kind, way)))
        for piece in set(way)
        for kind in kinds
    )


def _barred(kind: Kind, way: tuple[Kind, ...]) -> bool:
    """Whether a way has a piece already with which one of a kind is on no rank."""
    return kind[2] >= 0 and any(piece[2] == kind[2] for piece in way)

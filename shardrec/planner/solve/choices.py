"""The options of equal tables as matrices, so that all of them can be compared at once.

Shapes: R ranks, M memory tiers, O options of a group, N most free pieces of one of them, P places of a kind of part, L
pieces of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shardrec.planner.solve.encode import Encoded, Floats, Ints

__all__ = ["Bound", "Choices", "choices_of"]

_WASTE = 0.02
"""What an option may do more in all than the best, per rank and against the cost, to be looked at."""


@dataclass(frozen=True, eq=False)
class Choices:
    """The options of a group, for comparison.

    Args:
        numbers: (O,) of the options.
        base: (O,) load on every rank.
        base_memory: (O, M).
        loads: (O, N) of free pieces, the largest first, then zeros.
        memory: (M, O, N).
        sizes: (K,) the different loads of free pieces, and 0.
        which: (O, N) number of each free piece's load among them.
        turn: (O, N) how many pieces of that load are before it.
        bound: the parts that are bound to some places, by their set of places.
    """

    numbers: tuple[int, ...]
    base: Floats
    base_memory: Floats
    loads: Floats
    memory: Floats
    sizes: Floats
    which: Ints
    turn: Ints
    bound: tuple[Bound, ...]


@dataclass(frozen=True, eq=False)
class Bound:
    """Parts of C options that have their places in common.

    Args:
        places: (P, L) ranks.
        options: (C,) numbers within the group.
        loads: (L, C) of the pieces of a part.
        memory: (M, L, C).
        counts: (C,) parts, at most P, and as many rounds of all the places as that leaves.
        rounds: (C,).
    """

    places: Ints
    options: Ints
    loads: Floats
    memory: Floats
    counts: Ints
    rounds: Ints


def choices_of(encoded: Encoded, group: range, cost: float) -> Choices:
    """The options of a group that do not do much more work in all than the one that does least.

    Args:
        encoded: the problem.
        group: the range of its options.
        cost: of a plan.
    """
    work = encoded.total_load[group.start : group.stop] / encoded.ranks
    span = [option for option in group if work[option - group.start] <= work.min() + _WASTE * cost]
    options = len(span)
    tiers, everywhere = len(encoded.capacity), np.arange(encoded.ranks)
    free: list[list[tuple[float, tuple[float, ...]]]] = [[] for _ in span]
    bound: dict[int, list[tuple[int, int, int]]] = {}
    for number, option in enumerate(span):
        for block, count in encoded.option_blocks[option]:
            kind = encoded.blocks[block]
            if kind.single and np.array_equal(kind.places[:, 0], everywhere):
                free[number] += [(float(kind.loads[0]), tuple(kind.memory[0].tolist()))] * count
            else:
                bound.setdefault(id(kind.names), []).append((number, block, count))
    most = max((len(pieces) for pieces in free), default=0)
    loads, memory = np.zeros((options, most)), np.zeros((tiers, options, most))
    for number, pieces in enumerate(free):
        pieces.sort(reverse=True)
        for index, (load, sizes) in enumerate(pieces):
            loads[number, index] = load
            memory[:, number, index] = sizes
    levels: Floats = np.append(np.unique(loads[loads > 0]), 0.0)
    which = np.where(loads > 0, np.searchsorted(levels[:-1], loads), len(levels) - 1)
    turn = np.array([[row[:index].count(kind) for index, kind in enumerate(row)] for row in which.tolist()])
    return Choices(
        numbers=tuple(span),
        base=encoded.base_load[span],
        base_memory=encoded.base_memory[span],
        loads=loads[:, : encoded.ranks],
        memory=memory[:, :, : encoded.ranks],
        sizes=levels,
        which=which[:, : encoded.ranks],
        turn=turn.reshape(options, most).astype(np.int64)[:, : encoded.ranks],
        bound=tuple(_bound_to(encoded, parts) for parts in bound.values()),
    )


def _bound_to(encoded: Encoded, parts: Sequence[tuple[int, int, int]]) -> Bound:
    """(option, block, count) of parts with the same places."""
    kinds = [encoded.blocks[block] for _, block, _ in parts]
    counts, places = np.array([count for _, _, count in parts]), kinds[0].places
    rounds = (counts - 1) // len(places)
    return Bound(
        places=places,
        options=np.array([number for number, _, _ in parts]),
        loads=np.stack([kind.loads for kind in kinds], axis=1),
        memory=np.stack([kind.memory for kind in kinds], axis=2).transpose(1, 0, 2),
        counts=counts - rounds * len(places),
        rounds=rounds,
    )

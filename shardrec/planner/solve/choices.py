"""A problem in flat arrays, for the local search: what lies where does not depend on which language reads it.

Shapes: R ranks, D dimensions of a size (load, then bytes of each memory tier), N tables, S sets of places, K kinds of
parts, J pieces of all kinds, O options, G groups, C options of a group that are looked at, L different loads of their
pieces, P places of a set, W ranks of a place, B sets of places that parts of a group are bound to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardrec.planner.solve.encode import Encoded, Floats, Ints

__all__ = ["Choices", "choices_of"]

_WASTE = 0.02
"""What an option may do more in all than the best, per rank and against the cost, to be looked at."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Choices:
    """The arrays; those named ``first`` say where a row of a flat one begins, and the last of them where it ends.

    Args:
        limit: (D,) of a rank; infinite for loads.
        table_group: (N,).
        set_first: (S + 1,) of ``set_ranks``; likewise ``set_width``, W of each.
        set_ranks: (P, W) of each set.
        kind_set: (K,) the places of each kind of part.
        kind_first: (K + 1,) of ``size``.
        size: (J, D) of the pieces.
        option_first: (O + 1,) of the parts.
        part_kind: of an option's parts, those of the largest load first; likewise ``part_count``.
        base: (O, D) of the options, on every rank.
        work: (O,) load on all ranks together.
        choice_first: (G + 1,) of ``choice``.
        choice: (C,) of each group, the options that are looked at: if not said otherwise, those that do not do much
            more work than the one that does least.
        level_first: (G + 1,) of ``level``.
        level: (L,) of each group, the different loads of its pieces.
        turns: (L,) most free pieces of that load in one option.
        free_first: (G + 1,) of the next two.
        free_level: (n, C) of each group, the level of each option's free pieces, the largest first; then -1.
        free_turn: (n, C) how many pieces of that level are before it.
        bound_first: (G + 1,) of ``bound_set``.
        bound_set: (B,) of each group, the sets of places that parts are bound to.
        column_first: (all B + 1,) of the next two.
        column_choice: of each set, the options (numbers within ``choice``) with parts there.
        column_count: how many parts; 0 if there are more than places.
        cell_first: (all B + 1,) of ``column_level``.
        column_level: (W, columns) of each set, the levels of the part's pieces.
        slots: most parts of an option.
    """

    limit: Floats
    table_group: Ints
    set_first: Ints
    set_width: Ints
    set_ranks: Ints
    kind_set: Ints
    kind_first: Ints
    size: Floats
    option_first: Ints
    part_kind: Ints
    part_count: Ints
    base: Floats
    work: Floats
    choice_first: Ints
    choice: Ints
    level_first: Ints
    level: Floats
    turns: Ints
    free_first: Ints
    free_level: Ints
    free_turn: Ints
    bound_first: Ints
    bound_set: Ints
    column_first: Ints
    column_choice: Ints
    column_count: Ints
    cell_first: Ints
    column_level: Ints
    ranks: int
    slots: int


def choices_of(encoded: Encoded, cost: float, only: NDArray[np.bool_] | None = None) -> Choices:
    """The arrays of a problem.

    Args:
        encoded: the problem.
        cost: of a plan, against which work is compared.
        only: (O,) the options that are looked at instead, some of each group.
    """
    if only is None:
        work = encoded.total_load / encoded.ranks
        least = np.minimum.reduceat(work, [span.start for span in encoded.group_options])
        only = work <= least[encoded.option_group] + _WASTE * cost
    number: dict[int, int] = {}
    sets: list[Ints] = []
    kind_set: list[int] = []
    for kind in encoded.blocks:
        kind_set.append(number.setdefault(id(kind.names), len(sets)))
        if kind_set[-1] == len(sets):
            sets.append(kind.places)
    parts = [
        sorted(blocks, key=lambda item: -float(encoded.blocks[item[0]].loads.max())) for blocks in encoded.option_blocks
    ]
    groups = [_Group(encoded, span, parts, sets, kind_set, only) for span in encoded.group_options]
    columns = [each for group in groups for each in group.columns]
    return Choices(
        ranks=encoded.ranks,
        slots=max(1, max((sum(count for _, count in each) for each in parts), default=1)),
        limit=np.append(np.inf, encoded.capacity * (1 + 1e-12)),
        table_group=np.repeat(np.arange(len(groups)), encoded.sizes),
        set_first=_firsts([places.size for places in sets]),
        set_width=np.array([places.shape[1] for places in sets], dtype=np.int64),
        set_ranks=_joined(sets),
        kind_set=np.array(kind_set, dtype=np.int64),
        kind_first=_firsts([len(kind.loads) for kind in encoded.blocks]),
        size=np.concatenate(
            [np.zeros((0, 1 + len(encoded.capacity)))]
            + [np.column_stack([kind.loads, kind.memory]) for kind in encoded.blocks]
        ),
        option_first=_firsts([len(each) for each in parts]),
        part_kind=np.array([block for each in parts for block, _ in each], dtype=np.int64),
        part_count=np.array([count for each in parts for _, count in each], dtype=np.int64),
        base=np.column_stack([encoded.base_load, encoded.base_memory]),
        work=encoded.total_load,
        choice_first=_firsts([len(group.choice) for group in groups]),
        choice=_joined([group.choice for group in groups]),
        level_first=_firsts([len(group.level) for group in groups]),
        level=np.concatenate([group.level for group in groups]),
        turns=_joined([group.turns for group in groups]),
        free_first=_firsts([group.free_level.size for group in groups]),
        free_level=_joined([group.free_level for group in groups]),
        free_turn=_joined([group.free_turn for group in groups]),
        bound_first=_firsts([len(group.columns) for group in groups]),
        bound_set=np.array([each[0] for each in columns], dtype=np.int64),
        column_first=_firsts([len(each[1]) for each in columns]),
        column_choice=_joined([each[1] for each in columns]),
        column_count=_joined([each[2] for each in columns]),
        cell_first=_firsts([each[3].size for each in columns]),
        column_level=_joined([each[3] for each in columns]),
    )


class _Group:
    """The arrays of equal tables; names as above."""

    def __init__(
        self,
        encoded: Encoded,
        span: range,
        parts: Sequence[Sequence[tuple[int, int]]],
        sets: Sequence[Ints],
        kind_set: Sequence[int],
        only: NDArray[np.bool_],
    ) -> None:
        self.choice = span.start + np.flatnonzero(only[span.start : span.stop])
        everywhere = np.arange(encoded.ranks)
        free: list[list[float]] = [[] for _ in self.choice]
        bound: dict[int, list[tuple[int, int, int]]] = {}
        for number, option in enumerate(self.choice.tolist()):
            for block, count in parts[option]:
                kind = encoded.blocks[block]
                if kind.single and np.array_equal(kind.places[:, 0], everywhere):
                    free[number] += [float(kind.loads[0])] * count
                else:
                    bound.setdefault(kind_set[block], []).append((number, block, count))
        # Pieces beyond one for each rank are not seen in the comparison.
        free = [sorted(loads, reverse=True)[: encoded.ranks] for loads in free]
        used = [load for loads in free for load in loads]
        used += [
            float(load) for items in bound.values() for _, block, _ in items for load in encoded.blocks[block].loads
        ]
        self.level: Floats = np.unique(np.array(used, dtype=np.float64))
        most = max(map(len, free))
        self.free_level = np.full((most, len(free)), -1, dtype=np.int64)
        self.free_turn = np.zeros((most, len(free)), dtype=np.int64)
        self.turns = np.zeros(len(self.level), dtype=np.int64)
        for number, loads in enumerate(free):
            levels = np.searchsorted(self.level, np.array(loads, dtype=np.float64)).tolist()
            for index, level in enumerate(levels):
                turn = levels[:index].count(level)
                self.free_level[index, number], self.free_turn[index, number] = level, turn
                self.turns[level] = max(int(self.turns[level]), turn + 1)
        self.columns: list[tuple[int, Ints, Ints, Ints]] = []
        """Set, options, counts and levels of the parts that are bound to it."""
        for which, items in bound.items():
            counts = np.array([count for _, _, count in items], dtype=np.int64)
            levels = np.stack(
                [np.searchsorted(self.level, encoded.blocks[block].loads) for _, block, _ in items], axis=1
            )
            options = np.array([number for number, _, _ in items], dtype=np.int64)
            self.columns.append((which, options, np.where(counts <= len(sets[which]), counts, 0), levels))


def _firsts(counts: Sequence[int]) -> Ints:
    return np.concatenate([[0], np.cumsum(np.array(counts, dtype=np.int64))]).astype(np.int64)


def _joined(arrays: Sequence[Ints]) -> Ints:
    return np.concatenate([np.zeros(0, dtype=np.int64), *(array.ravel() for array in arrays)]).astype(np.int64)

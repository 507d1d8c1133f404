"""A problem as arrays: equal tables grouped, equal pieces counted.

Shapes: G groups, O options of all groups, K distinct pieces of all options, M memory tiers, R ranks.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardrec.planner.solve.problem import Option, Part, Piece, Place, Problem

__all__ = ["Block", "Encoded", "Floats", "encode"]

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Block:
    """A kind of part: parts of equal pieces and places, of whichever table.

    Args:
        loads: (n,) of its pieces.
        memory: (n, M).
        places: (P, n) ranks.
        names: the places as the problem gave them.
    """

    loads: Floats
    memory: Floats
    places: Ints
    names: tuple[Place, ...]

    @property
    def single(self) -> bool:
        """Whether it is one piece."""
        return len(self.loads) == 1

    @property
    def free(self) -> bool:
        """Whether there is a choice of places."""
        return len(self.names) > 1


@dataclass(frozen=True, eq=False)
class Encoded:
    """A problem in arrays.

    Args:
        ranks: R.
        capacity: (M,).
        groups: names of the tables of each group.
        group_options: per group, its column range among the options.
        options: the options of all groups.
        option_group: (O,).
        base_load: (O,) load on every rank.
        base_memory: (O, M).
        total_load: (O,) load on all ranks together.
        total_memory: (O, M).
        piece_option: (K,) which option a piece is of.
        piece_load: (K,).
        piece_memory: (K, M).
        piece_count: (K,).
        piece_reach: (K,) number of the set of ranks that the piece can be on; 0 is all.
        reaches: the sets of ranks.
        blocks: kinds of parts.
        option_blocks: per option, (block, count) pairs in the order of its parts.
    """

    ranks: int
    capacity: Floats
    groups: tuple[tuple[str, ...], ...]
    group_options: tuple[range, ...]
    options: tuple[Option, ...]
    option_group: Ints
    base_load: Floats
    base_memory: Floats
    total_load: Floats
    total_memory: Floats
    piece_option: Ints
    piece_load: Floats
    piece_memory: Floats
    piece_count: Floats
    piece_reach: Ints
    reaches: tuple[frozenset[int], ...]
    blocks: tuple[Block, ...]
    option_blocks: tuple[tuple[tuple[int, int], ...], ...]

    @property
    def sizes(self) -> Ints:
        """(G,) number of tables of each group."""
        return np.array([len(names) for names in self.groups], dtype=np.int64)


class _Encoder:
    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.tiers = len(problem.capacity)
        self.block_number: dict[Hashable, int] = {}
        self.blocks: list[Block] = []
        self.reach_number: dict[frozenset[int], int] = {frozenset(range(problem.ranks)): 0}
        self.reach_of: dict[int, int] = {}
        self.pieces: list[tuple[int, float, tuple[float, ...], int, int]] = []

    def block(self, part: Part) -> int:
        key = (tuple((piece.load, piece.memory) for piece in part.pieces), id(part.places))
        number = self.block_number.get(key)
        if number is None:
            number = self.block_number[key] = len(self.blocks)
            self.blocks.append(
                Block(
                    loads=np.array([piece.load for piece in part.pieces]),
                    memory=np.array([piece.memory for piece in part.pieces]).reshape(-1, self.tiers),
                    places=np.array(part.places, dtype=np.int64),
                    names=part.places,
                )
            )
        return number

    def reach(self, part: Part) -> int:
        """Pieces that are placed together reach as far as all of them: one set of ranks for them, not one for each."""
        key = id(part.places)
        if key not in self.reach_of:
            ranks = frozenset(rank for place in part.places for rank in place)
            self.reach_of[key] = self.reach_number.setdefault(ranks, len(self.reach_number))
        return self.reach_of[key]

    def add_pieces(self, number: int, option: Option) -> None:
        counts: dict[tuple[float, tuple[float, ...], int], int] = {}
        for part in option.parts:
            reach = self.reach(part)
            for piece in part.pieces:
                if piece.load or any(piece.memory):
                    key = (piece.load, piece.memory, reach)
                    counts[key] = counts.get(key, 0) + part.count
        self.pieces += [(number, load, memory, count, reach) for (load, memory, reach), count in counts.items()]


def encode(problem: Problem) -> Encoded:
    """The arrays of a problem; groups are in the order of their first tables."""
    coder, tiers = _Encoder(problem), len(problem.capacity)
    grouped: dict[Hashable, list[str]] = {}
    first: dict[Hashable, tuple[Option, ...]] = {}
    keys: dict[int, Hashable] = {}
    for name, options in problem.tables.items():
        key = keys.setdefault(id(options), tuple(map(_key, options)))
        grouped.setdefault(key, []).append(name)
        first.setdefault(key, options)
    options_all: list[Option] = []
    ranges: list[range] = []
    option_group: list[int] = []
    for group, key in enumerate(grouped):
        ranges.append(range(len(options_all), len(options_all) + len(first[key])))
        for option in map(partial(_lifted, problem.ranks), first[key]):
            coder.add_pieces(len(options_all), option)
            options_all.append(option)
            option_group.append(group)
    option_blocks = tuple(tuple((coder.block(part), part.count) for part in option.parts) for option in options_all)
    piece_option = np.array([piece[0] for piece in coder.pieces], dtype=np.int64)
    piece_load = np.array([piece[1] for piece in coder.pieces], dtype=np.float64)
    piece_memory = np.array([piece[2] for piece in coder.pieces], dtype=np.float64).reshape(-1, tiers)
    piece_count = np.array([piece[3] for piece in coder.pieces], dtype=np.float64)
    count = len(options_all)
    base_load = np.array([option.everywhere.load for option in options_all])
    base_memory = np.array([option.everywhere.memory for option in options_all]).reshape(-1, tiers)
    total_load = base_load * problem.ranks
    total_load += np.bincount(piece_option, piece_load * piece_count, count)
    total_memory = base_memory * problem.ranks
    for tier in range(tiers):
        total_memory[:, tier] += np.bincount(piece_option, piece_memory[:, tier] * piece_count, count)
    return Encoded(
        ranks=problem.ranks,
        capacity=np.array(problem.capacity, dtype=np.float64),
        groups=tuple(map(tuple, grouped.values())),
        group_options=tuple(ranges),
        options=tuple(options_all),
        option_group=np.array(option_group, dtype=np.int64),
        base_load=base_load,
        base_memory=base_memory,
        total_load=total_load,
        total_memory=total_memory,
        piece_option=piece_option,
        piece_load=piece_load,
        piece_memory=piece_memory,
        piece_count=piece_count,
        piece_reach=np.array([piece[4] for piece in coder.pieces], dtype=np.int64),
        reaches=tuple(coder.reach_number),
        blocks=tuple(coder.blocks),
        option_blocks=option_blocks,
    )


def _lifted(ranks: int, option: Option) -> Option:
    """The same option, where what a part puts on every rank, wherever it goes, is no piece.

    A bound that knows pieces only by their ranks would put two of them on one.
    """
    everywhere, parts = option.everywhere, []
    for part in option.parts:
        if all(sorted(place) == list(range(ranks)) for place in part.places):
            load = min(piece.load for piece in part.pieces)
            memory = tuple(map(min, zip(*(piece.memory for piece in part.pieces), strict=True)))
            everywhere = _plus(everywhere, load, memory, part.count)
            part = replace(part, pieces=tuple(_plus(piece, load, memory, -1) for piece in part.pieces))
        parts.append(part)
    return replace(option, everywhere=everywhere, parts=tuple(parts))


def _plus(piece: Piece, load: float, memory: tuple[float, ...], times: int) -> Piece:
    held = tuple(mine + times * more for mine, more in zip(piece.memory, memory, strict=True))
    return Piece(load=piece.load + times * load, memory=held)


def _key(option: Option) -> Any:
    parts = tuple(
        (tuple((piece.load, piece.memory) for piece in part.pieces), id(part.places), part.count)
        for part in option.parts
    )
    return option.label, option.everywhere.load, option.everywhere.memory, parts

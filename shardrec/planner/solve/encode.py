"""A problem as arrays: equal tables grouped, equal items counted.

Shapes: G groups, O options of all groups, K distinct items of all options, M memory tiers, R ranks.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from shardrec.planner.solve.problem import Gang, Item, Option, Place, Problem

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class GangKind:
    """A kind of gang: gangs of equal items and places, of whichever table.

    Args:
        loads: (n,) of its items.
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
        """Whether it is one item."""
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
        item_option: (K,) which option a item is of.
        item_load: (K,).
        item_memory: (K, M).
        item_count: (K,).
        item_reach: (K,) number of the set of ranks that the item can be on; 0 is all.
        reaches: the sets of ranks.
        blocks: kinds of gangs.
        option_blocks: per option, (block, count) pairs in the order of its gangs.
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
    item_option: Ints
    item_load: Floats
    item_memory: Floats
    item_count: Floats
    item_reach: Ints
    reaches: tuple[frozenset[int], ...]
    blocks: tuple[GangKind, ...]
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
        self.blocks: list[GangKind] = []
        self.places: dict[int, Ints] = {}
        self.reach_number: dict[frozenset[int], int] = {frozenset(range(problem.ranks)): 0}
        self.reach_of: dict[int, int] = {}
        self.items: list[tuple[int, float, tuple[float, ...], int, int]] = []

    def block(self, gang: Gang) -> int:
        key = (tuple((item.load, item.memory) for item in gang.items), id(gang.places))
        number = self.block_number.get(key)
        if number is None:
            number = self.block_number[key] = len(self.blocks)
            self.blocks.append(
                GangKind(
                    loads=np.array([item.load for item in gang.items]),
                    memory=np.array([item.memory for item in gang.items]).reshape(-1, self.tiers),
                    places=self.places_of(gang),
                    names=gang.places,
                )
            )
        return number

    def places_of(self, gang: Gang) -> Ints:
        key = id(gang.places)
        if key not in self.places:
            self.places[key] = np.array(gang.places, dtype=np.int64)
        return self.places[key]

    def reach(self, gang: Gang) -> int:
        """Items that are placed together reach as far as all of them: one set of ranks for them, not one for each."""
        key = id(gang.places)
        if key not in self.reach_of:
            ranks = frozenset(rank for place in gang.places for rank in place)
            self.reach_of[key] = self.reach_number.setdefault(ranks, len(self.reach_number))
        return self.reach_of[key]

    def add_items(self, number: int, option: Option) -> None:
        counts: dict[tuple[float, tuple[float, ...], int], int] = {}
        for gang in option.gangs:
            reach = self.reach(gang)
            for item in gang.items:
                if item.load or any(item.memory):
                    key = (item.load, item.memory, reach)
                    counts[key] = counts.get(key, 0) + gang.count
        self.items += [(number, load, memory, count, reach) for (load, memory, reach), count in counts.items()]


def encode(problem: Problem) -> Encoded:
    """The arrays of a problem. Groups are in the order of their first tables."""
    coder, tiers = _Encoder(problem), len(problem.capacity)
    grouped: dict[Hashable, list[str]] = {}
    first: dict[Hashable, tuple[Option, ...]] = {}
    keys: dict[int, Hashable] = {}
    for name, options in problem.tables.items():
        if id(options) not in keys:
            keys[id(options)] = tuple(map(_key, options))
        key = keys[id(options)]
        grouped.setdefault(key, []).append(name)
        first.setdefault(key, options)
    options_all: list[Option] = []
    ranges: list[range] = []
    option_group: list[int] = []
    for group, key in enumerate(grouped):
        ranges.append(range(len(options_all), len(options_all) + len(first[key])))
        for option in map(partial(_lifted, problem.ranks), first[key]):
            coder.add_items(len(options_all), option)
            options_all.append(option)
            option_group.append(group)
    option_blocks = tuple(tuple((coder.block(gang), gang.count) for gang in option.gangs) for option in options_all)
    item_option = np.array([item[0] for item in coder.items], dtype=np.int64)
    item_load = np.array([item[1] for item in coder.items], dtype=np.float64)
    item_memory = np.array([item[2] for item in coder.items], dtype=np.float64).reshape(-1, tiers)
    item_count = np.array([item[3] for item in coder.items], dtype=np.float64)
    count = len(options_all)
    base_load = np.array([option.everywhere.load for option in options_all])
    base_memory = np.array([option.everywhere.memory for option in options_all]).reshape(-1, tiers)
    total_load = base_load * problem.ranks
    total_load += np.bincount(item_option, item_load * item_count, count)
    total_memory = base_memory * problem.ranks
    for tier in range(tiers):
        total_memory[:, tier] += np.bincount(item_option, item_memory[:, tier] * item_count, count)
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
        item_option=item_option,
        item_load=item_load,
        item_memory=item_memory,
        item_count=item_count,
        item_reach=np.array([item[4] for item in coder.items], dtype=np.int64),
        reaches=tuple(coder.reach_number),
        blocks=tuple(coder.blocks),
        option_blocks=option_blocks,
    )


def _lifted(ranks: int, option: Option) -> Option:
    """The same option. The load that a gang puts on every rank, wherever it goes, is not an item.

    A bound that knows items only by their ranks would put two of them on one.
    """
    if all(len(gang.items) < ranks for gang in option.gangs):
        return option
    everywhere, gangs = option.everywhere, []
    for gang in option.gangs:
        if all(sorted(place) == list(range(ranks)) for place in gang.places):
            load = min(item.load for item in gang.items)
            memory = tuple(map(min, zip(*(item.memory for item in gang.items), strict=True)))
            everywhere = _plus(everywhere, load, memory, gang.count)
            gang = replace(gang, items=tuple(_plus(item, load, memory, -1) for item in gang.items))
        gangs.append(gang)
    return replace(option, everywhere=everywhere, gangs=tuple(gangs))


def _plus(item: Item, load: float, memory: tuple[float, ...], times: int) -> Item:
    held = tuple(mine + times * more for mine, more in zip(item.memory, memory, strict=True))
    return Item(load=item.load + times * load, memory=held)


def _key(option: Option) -> Hashable:
    gangs = tuple(
        (tuple((item.load, item.memory) for item in gang.items), id(gang.places), gang.count) for gang in option.gangs
    )
    return option.label, option.everywhere.load, option.everywhere.memory, gangs

"""A problem as arrays: equal tables grouped, equal gangs and equal items counted. The bound, the packings and the
searches read one record of it, :class:`Encoded`.

::

    runs           (O, runs)    an option is at most a few runs of equal gangs, the largest first
    kind_family    (K,)         kinds whose places have one width are compared together
    families       places       (sets, P, width) ranks; R where there is none, a rank that is never full

Shapes: G groups, N tables, O options of all groups, K kinds of gangs, J items of all kinds, I distinct items of all
options, M memory tiers, D = 1 + M dimensions of a size (load, then bytes of each tier), R ranks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise

import numpy as np
from numpy.typing import NDArray

from shardrec.planner.solve.problem import Gang, Item, Option, Place, Problem

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

_ABOUT = 0.9
"""Items of so much of the largest of their gang are taken for as large."""


@dataclass(frozen=True, kw_only=True, eq=False)
class GangKind:
    """A kind of gang: gangs of equal items and places, of whichever table.

    Args:
        size: (n, D) of its items.
        places: (P, n) ranks.
        names: the places as the problem gave them.
    """

    size: Floats
    places: Ints
    names: tuple[Place, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class Family:
    """Sets of places of one width.

    Args:
        places: (sets, P, width) ranks. R where a set has fewer places or a place fewer ranks.
        missing: (sets, P) whether a set lacks a place. None if no set lacks one.
        anywhere: whether a place is a rank and each rank a place, in their order.
        clusters: (sets, H, Q) numbers of the places that share ranks, directly or by others, P where there are fewer.
            None if none do.
    """

    places: Ints
    missing: Bools | None
    anywhere: bool
    clusters: Ints | None


@dataclass(frozen=True, kw_only=True, eq=False)
class Encoded:
    """A problem in arrays.

    Args:
        ranks: R.
        capacity: (M,).
        groups: names of the tables of each group.
        group_options: per group, its column range among the options.
        option_group: (O,).
        base: (O, D) what an option puts on every rank.
        total: (O, D) what it puts on all ranks together.
        option_gangs: per option, (kind, count) pairs in the order of its gangs.
        kinds: of gangs.
        kind_family: (K,).
        kind_set: (K,) the set of places, in its family.
        families: by number.
        item_option: (I,) which option an item is of, ascending.
        item_size: (I, D).
        item_count: (I,).
        item_reach: (I,) number of the set of ranks that the item can be on; 0 is all.
        reaches: the sets of ranks.
    """

    ranks: int
    capacity: Floats
    groups: tuple[tuple[str, ...], ...]
    group_options: tuple[range, ...]
    option_group: Ints
    base: Floats
    total: Floats
    option_gangs: tuple[tuple[tuple[int, int], ...], ...]
    kinds: tuple[GangKind, ...]
    kind_family: Ints
    kind_set: Ints
    families: tuple[Family, ...]
    item_option: Ints
    item_size: Floats
    item_count: Floats
    item_reach: Ints
    reaches: tuple[frozenset[int], ...]

    @cached_property
    def limit(self) -> Floats:
        """(M,) bytes that a rank may hold: the capacity, and what rounding adds."""
        return self.capacity * (1 + 1e-12)

    @cached_property
    def sizes(self) -> Ints:
        """(G,) number of tables of each group."""
        return np.array([len(names) for names in self.groups], dtype=np.int64)

    @cached_property
    def starts(self) -> Ints:
        """(G,) the first option of each group."""
        return np.array([span.start for span in self.group_options], dtype=np.int64)

    @cached_property
    def group(self) -> Ints:
        """(N,) per table, group by group."""
        return np.repeat(np.arange(len(self.groups)), self.sizes)

    @cached_property
    def size(self) -> Floats:
        """(J + 1, D) of the items of all kinds. The last is nothing."""
        return np.concatenate([*(kind.size for kind in self.kinds), np.zeros((1, self.base.shape[1]))])

    @cached_property
    def kind_first(self) -> Ints:
        """(K + 1,) where a kind's items begin."""
        return np.cumsum([0, *(len(kind.size) for kind in self.kinds)])

    @cached_property
    def kind_top(self) -> Floats:
        """(K, D) the largest of a kind's items."""
        top: Floats = np.maximum.reduceat(self.size, self.kind_first[:-1], axis=0)
        return top

    @cached_property
    def kind_heavy(self) -> Ints:
        """(K,) how many of a kind's items have about the largest load and as many bytes, at least 1."""
        about = self.size[:-1] >= _ABOUT * self.kind_top.repeat(np.diff(self.kind_first), axis=0)
        heavy: Ints = np.add.reduceat(about.all(axis=1), self.kind_first[:-1], dtype=np.int64).clip(min=1)
        return heavy

    @cached_property
    def runs(self) -> tuple[Ints, Ints]:
        """(O, runs) the kinds of an option's runs, -1 for none, and (O, runs) how many gangs each has."""
        largest = self.kind_top[:, 0].tolist()
        runs = [sorted(_merged(gangs), key=lambda run: -largest[run[0]]) for gangs in self.option_gangs]
        kinds, counts = (np.full((len(runs), max(map(len, runs), default=0)), empty) for empty in (-1, 0))
        for option, of_option in enumerate(runs):
            for run, (kind, count) in enumerate(of_option):
                kinds[option, run], counts[option, run] = kind, count
        return kinds, counts

    def items(self, kind: int, place: int) -> tuple[Ints, Ints]:
        """Ranks and items of a gang at a place."""
        first, end = self.kind_first[kind], self.kind_first[kind + 1]
        places = self.families[self.kind_family[kind]].places
        return places[self.kind_set[kind], place, : end - first], np.arange(first, end)


def encode(problem: Problem) -> Encoded:
    """The arrays of a problem. Groups are in the order of their first tables."""
    ranks, width = problem.ranks, 1 + len(problem.capacity)
    groups, options_of = _grouped(problem)
    options = [_lifted(ranks, option) for of_group in options_of for option in of_group]
    kind_of: dict[Hashable, tuple[int, Gang]] = {}
    option_gangs = tuple(
        tuple((kind_of.setdefault(_gang_key(gang), (len(kind_of), gang))[0], gang.count) for gang in option.gangs)
        for option in options
    )
    distinct = [gang for _, gang in kind_of.values()]
    place_sets = {id(gang.places): gang.places for gang in distinct}
    ranks_at = {key: np.array(places, dtype=np.int64) for key, places in place_sets.items()}
    families: dict[tuple[bool, int], dict[int, Ints]] = {}
    for key, places in ranks_at.items():
        families.setdefault(_family_key(places, ranks), {})[key] = places
    set_of = {key: (family, number) for family, sets in enumerate(families.values()) for number, key in enumerate(sets)}
    # Items that are placed together reach as far as all of them: one set of ranks for them, not one for each.
    reaches = {frozenset(range(ranks)): 0}
    reach_of = {
        key: reaches.setdefault(frozenset(rank for place in places for rank in place), len(reaches))
        for key, places in place_sets.items()
    }
    items: list[tuple[int, float, tuple[float, ...], int, int]] = []
    for number, option in enumerate(options):
        counts: defaultdict[tuple[float, tuple[float, ...], int], int] = defaultdict(int)
        for gang in option.gangs:
            reach = reach_of[id(gang.places)]
            for item in gang.items:
                if item.load or any(item.memory):
                    counts[item.load, item.memory, reach] += gang.count
        items += [(number, load, memory, reach, count) for (load, memory, reach), count in counts.items()]
    item_option = np.array([option for option, *_ in items], dtype=np.int64)
    item_size = np.array([(load, *memory) for _, load, memory, _, _ in items], dtype=np.float64).reshape(-1, width)
    item_count = np.array([count for *_, count in items], dtype=np.float64)
    sizes = _sizes([item for gang in distinct for item in gang.items], width)
    ends = accumulate((len(gang.items) for gang in distinct), initial=0)
    base = _sizes([option.everywhere for option in options], width)
    total = base * ranks
    for dim in range(width):
        total[:, dim] += np.bincount(item_option, item_size[:, dim] * item_count, len(options))
    return Encoded(
        ranks=ranks,
        capacity=np.array(problem.capacity, dtype=np.float64),
        groups=groups,
        group_options=tuple(range(*span) for span in pairwise(accumulate(map(len, options_of), initial=0))),
        option_group=np.repeat(np.arange(len(groups)), list(map(len, options_of))),
        base=base,
        total=total,
        option_gangs=option_gangs,
        kinds=tuple(
            GangKind(size=sizes[first:end], places=ranks_at[id(gang.places)], names=gang.places)
            for gang, (first, end) in zip(distinct, pairwise(ends), strict=True)
        ),
        kind_family=np.array([set_of[id(gang.places)][0] for gang in distinct], dtype=np.int64),
        kind_set=np.array([set_of[id(gang.places)][1] for gang in distinct], dtype=np.int64),
        families=tuple(_family([*sets.values()], ranks, anywhere=anywhere) for (anywhere, _), sets in families.items()),
        item_option=item_option,
        item_size=item_size,
        item_count=item_count,
        item_reach=np.array([reach for *_, reach, _ in items], dtype=np.int64),
        reaches=tuple(reaches),
    )


def _grouped(problem: Problem) -> tuple[tuple[tuple[str, ...], ...], list[tuple[Option, ...]]]:
    """The names of the tables with equal options, and these options."""
    groups: dict[Hashable, list[str]] = {}
    options_of: dict[Hashable, tuple[Option, ...]] = {}
    keys: dict[int, Hashable] = {}
    for name, options in problem.tables.items():
        if id(options) not in keys:
            keys[id(options)] = tuple(
                (
                    option.label,
                    option.everywhere.load,
                    option.everywhere.memory,
                    tuple((_gang_key(gang), gang.count) for gang in option.gangs),
                )
                for option in options
            )
        key = keys[id(options)]
        groups.setdefault(key, []).append(name)
        options_of.setdefault(key, options)
    return tuple(map(tuple, groups.values())), [*options_of.values()]


def _gang_key(gang: Gang) -> Hashable:
    return tuple((item.load, item.memory) for item in gang.items), id(gang.places)


def _sizes(items: Sequence[Item], width: int) -> Floats:
    """(n, D) of items."""
    return np.array([(item.load, *item.memory) for item in items], dtype=np.float64).reshape(-1, width)


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
    sums = tuple(mine + times * more for mine, more in zip(item.memory, memory, strict=True))
    return Item(load=item.load + times * load, memory=sums)


def _merged(gangs: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """The number of gangs per kind."""
    counts: defaultdict[int, int] = defaultdict(int)
    for kind, count in gangs:
        counts[kind] += count
    return [run for run in counts.items() if run[1]]


def _family_key(places: Ints, ranks: int) -> tuple[bool, int]:
    """Whether a place is a rank and each rank a place, and the width of the places, 0 of a single one."""
    count, width = places.shape
    if width == 1 and count == ranks and (places[:, 0] == np.arange(ranks)).all():
        return True, 1
    return False, width if count > 1 else 0


def _family(sets: list[Ints], ranks: int, *, anywhere: bool) -> Family:
    most, width = max(len(places) for places in sets), max(places.shape[1] for places in sets)
    joined = np.full((len(sets), most, width), ranks, dtype=np.int64)
    for number, places in enumerate(sets):
        joined[number, : len(places), : places.shape[1]] = places
    missing = np.arange(most) >= np.array([[len(places)] for places in sets])
    clusters = [[[place] for place in range(ranks)] if anywhere else _clusters(places) for places in sets]
    largest = max(len(cluster) for of_set in clusters for cluster in of_set)
    by_cluster = np.full((len(sets), max(map(len, clusters)), largest), most)
    for number, of_set in enumerate(clusters):
        for index, cluster in enumerate(of_set):
            by_cluster[number, index, : len(cluster)] = cluster
    return Family(
        places=joined,
        missing=missing if missing.any() else None,
        anywhere=anywhere,
        clusters=by_cluster if largest > 1 else None,
    )


def _clusters(places: Ints) -> list[list[int]]:
    """Numbers of the places that share ranks, directly or by others."""
    clusters: list[tuple[set[int], list[int]]] = []
    for number, place in enumerate(places.tolist()):
        ranks, members = set(place), [number]
        for cluster in [each for each in clusters if each[0] & ranks]:
            clusters.remove(cluster)
            ranks, members = ranks | cluster[0], cluster[1] + members
        clusters.append((ranks, members))
    return [members for _, members in clusters]

"""What fits the ranks of one host: kinds of parts, and the sets of them that are worth most.

A part that is bound to a host puts something on each of its ranks, in one of a few ways: more on some neighbouring
ranks that hold its rows, less on the others. A *set* of parts fits a host if for some way of each the loads of no rank
are above its room. With a price for each kind of part and the value V of free pieces by size, a set is worth

    the prices of its parts + the sum over the host's ranks of V(room - load of its parts there)

and the best sets are found part by part: a state is a set together with its loads, and is dropped if not even the
value of the best pieces for what is left of each rank makes it worth enough. Sets are exact here, in whole steps; it
is only in how many hosts have which set that :mod:`hosts` takes fractions.

Shapes: G steps, L ranks of a host, P ways to put a part on them, K kinds of parts, S states.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardrec.planner.solve.encode import Encoded, Floats, Ints
from shardrec.planner.solve.knapsack import knapsacks
from shardrec.planner.solve.sizes import host_blocks

__all__ = ["Found", "Inside", "best_sets"]

_NEAR = 4
"""Steps that parts may differ by, beyond their least piece, and are taken as the same."""
_CELLS = 2_000_000
"""Numbers that are held at a time."""
_STATES = 60_000
"""Most sets that are looked at for one answer, if it is to be exact."""


class Inside:
    """The loads of a problem in whole steps, host by host.

    Args:
        encoded: the problem.
        step: load of a step.
        most: G, steps of the most load.
        small: a part whose largest piece has at most so many steps counts as free pieces, which it is less than.

    Attributes:
        local: L, ranks of a host; 1 if no part is bound to a host.
        hosts: the ranks of each host, in order.
        kinds: per kind of part, (P, L) steps.
        below: per kind, those that are nowhere larger: where it fits, they do.
        replaced: (K, K) the same, but that of two alike only one is below the other.
        largest: (K,) steps of each kind's largest piece.
        kind_of: kind of each block that is bound to a host and is not small.
        parts: (_, 3) option, kind and how many.
        free: (_, 3) option, steps of a free piece and how many.
        need: (O,) the least room that an option's pieces fit one by one; G + 1 if there is none.
        exact: (O,) whether an option's pieces are what they count as, so that plans may use it.
    """

    def __init__(self, encoded: Encoded, step: float, most: int, small: int) -> None:
        self._encoded, self._step, self._most = encoded, step, most
        self.local, bound = host_blocks(encoded)
        self.hosts = tuple(
            tuple(sorted(ranks))
            for ranks in dict.fromkeys(
                frozenset(place) for block in sorted(bound) for place in encoded.blocks[block].names
            )
        )
        self._merged = self._merge(sorted(bound))
        self.kind_of: dict[int, int] = {}
        numbers: dict[tuple[tuple[int, ...], ...], int] = {}
        for block in sorted(bound):
            ways = self._ways(block)
            if max(map(max, ways)) > small:
                self.kind_of[block] = numbers.setdefault(ways, len(numbers))
        self.kinds = [np.array(ways, dtype=np.int64) for ways in numbers]
        self.below = _below(self.kinds)
        under = np.zeros((len(self.kinds), len(self.kinds)), dtype=bool)
        for kind, others in enumerate(self.below):
            under[kind, list(others)] = True
        self.largest: Ints = np.array([ways.max() for ways in self.kinds], dtype=np.int64)
        self.replaced = under & ~(under.T & np.triu(np.ones_like(under)))
        self._count()

    def steps(self, loads: Floats) -> Ints:
        """Rounded down: a bound must not round up. What is larger than all is one step more than all."""
        return np.clip(np.floor(loads / self._step - 1e-6), 0, self._most + 1).astype(np.int64)

    def on_host(self, block: int, place: int) -> tuple[int, tuple[int, ...]]:
        """The host of a place of a kind of part, and the steps on each of its ranks."""
        kind = self._encoded.blocks[block]
        number = next(n for n, ranks in enumerate(self.hosts) if kind.names[place][0] in ranks)
        loads = dict.fromkeys(self.hosts[number], 0)
        for rank, load in zip(kind.names[place], self._merged[block], strict=True):
            loads[rank] += load
        return number, tuple(loads.values())

    def _merge(self, blocks: Sequence[int]) -> dict[int, tuple[int, ...]]:
        """Steps of the pieces of each of some blocks; those that differ by little are taken as the least of them."""
        near: dict[object, list[tuple[int, tuple[int, ...]]]] = {}
        for block in blocks:
            loads = tuple(self.steps(self._encoded.blocks[block].loads).tolist())
            key = min(loads), tuple((load - min(loads)) // _NEAR for load in loads)
            near.setdefault(key, []).append((block, loads))
        found: dict[int, tuple[int, ...]] = {}
        for alike in near.values():
            least = tuple(map(min, *(loads for _, loads in alike))) if len(alike) > 1 else alike[0][1]
            found |= {block: least for block, _ in alike}
        return found

    def _ways(self, block: int) -> tuple[tuple[int, ...], ...]:
        places = range(len(self._encoded.blocks[block].names))
        return tuple(sorted({self.on_host(block, place)[1] for place in places}))

    def _count(self) -> None:
        encoded = self._encoded
        options = len(encoded.options)
        parts: dict[tuple[int, int], int] = {}
        free: dict[tuple[int, int], int] = {}
        self.exact = np.ones(options, dtype=bool)
        need = np.zeros(options, dtype=np.int64)
        for option, blocks in enumerate(encoded.option_blocks):
            for block, count in blocks:
                kind = encoded.blocks[block]
                sizes = self.steps(kind.loads).tolist()
                need[option] = max(need[option], *sizes)
                if block in self.kind_of:
                    key = option, self.kind_of[block]
                    parts[key] = parts.get(key, 0) + count
                    continue
                self.exact[option] &= kind.single and len(kind.names) == encoded.ranks
                for size in filter(None, sizes):
                    free[option, size] = free.get((option, size), 0) + count
        self.parts: Ints = np.array([(*key, n) for key, n in parts.items()], dtype=np.int64).reshape(-1, 3)
        self.free: Ints = np.array([(*key, n) for key, n in free.items()], dtype=np.int64).reshape(-1, 3)
        self.need: Ints = need


@dataclass(frozen=True, eq=False)
class Found:
    """Sets of parts.

    Args:
        values: (S,) what they are worth, the most first.
        sets: (S, n) kinds of their parts, -1 where there are fewer.
        loads: (S, L) steps of the parts on each rank.
        most: no set is worth more.
    """

    values: Floats
    sets: Ints
    loads: Ints
    most: float


def best_sets(
    inside: Inside,
    room: int,
    price: Floats,
    free: Floats,
    *,
    least: float,
    beam: int = 0,
    near: float = 0.0,
) -> Found:
    """The sets of parts that are worth most.

    Args:
        inside: the parts.
        room: steps of a rank.
        price: (K,) of a part of each kind.
        free: (G + 1,) V.
        least: sets that are worth less are of no use.
        beam: keep no more than so many states of a size, the most promising; 0: all, which is exact.
        near: also the sets that are worth so much less than the best.

    Returns:
        Sets; if ``beam`` is 0, there are some if any is worth ``least``, and they need not be the best.
    """
    kinds = _useful(inside, price, room, keep_all=near > 0)
    rest = _values_of_pieces(inside, kinds, price, free, room)
    states = _States(np.zeros((1, inside.local), dtype=np.int64), np.zeros(1), np.zeros((1, 0), dtype=np.int64))
    bar, passed, looked = least, -np.inf, 0
    found: list[tuple[Floats, _States]] = []
    while True:
        worth = states.value + free[room - states.loads].sum(axis=1)
        good = worth >= bar
        if good.any():
            bar = max(bar, float(worth.max()) - near)
            found.append((worth[good], states.picked(good)))
            if not beam:
                passed = np.inf
                break
        if (beam and len(states.value) > beam) or looked > _STATES:
            promise = states.value + rest[states.last[:, None], room - states.loads].sum(axis=1)
            order = np.argsort(-promise, kind="stable")
            keep = beam if looked <= _STATES else 0
            passed = max(passed, float(promise[order[keep]]))
            states = states.picked(order[:keep])
            if not keep:
                break
        states = _extended(inside, kinds, price, states, rest, room, bar)
        if not len(states.value):
            break
        looked += len(states.value)
    return _ordered(found, kinds, bar, passed, least, inside.local)


@dataclass(frozen=True, eq=False)
class _States:
    """Sets so far: (S, L) loads, (S,) prices of the parts, (S, n) indices of their kinds, ascending."""

    loads: Ints
    value: Floats
    parts: Ints

    @property
    def last(self) -> Ints:
        """(S,) the index of the last part's kind."""
        return self.parts[:, -1] if self.parts.shape[1] else np.zeros(len(self.value), dtype=np.int64)

    def picked(self, which: Ints | NDArray[np.bool_]) -> _States:
        return _States(self.loads[which], self.value[which], self.parts[which])


def _extended(
    inside: Inside, kinds: Sequence[int], price: Floats, states: _States, rest: Floats, room: int, bar: float
) -> _States:
    """All the sets with a part more that may be worth ``bar``."""
    if not kinds:
        return states.picked(np.zeros(0, dtype=np.int64))
    last = states.last
    ways = np.concatenate([inside.kinds[kind] for kind in kinds])
    number_of = np.repeat(np.arange(len(kinds)), [len(inside.kinds[kind]) for kind in kinds])
    loads, values, sources, numbers = [], [], [], []
    chunk = max(1, _CELLS // (len(ways) * inside.local))
    for begin in range(0, len(last), chunk):
        here = states.loads[begin : begin + chunk]
        after = here[:, None] + ways[None]
        fits = after.max(axis=2) <= room
        fits &= last[begin : begin + chunk, None] <= number_of[None]
        source, way = np.nonzero(fits)
        after = after[source, way]
        value = states.value[begin + source] + price[kinds][number_of[way]]
        good = value + rest[number_of[way][:, None], room - after].sum(axis=1) >= bar
        loads.append(after[good])
        values.append(value[good])
        sources.append(begin + source[good])
        numbers.append(number_of[way[good]])
    source = np.concatenate(sources)
    parts = np.hstack([states.parts[source], np.concatenate(numbers)[:, None]])
    found = _States(np.vstack(loads), np.concatenate(values), parts)
    # Ways of equal parts may change places: one of those that look the same is enough. Compared by a hash first, as to
    # sort rows is slow; those that only have the hash in common stay.
    rows = np.hstack([parts, found.loads])
    weights = np.random.default_rng(0).integers(1, 2**62, rows.shape[1])
    _, first, which = np.unique(rows @ weights, return_index=True, return_inverse=True)
    others = np.flatnonzero((rows != rows[first[which]]).any(axis=1))
    return found.picked(np.union1d(first, others))


def _useful(inside: Inside, price: Floats, room: int, keep_all: bool) -> list[int]:
    """Kinds in order of their price by load, without those in whose place another is worth as much."""
    able = (price > 1e-12) & (inside.largest <= room)
    if not keep_all:
        # Of two kinds that fit in each other's place, the first.
        better = able & (price[None] >= price[:, None] - 1e-10)
        able = able & ~(inside.replaced & better).any(axis=1)
    kinds = np.flatnonzero(able).tolist()
    return sorted(kinds, key=lambda kind: -price[kind] / max(int(inside.kinds[kind][0].sum()), 1))


def _values_of_pieces(inside: Inside, kinds: Sequence[int], price: Floats, free: Floats, room: int) -> Floats:
    """(K + 1, room + 1) the most that pieces on a rank are worth, if parts are of kinds from a number on.

    The pieces are free ones, or of parts, that share their price by load.
    """
    weights = [np.flatnonzero(np.diff(free[: room + 1]) > 0) + 1]
    values = [free[weights[0]]]
    ends = [len(weights[0])]
    for kind in reversed(kinds):
        sizes = np.unique(inside.kinds[kind][0])
        sizes = sizes[sizes > 0]
        weights.append(sizes)
        values.append(price[kind] * sizes / inside.kinds[kind][0].sum())
        ends.append(ends[-1] + len(sizes))
    best, _ = knapsacks(np.concatenate(weights), np.concatenate(values), room, ends)
    found: Floats = best[::-1] + 1e-12
    return found


def _ordered(
    found: Sequence[tuple[Floats, _States]], kinds: Sequence[int], bar: float, passed: float, least: float, local: int
) -> Found:
    widest = max((states.parts.shape[1] for _, states in found), default=0)
    names = np.array([*kinds, -1], dtype=np.int64)
    sets = [
        np.pad(states.parts, ((0, 0), (0, widest - states.parts.shape[1])), constant_values=-1) for _, states in found
    ]
    values = np.concatenate([np.zeros(0), *(worth for worth, _ in found)])
    chosen = np.concatenate([np.zeros((0, widest), dtype=np.int64), *sets])
    loads = np.concatenate([np.zeros((0, local), dtype=np.int64), *(states.loads for _, states in found)])
    order = np.argsort(-values, kind="stable")
    order = order[values[order] >= bar]
    most = max(passed, least, float(values.max(initial=-np.inf)))
    return Found(values[order], names[chosen[order]], loads[order], most)


def _below(kinds: Sequence[Ints]) -> list[set[int]]:
    """Per kind, those that are nowhere larger: each way of the larger has a way of the other that is not above it."""
    found: list[set[int]] = [set() for _ in kinds]
    if not kinds:
        return found
    ways, kind_of = np.concatenate(kinds), np.repeat(np.arange(len(kinds)), [len(each) for each in kinds])
    starts = np.searchsorted(kind_of, np.arange(len(kinds)))
    for number, mine in enumerate(kinds):
        under = np.ones(len(kinds), dtype=bool)
        for way in mine:
            under &= np.logical_or.reduceat((ways <= way).all(axis=1), starts)
        under[number] = False
        found[number] = set(np.flatnonzero(under).tolist())
    return found

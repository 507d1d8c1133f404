"""What can be on the ranks of one host: kinds of parts, and the ways to put each on them.

A part that is bound to a host puts something on each of its ranks, in one of a few ways: more on some neighbouring
ranks that hold its rows, less on the others. A *set* of parts fits a host if for some way of each the loads of no rank
are above its room (:mod:`sets`). Loads are in whole steps; sets are exact there, and it is only in how many hosts have
which set that :mod:`hosts` takes fractions.

Shapes: G steps, L ranks of a host, P ways to put a part on them, K kinds of parts, O options.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from shardrec.planner.solve.encode import Encoded, Floats, Ints
from shardrec.planner.solve.sizes import host_blocks

__all__ = ["Inside"]

_NEAR = 4
"""Steps that parts may differ by, beyond their least piece, and are taken as the same."""


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
        under: (K, K) the same; likewise ``replaced``, but that of two alike only one is below the other.
        pieces: per kind, the sizes of its pieces, and the part of its load that one of them is.
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
        under: NDArray[np.bool_] = np.zeros((len(self.kinds), len(self.kinds)), dtype=bool)
        for kind, others in enumerate(self.below):
            under[kind, list(others)] = True
        self.pieces = [_pieces(ways[0]) for ways in self.kinds]
        self.largest: Ints = np.array([ways.max() for ways in self.kinds], dtype=np.int64)
        self.under = under
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


def _pieces(way: Ints) -> tuple[Ints, Floats]:
    sizes = np.unique(way[way > 0])
    return sizes, sizes / max(int(way.sum()), 1)


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

"""Gangs on ranks, placed largest first.

A packing holds the number of gangs of each kind (:class:`~shardrec.planner.solve.encode.GangKind`) at each place. Gangs
are assigned to tables at the end.

Shapes: R ranks, M memory tiers, O options, P places of a kind.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from shardrec.planner.solve.encode import Encoded, Floats, Ints
from shardrec.planner.solve.problem import Place, Solution

_EPS = 1e-12


class Packing:
    """Where the gangs of a choice of options are.

    Attributes:
        base: load of the chosen options on every rank.
        loads: (R,).
        memory: (R, M).
        at: per kind of gang, (P,) how many are at each place.
    """

    def __init__(self, encoded: Encoded, counts: Ints) -> None:
        self.encoded = encoded
        self.counts = counts.copy()
        base = counts.astype(np.float64)
        # By einsum: BLAS takes threads for a product as short as this, and waits for them on a busy machine.
        self.base = float(np.einsum("o,o->", base, encoded.base_load))
        self.loads: Floats = np.full(encoded.ranks, self.base)
        self.memory: Floats = np.tile(np.einsum("o,om->m", base, encoded.base_memory), (encoded.ranks, 1))
        self.at: dict[int, Ints] = {}
        self._limit = encoded.capacity * (1 + 1e-12)

    @property
    def cost(self) -> float:
        """Load of the most loaded rank."""
        return float(self.loads.max())

    @classmethod
    def fitting(cls, encoded: Encoded, counts: Ints, gangs: Iterable[tuple[int, int, int]]) -> Packing | None:
        """The packing of gangs, (kind, place, number of them). None if it does not fit memory."""
        packing = cls(encoded, counts)
        for block, place, count in gangs:
            packing.put(block, place, count)
        return packing if packing.fits() else None

    @property
    def gangs(self) -> Iterator[tuple[int, int, int]]:
        """Kind, place and number of the gangs that were put."""
        for block, at in self.at.items():
            for place in np.flatnonzero(at).tolist():
                yield block, place, int(at[place])

    def solution(self, bound: float) -> Solution:
        """Table by table: the first tables of a group take the first options in use, and gangs as they come."""
        encoded = self.encoded
        left = {block: [p for p, n in enumerate(at) for _ in range(int(n))] for block, at in self.at.items()}
        choice: dict[str, int] = {}
        places: dict[str, tuple[Place, ...]] = {}
        for names, span in zip(encoded.groups, encoded.group_options, strict=True):
            options = [option for option in span for _ in range(int(self.counts[option]))]
            for name, option in zip(names, options, strict=True):
                choice[name] = option - span.start
                places[name] = tuple(
                    encoded.blocks[block].names[left[block].pop()]
                    for block, count in encoded.option_blocks[option]
                    for _ in range(count)
                )
        return Solution(
            choice=choice,
            places=places,
            loads=tuple(self.loads.tolist()),
            memory=tuple(map(tuple, self.memory.tolist())),
            bound=min(bound, self.cost),
        )

    def fits(self) -> bool:
        """Whether every rank is within its memory."""
        return bool((self.memory <= self._limit).all())

    def put(self, block: int, place: int, count: int = 1) -> None:
        """Add ``count`` gangs of a kind at a place. Take them off if negative."""
        kind = self.encoded.blocks[block]
        at = self.at.get(block)
        if at is None:
            at = self.at[block] = np.zeros(len(kind.names), dtype=np.int64)
        at[place] += count
        # A place may name a rank twice, so indexed addition would lose one.
        np.add.at(self.loads, kind.places[place], count * kind.loads)
        np.add.at(self.memory, kind.places[place], count * kind.memory)

    def place_best(self, block: int, memory_weight: float = 0.0) -> bool:
        """Add one gang where the highest rank of its place is lowest. False if it fits nowhere."""
        kind = self.encoded.blocks[block]
        after = (self.memory[kind.places] + kind.memory[None]).max(axis=1)
        score = (self.loads[kind.places] + kind.loads[None]).max(axis=1)
        fits = (after <= self._limit).all(axis=1)
        if not fits.any():
            return False
        if memory_weight:
            full = (after / self._limit).max(axis=1)
            score = score / max(self.cost, _EPS) + memory_weight * full
        self.put(block, int(np.where(fits, score, np.inf).argmin()))
        return True

    def fill(self, demand: Iterable[tuple[int, int]], memory_weight: float = 0.0, memory_order: float = 0.0) -> bool:
        """Place ``(block, count)`` gangs, the largest first. False if some fit nowhere.

        Args:
            demand: what to place.
            memory_weight: how much a full rank repels, against a loaded one.
            memory_order: how much bytes count in the order, against load.
        """
        encoded = self.encoded
        wanted = [(block, count) for block, count in demand if count]
        largest = max((float(encoded.blocks[block].loads.max()) for block, _ in wanted), default=0.0) or 1.0

        def size(item: tuple[int, int]) -> tuple[bool, bool, float, int]:
            kind = encoded.blocks[item[0]]
            bytes_ = float((kind.memory / self._limit).max())
            weight = (1 - memory_order) * float(kind.loads.max()) / largest + memory_order * bytes_
            return kind.free, kind.single, -weight, item[0]

        for block, count in sorted(wanted, key=size):
            for _ in range(count):
                if not self.place_best(block, memory_weight):
                    return False
        return True


def demand(encoded: Encoded, counts: Ints) -> dict[int, int]:
    """How many gangs per kind a choice of options, (O,), asks for."""
    demanded: dict[int, int] = {}
    for option in np.flatnonzero(counts).tolist():
        for block, count in encoded.option_blocks[option]:
            demanded[block] = demanded.get(block, 0) + count * int(counts[option])
    return demanded


def rounded(encoded: Encoded, values: Floats) -> Ints:
    """(O,) whole counts: in each group, the largest remainders are rounded up."""
    counts = np.floor(values + 1e-9).astype(np.int64)
    for size, span in zip(encoded.sizes, encoded.group_options, strict=True):
        columns = slice(span.start, span.stop)
        order = np.argsort(counts[columns] - values[columns], kind="stable")
        counts[columns][order[: int(size - counts[columns].sum())]] += 1
    return counts


def compact(encoded: Encoded, share: float, budget: float) -> Ints:
    """(O,) per group the option of least work whose items take at most a share of a rank, or the smallest."""
    sizes = (encoded.item_memory / np.maximum(encoded.capacity, 1.0)).max(axis=1)
    item = np.full(len(encoded.options), share)
    np.maximum.at(item, encoded.item_option, np.maximum(sizes, encoded.item_load / max(budget, 1e-300)))
    order = np.lexsort((encoded.total_load, item, encoded.option_group))
    counts = np.zeros(len(encoded.options), dtype=np.int64)
    counts[order[[span.start for span in encoded.group_options]]] = encoded.sizes
    return counts

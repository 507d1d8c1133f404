"""Gangs on ranks, placed largest first.

A packing holds the number of gangs of each kind (:class:`~shardrec.planner.solve.encode.GangKind`) at each place. Gangs
are assigned to tables at the end.

Shapes: R ranks, D dimensions of a size (load, then bytes of each memory tier), O options, P places of a kind.
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
        base: (D,) what the chosen options put on every rank.
        load: (R, D) load and bytes of each rank.
        at: per kind of gang, (P,) how many are at each place.
    """

    def __init__(self, encoded: Encoded, counts: Ints) -> None:
        self.encoded = encoded
        self.counts = counts.copy()
        # By einsum: BLAS takes threads for a product as short as this, and waits for them on a busy machine.
        weights, columns = counts.astype(np.float64), np.asfortranarray(encoded.base).T
        self.base: Floats = np.array([np.einsum("o,o->", weights, column) for column in columns])
        self.load: Floats = np.tile(self.base, (encoded.ranks, 1))
        self.at: dict[int, Ints] = {}

    @property
    def cost(self) -> float:
        """Load of the most loaded rank."""
        return float(self.load[:, 0].max())

    @classmethod
    def fitting(cls, encoded: Encoded, counts: Ints, gangs: Iterable[tuple[int, int, int]]) -> Packing | None:
        """The packing of gangs, (kind, place, number of them). None if it does not fit memory."""
        packing = cls(encoded, counts)
        for kind, place, count in gangs:
            packing.put(kind, place, count)
        return packing if packing.fits() else None

    @property
    def gangs(self) -> Iterator[tuple[int, int, int]]:
        """Kind, place and number of the gangs that were put."""
        for kind, at in self.at.items():
            for place in np.flatnonzero(at).tolist():
                yield kind, place, int(at[place])

    def solution(self, bound: float) -> Solution:
        """Table by table: the first tables of a group take the first options in use, and gangs as they come."""
        encoded = self.encoded
        left = {kind: [p for p, n in enumerate(at) for _ in range(int(n))] for kind, at in self.at.items()}
        choice: dict[str, int] = {}
        places: dict[str, tuple[Place, ...]] = {}
        for names, span in zip(encoded.groups, encoded.group_options, strict=True):
            options = [option for option in span for _ in range(int(self.counts[option]))]
            for name, option in zip(names, options, strict=True):
                choice[name] = option - span.start
                places[name] = tuple(
                    encoded.kinds[kind].names[left[kind].pop()]
                    for kind, count in encoded.option_gangs[option]
                    for _ in range(count)
                )
        return Solution(
            choice=choice,
            places=places,
            loads=tuple(self.load[:, 0].tolist()),
            memory=tuple(map(tuple, self.load[:, 1:].tolist())),
            bound=min(bound, self.cost),
        )

    def fits(self) -> bool:
        """Whether every rank is within its memory."""
        return bool((self.load[:, 1:] <= self.encoded.limit).all())

    def put(self, number: int, place: int, count: int = 1) -> None:
        """Add ``count`` gangs of a kind at a place. Take them off if negative."""
        kind = self.encoded.kinds[number]
        at = self.at.get(number)
        if at is None:
            at = self.at[number] = np.zeros(len(kind.names), dtype=np.int64)
        at[place] += count
        # A place may name a rank twice, so indexed addition would lose one.
        np.add.at(self.load, kind.places[place], count * kind.size)

    def place_best(self, number: int, memory_weight: float = 0.0) -> bool:
        """Add one gang where the highest rank of its place is lowest. False if it fits nowhere."""
        kind, limit = self.encoded.kinds[number], self.encoded.limit
        after = (self.load[kind.places] + kind.size).max(axis=1)
        score, memory = after[:, 0], after[:, 1:]
        fits = (memory <= limit).all(axis=1)
        if not fits.any():
            return False
        if memory_weight:
            score = score / max(self.cost, _EPS) + memory_weight * (memory / limit).max(axis=1)
        self.put(number, int(np.where(fits, score, np.inf).argmin()))
        return True

    def fill(self, demand: Iterable[tuple[int, int]], memory_weight: float = 0.0, memory_order: float = 0.0) -> bool:
        """Place ``(kind, count)`` gangs, the largest first. False if some fit nowhere.

        Args:
            demand: what to place.
            memory_weight: how much a full rank repels, against a loaded one.
            memory_order: how much bytes count in the order, against load.
        """
        encoded = self.encoded
        wanted = [(kind, count) for kind, count in demand if count]
        largest = max((float(encoded.kinds[kind].size[:, 0].max()) for kind, _ in wanted), default=0.0) or 1.0

        def key(run: tuple[int, int]) -> tuple[bool, bool, float, int]:
            kind = encoded.kinds[run[0]]
            bytes_ = float((kind.size[:, 1:] / encoded.limit).max())
            weight = (1 - memory_order) * float(kind.size[:, 0].max()) / largest + memory_order * bytes_
            # Gangs with one place first, then those of several items.
            return len(kind.names) > 1, len(kind.size) == 1, -weight, run[0]

        return all(
            self.place_best(kind, memory_weight) for kind, count in sorted(wanted, key=key) for _ in range(count)
        )


def demand(encoded: Encoded, counts: Ints) -> dict[int, int]:
    """How many gangs per kind a choice of options, (O,), asks for."""
    demanded: dict[int, int] = {}
    for option in np.flatnonzero(counts).tolist():
        for kind, count in encoded.option_gangs[option]:
            demanded[kind] = demanded.get(kind, 0) + count * int(counts[option])
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
    whole = np.array([max(budget, 1e-300), *np.maximum(encoded.capacity, 1.0)])
    item = np.full(len(encoded.base), share)
    np.maximum.at(item, encoded.item_option, (encoded.item_size / whole).max(axis=1))
    order = np.lexsort((encoded.total[:, 0], item, encoded.option_group))
    counts = np.zeros(len(encoded.base), dtype=np.int64)
    counts[order[encoded.starts]] = encoded.sizes
    return counts

"""The assignments that several searches are at, as arrays, and the best that each has seen.

Shapes: C searches, N tables, R ranks, D dimensions of a size, I most items of a table, J items of all kinds.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shardrec.planner.solve.encode import Encoded, Floats, Ints
from shardrec.planner.solve.moves import Batch, Choices
from shardrec.planner.solve.packing import Packing

Gangs = tuple[Ints, Ints]
"""Kinds of a table's gangs, and their places."""


class States:
    """Where each search is.

    Args:
        encoded: the problem.
        choices: the options that tables may take.
        starts: where each begins.

    Attributes:
        option: (C, N) per table.
        load: (C, D, R + 1) load and bytes of the items on each rank.
        base: (C, D) what the options put on every rank.
        best: (C,) the least cost so far.
        hottest: (C, R) ranks by their load, the highest first.
    """

    def __init__(self, encoded: Encoded, choices: Choices, starts: Sequence[Packing]) -> None:
        self.encoded, self.choices = encoded, choices
        count, tables = len(starts), len(encoded.group)
        self.option = np.stack([np.repeat(np.arange(len(start.counts)), start.counts) for start in starts])
        self.gangs = [_gangs(encoded, start, option) for start, option in zip(starts, self.option, strict=True)]
        self.base = np.stack([np.einsum("o,od->d", start.counts, encoded.base) for start in starts])
        self.load = np.zeros((count, encoded.base.shape[1], encoded.ranks + 1))
        self.best = np.array([start.cost for start in starts])
        self.hottest = np.zeros((count, encoded.ranks), dtype=np.int64)
        self._first_cost = self.best.copy()
        self._best = [(self.option[search].copy(), [*self.gangs[search]]) for search in range(count)]
        # Ranks and items per table, padded with rank R and item J.
        self._rank = np.full((count, tables, 1), encoded.ranks)
        self._item = np.full((count, tables, 1), len(encoded.size) - 1)
        self._items = np.zeros((count, tables), dtype=np.int64)
        # Which tables are on which rank: rank r of search c has tables[first[c, r] : first[c, r + 1]].
        self._first = np.zeros((count, encoded.ranks + 2), dtype=np.int64)
        self._tables = [np.zeros(0, dtype=np.int64)] * count
        for search, start in enumerate(starts):
            self.load[search, :, : encoded.ranks] = start.load.T - self.base[search][:, None]
            for table in range(tables):
                self._place(search, table, self.gangs[search][table])
            self._index(search)

    def batch(self, search: Ints) -> Batch:
        """A batch of copies of the states of some searches, (B,)."""
        return Batch(self.encoded, self.load[search], self.base[search])

    def on_rank(self, search: Ints, rank: Ints, rng: np.random.Generator) -> Ints:
        """(n,) a table on each of these ranks, at random. -1 for none."""
        first, end = self._first[search, rank], self._first[search, rank + 1]
        offset = np.cumsum([0, *map(len, self._tables)])[search]
        index = offset + first + (rng.random(len(search)) * (end - first)).astype(np.int64)
        tables = np.concatenate([*self._tables, np.zeros(1, dtype=np.int64)])[index]
        return np.where(end > first, tables, -1)

    def take(self, batch: Batch, search: Ints, tables: Ints) -> None:
        """Take tables, (B, n) with -1 for none, off the ranks of a batch. Its proposals belong to these searches."""
        proposal, column = np.nonzero(tables >= 0)
        table, of = tables[proposal, column], search[proposal]
        if len(table):
            most = int(self._items[of, table].max())
            batch.take(proposal, self.option[of, table], self._rank[of, table, :most], self._item[of, table, :most])

    def move(self, search: int, load: Floats, base: Floats, moved: dict[int, tuple[int, Gangs]]) -> None:
        """Go on to another assignment.

        Args:
            search: the number of the search that continues.
            load: (D, R + 1).
            base: (D,).
            moved: option and gangs of the tables that differ.
        """
        self.load[search], self.base[search] = load, base
        for table, (option, gangs) in moved.items():
            self.option[search, table] = option
            self.gangs[search][table] = gangs
            self._place(search, table, gangs)
        self._index(search)
        after = Batch(self.encoded, load[None], base[None])
        cost = float(after.costs()[0])
        if cost < self.best[search] * (1 - 1e-9) and after.excess()[0] <= 0:
            self.best[search] = cost
            self._best[search] = self.option[search].copy(), [*self.gangs[search]]

    def packing(self, search: int) -> Packing | None:
        """The best assignment of a search. None if it is not better than the start."""
        option, gangs = self._best[search]
        if self.best[search] >= self._first_cost[search] * (1 - 1e-9):
            return None
        counts = np.bincount(option, minlength=len(self.encoded.base))
        placed = (pair for kinds, places in gangs for pair in zip(kinds.tolist(), places.tolist(), strict=True))
        return Packing.fitting(self.encoded, counts, ((kind, place, 1) for kind, place in placed))

    def _place(self, search: int, table: int, gangs: Gangs) -> None:
        """Note the ranks and the items of a table."""
        encoded = self.encoded
        pairs = [encoded.items(kind, place) for kind, place in zip(*(each.tolist() for each in gangs), strict=True)]
        count = sum(len(ranks) for ranks, _ in pairs)
        if count > self._rank.shape[2]:
            more = ((0, 0), (0, 0), (0, count - self._rank.shape[2]))
            self._rank = np.pad(self._rank, more, constant_values=encoded.ranks)
            self._item = np.pad(self._item, more, constant_values=len(encoded.size) - 1)
        self._rank[search, table], self._item[search, table] = encoded.ranks, len(encoded.size) - 1
        self._items[search, table] = count
        if pairs:
            self._rank[search, table, :count] = np.concatenate([ranks for ranks, _ in pairs])
            self._item[search, table, :count] = np.concatenate([items for _, items in pairs])

    def _index(self, search: int) -> None:
        """Bring up to date which tables are on which rank, and which ranks have most load."""
        rank = self._rank[search, :, : max(int(self._items[search].max()), 1)]
        order = np.argsort(rank, axis=None, kind="stable")
        self._tables[search] = order // rank.shape[1]
        self._first[search] = np.searchsorted(rank.ravel()[order], np.arange(self.encoded.ranks + 2))
        self.hottest[search] = np.argsort(-self.load[search, 0, : self.encoded.ranks], kind="stable")


def _gangs(encoded: Encoded, packing: Packing, option: Ints) -> list[Gangs]:
    """The gangs per table. Equal gangs are interchangeable."""
    left = {kind: np.repeat(np.arange(len(at)), at).tolist() for kind, at in packing.at.items()}
    gangs = []
    run_kind, run_count = encoded.runs
    for number in option.tolist():
        used = run_kind[number] >= 0
        kinds = np.repeat(run_kind[number][used], run_count[number][used])
        gangs.append((kinds, np.array([left[kind].pop() for kind in kinds.tolist()], dtype=np.int64)))
    return gangs

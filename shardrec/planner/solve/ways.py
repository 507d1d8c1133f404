"""Whether some options can be together: all the ways to fill a rank with their pieces, and numbers of ways that do.

For some tables the options are given, and which hosts their parts are on. With E the load that they put on every rank,
their pieces have room for cost - E on a rank, and in each tier of memory for what is not taken on every rank. What can
be on a rank of a host together is a *way* to fill it. There are few pieces, so all the ways are listed, and a programme
tells whether there are numbers of ways, as many in all as there are ranks, that hold all the pieces:

::

    host 0, 8 ranks     t2's piece, t4's piece                              x 5.3
                        t2's piece                                          x 2.7
    left on all ranks   time 41.0, memory 0.09        >=        what the other tables take at least

The tables whose options are open are *fluid*: of each, its options in fractions, and what is left on all the ranks
together must hold what they take in all. So time and every tier of memory count together, rank by rank, and
the answer "no" is a proof. Where numbers of ways are to be whole, "yes" is close to a plan.

A part with a piece on each rank of a host is taken as its least piece on all of them, and what the others have beyond;
which of the host's ranks these are on is left open. Any other part's pieces are taken one by one, as if they could be
anywhere.

Shapes: Q quantities (load, then the tiers that have a limit, as parts of it), K kinds of pieces on a host, P ways.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import highspy
import numpy as np

from shardrec.planner.solve.encode import Block, Encoded, Floats
from shardrec.planner.solve.sizes import host_blocks

__all__ = ["Chosen", "Fluid", "Ways", "undominated"]

_MOST_WAYS = 4000
_NODES = 100
_SLACK = 1e-6
"""Limits are taken this much larger, so that rounding errors cannot prove what is not so."""


@dataclass(frozen=True, eq=False)
class Chosen:
    """An option of a table, and where its parts are.

    Args:
        option: which.
        split: per block of the option, how many of its parts are on each host; empty where that is left open.
    """

    option: int
    split: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, eq=False)
class Fluid:
    """A table of which it is not known where it is.

    Args:
        base: (Q,) what it puts on every rank at least.
        sizes: (N, Q) what it takes on all ranks together, one row per option.
    """

    base: Floats
    sizes: Floats


@dataclass(frozen=True, eq=False)
class _Shape:
    """A part: what it puts on all ranks of its host; its pieces beyond that, how many there are, and on one rank."""

    everywhere: Floats
    pieces: tuple[tuple[Floats, int, int], ...]


@dataclass(frozen=True, eq=False)
class _Pieces:
    """What is on every rank (Q,), and the kinds of pieces: sizes (K, Q), how many, and most on one rank."""

    everywhere: Floats
    sizes: Floats
    counts: list[float]
    most: list[int]


class Ways:
    """The options of a problem, as quantities.

    Args:
        encoded: the problem.

    Attributes:
        ranks: of a host; of all, where no part is bound to a host.
        hosts: how many.
        base: (O, Q) what options put on every rank.
        total: (O, Q) and on all ranks together.
        asked: programmes that were solved.
    """

    def __init__(self, encoded: Encoded) -> None:
        self.encoded = encoded
        self._tiers = [tier for tier, size in enumerate(encoded.capacity) if np.isfinite(size)]
        self._capacity: Floats = np.maximum(encoded.capacity[self._tiers], 1.0)
        self.base = self.quantities(encoded.base_load, encoded.base_memory)
        self.total = self.quantities(encoded.total_load, encoded.total_memory)
        local, self._on_hosts = host_blocks(encoded)
        self.ranks = local if local > 1 else encoded.ranks
        self.hosts = encoded.ranks // self.ranks
        self._shapes: dict[int, _Shape] = {}
        self.asked = 0
        self._solver: Any = highspy.Highs()  # type: ignore[no-untyped-call]
        for name, value in (("output_flag", False), ("threads", 1), ("random_seed", 0), ("mip_max_nodes", _NODES)):
            self._solver.setOptionValue(name, value)

    def quantities(self, load: Floats, memory: Floats) -> Floats:
        """(N, Q) of loads (N,) and bytes (N, M)."""
        return np.column_stack([load, memory[:, self._tiers] / self._capacity])

    def limits(self, cost: float) -> Floats:
        """(Q,) the most of each quantity on a rank, with a little added."""
        return np.append(cost, np.ones(len(self._tiers))) * (1 + _SLACK)

    def on_hosts(self, block: int) -> bool:
        """Whether a block's parts have a piece on each rank of a host, and there are several hosts."""
        return block in self._on_hosts

    def possible(self, chosen: Sequence[Chosen], fluid: Sequence[Fluid], cost: float, *, whole: bool = False) -> bool:
        """Whether the tables may have a plan that costs no more; False is proven.

        Args:
            chosen: the tables whose options are known.
            fluid: the others.
            cost: finite.
            whole: ask for whole numbers of ways, which takes longer.
        """
        left = self.limits(cost) - self.base[[each.option for each in chosen]].sum(axis=0)
        room = left - np.sum([table.base for table in fluid], axis=0)
        if (room < 0).any():
            return False
        scale = self.limits(cost)
        free = self._pieces(chosen, None)
        hosts: list[tuple[Floats, Floats]] = []
        counts: list[list[float]] = []
        for host in range(self.hosts):
            there = self._pieces(chosen, host)
            if (there.everywhere > room).any():
                return False
            sizes = np.concatenate([there.sizes, free.sizes])
            ways = _ways(sizes, [*there.most, *free.most], room - there.everywhere)
            if ways is None:
                return True
            hosts.append((ways, (left - there.everywhere - ways @ sizes) / scale))
            counts.append(there.counts)
        self.asked += 1
        return self._solve(hosts, counts, free.counts, [table.sizes / scale for table in fluid], whole)

    def _shape(self, block: int) -> _Shape:
        if block not in self._shapes:
            self._shapes[block] = self._shaped(self.encoded.blocks[block], block in self._on_hosts)
        return self._shapes[block]

    def _shaped(self, kind: Block, on_host: bool) -> _Shape:
        sizes = self.quantities(kind.loads, kind.memory)
        everywhere: Floats = sizes.min(axis=0) if on_host else np.zeros(sizes.shape[1])
        pieces, counts = np.unique(sizes - everywhere, axis=0, return_counts=True)
        found = tuple(
            (size, int(count), 1 if on_host else int(count))
            for size, count in zip(pieces, counts, strict=True)
            if size.any()
        )
        return _Shape(everywhere=everywhere, pieces=found)

    def _pieces(self, chosen: Sequence[Chosen], host: int | None) -> _Pieces:
        """What is bound to a host, or to none."""
        everywhere: Floats = np.zeros(self.base.shape[1])
        sizes: list[Floats] = []
        counts: list[float] = []
        most: list[int] = []
        for each in chosen:
            for (block, count), shares in zip(self.encoded.option_blocks[each.option], each.split, strict=True):
                if (host is None) == bool(shares):
                    continue
                parts = count if host is None else shares[host]
                if parts:
                    shape = self._shape(block)
                    everywhere = everywhere + parts * shape.everywhere
                    for size, pieces, together in shape.pieces:
                        sizes.append(size)
                        counts.append(float(parts * pieces))
                        most.append(parts * together)
        return _Pieces(everywhere, np.array(sizes).reshape(-1, len(everywhere)), counts, most)

    def _solve(
        self,
        hosts: Sequence[tuple[Floats, Floats]],
        bound: Sequence[Sequence[float]],
        free: Sequence[float],
        fluid: Sequence[Floats],
        whole: bool,
    ) -> bool:
        """Whether there are numbers of ways that hold all pieces and leave room for what is fluid.

        Args:
            hosts: per host, its ways (P, K) and what each leaves (P, Q).
            bound: per host, the pieces of each kind that are bound to it, which come first.
            free: the pieces of each kind that may be on any host.
            fluid: per table, (N, Q).
            whole: whole numbers of ways.
        """
        quantities, ways = self.base.shape[1], sum(len(each) for each, _ in hosts)
        counts = [number for numbers in bound for number in numbers] + list(free)
        columns, last = ways + sum(map(len, fluid)), len(hosts) + len(counts)
        # Rows: one per host, one per kind of piece, one per quantity, one per table that is fluid.
        matrix = np.zeros((last + quantities + len(fluid), columns))
        column, row = 0, len(hosts)
        for host, (each, leaves) in enumerate(hosts):
            here, own = slice(column, column + len(each)), len(bound[host])
            matrix[host, here] = 1.0
            matrix[row : row + own, here] = each[:, :own].T
            matrix[last - len(free) : last, here] = each[:, own:].T
            matrix[last : last + quantities, here] = leaves.T
            column, row = here.stop, row + own
        for index, sizes in enumerate(fluid):
            here = slice(column, column + len(sizes))
            matrix[last : last + quantities, here] = -sizes.T
            matrix[last + quantities + index, here] = 1.0
            column = here.stop
        ranks = np.full(len(hosts), float(self.ranks))
        lower = np.concatenate([ranks, counts, np.zeros(quantities), np.ones(len(fluid))])
        upper = lower.copy()
        upper[last : last + quantities] = highspy.kHighsInf
        row_of, column_of = np.nonzero(matrix)
        solver = self._solver
        solver.clearModel()
        solver.setOptionValue("presolve", "on" if whole else "off")
        solver.passModel(
            columns,
            len(matrix),
            len(row_of),
            highspy.MatrixFormat.kRowwise.value,
            highspy.ObjSense.kMinimize.value,
            0.0,
            np.zeros(columns),
            np.zeros(columns),
            np.full(columns, highspy.kHighsInf),
            lower,
            upper,
            np.searchsorted(row_of, np.arange(len(matrix))).astype(np.int32),
            column_of.astype(np.int32),
            matrix[row_of, column_of],
            (whole & (np.arange(columns) < ways)).astype(np.int32),
        )
        solver.run()
        return bool(solver.getModelStatus() != highspy.HighsModelStatus.kInfeasible)


def _ways(sizes: Floats, most: Sequence[int], room: Floats) -> Floats | None:
    """(P, K) all the ways to fill a room; None if they are too many."""
    counts: Floats = np.zeros((1, 0))
    filled: Floats = np.zeros((1, len(room)))
    for size, limit in zip(sizes, most, strict=True):
        total = filled[:, None] + np.arange(limit + 1.0)[None, :, None] * size
        way, times = np.nonzero((total <= room).all(axis=2))
        if len(way) > _MOST_WAYS:
            return None
        counts = np.column_stack([counts[way], times.astype(np.float64)])
        filled = total[way, times]
    return counts


def undominated(sizes: Floats) -> Floats:
    """The rows than which no other is smaller in every column."""
    kept: list[int] = []
    for row in np.lexsort(sizes.T[::-1]).tolist():
        if not any((sizes[other] <= sizes[row]).all() for other in kept):
            kept.append(row)
    return sizes[kept]

"""What every assignment must satisfy, as linear rows over "how many tables take which option", and the bound they
prove.

[Note: the bound]
In an assignment each rank bears E, the sum of the chosen options' loads on every rank, and items. Let c be the most
that the items of a rank come to, so that the cost is E + c. Relative to c, sizes s in [0, 1] that share a rank add up
to at most 1. A *dual feasible function* f keeps that property: if sizes add up to at most 1, then their f(s) do as
well. Hence over R ranks

    sum over all items of f(load / c)  <=  R        for every dual feasible f

which, for a given c, is linear in the choice of options. With f(s) = s this is the average load. The others see that
two items of 0.6 do not fit one rank. The same holds per memory tier for bytes. Let E(c) be the least E under
all these rows, with fractional tables. The larger the budget, the less E, so an assignment with c1 <= c <= c2 costs at
least c1 + E(c2), and the least of these over intervals that hold every c is a bound for all. The interval that decides
is cut in two until the bound stands still.

The functions are from Fekete and Schepers, "New classes of fast lower bounds for bin packing problems" (2001):
rounding to multiples of 1/k, and cutting off what is smaller than eps or larger than 1 - eps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

import numpy as np

from shardrec.planner.solve.encode import Bools, Encoded, Floats
from shardrec.planner.solve.linear_program import LinearProgram, Outcome

_ROUNDING = tuple(range(1, 13))
_CUTOFFS = 8
_FUNCTIONS = len(_ROUNDING) + _CUTOFFS
_SLACK = 1e-9
"""Sizes are taken this much smaller, so that rounding errors cannot prove what is not so."""


@dataclass(frozen=True, order=True)
class Interval:
    """A range of c, the load of the items of the most loaded rank.

    Args:
        bound: what an assignment with its c in the range costs at least.
        low: least c.
        high: most c.
        base: E at ``high``, or a bound of it.
    """

    bound: float
    low: float
    high: float
    base: float


class Relaxation:
    """The rows of one problem, for any c.

    Most of the rows never matter. So a program starts with those that did before, and takes in what its solution
    breaks.
    """

    def __init__(self, encoded: Encoded) -> None:
        self.encoded = encoded
        self._program = LinearProgram(encoded.option_group, encoded.sizes)
        self._upper = encoded.sizes[encoded.option_group].astype(np.float64)
        # (M,) the least sum over the tables of what their options put on every rank.
        least = np.minimum.reduceat(encoded.base[:, 1:], encoded.starts, axis=0)
        self._least_memory: Floats = least.T @ encoded.sizes.astype(np.float64)
        # Items are in the order of their options, so that a sum per option is a difference of running sums.
        self._edges = np.searchsorted(encoded.item_option, np.arange(len(encoded.base) + 1))
        # Per dimension, the items' sizes, the distinct ones among them, and which of these each has.
        self._sizes = [(sizes, *np.unique(sizes, return_inverse=True)) for sizes in encoded.item_size.T]
        # Per set of ranks, which items can be nowhere else.
        self._inside: list[tuple[int, Floats]] = []
        for ranks in encoded.reaches:
            within = np.array([other <= ranks for other in encoded.reaches])
            inside = within[encoded.item_reach]
            if inside.any() or not self._inside:
                self._inside.append((len(ranks), inside.astype(np.float64)))
        self._memory_rows: list[tuple[Floats, Floats]] | None = None
        self._active: set[int] = set()

    def least_base(self, budget: float, *, weight: float = 0.0, item_share: float = 1.0) -> Outcome:
        """E: the least that the options chosen put on every rank, where items have a budget. Infinite if none fit.

        Args:
            budget: c.
            weight: of the average load of the items in the objective, against E.
            item_share: the share of the budget that a single item may take.
        """
        encoded = self.encoded
        objective = encoded.base[:, 0]
        if weight:
            objective = objective + weight * self._spread()
        upper = np.where(self._fits(budget * item_share), self._upper, 0.0)
        rows, limits = self._rows(budget)
        # Sums that no choice of the options allowed can make too large tell nothing.
        allowed = np.where(upper > 0, rows, 0.0)
        highest = np.einsum("ng,g->n", np.maximum.reduceat(allowed, encoded.starts, axis=1), encoded.sizes)
        telling = set(np.flatnonzero(highest > limits).tolist())
        used = telling & self._active
        while True:
            picked = np.array(sorted(used), dtype=np.int64)
            outcome = self._program.minimise(objective, upper, rows[picked], limits[picked], key=tuple(picked.tolist()))
            if outcome.values is None:
                return outcome
            over = np.flatnonzero(np.einsum("no,o->n", rows, outcome.values) > limits * (1 + 1e-7) + 1e-12)
            broken = (set(over.tolist()) & telling) - used
            if not broken:
                return outcome
            used = used | broken
            self._active |= broken

    def intervals(self, accuracy: float, stop: Callable[[], bool], most: int = 200) -> list[Interval]:
        """Intervals that together hold every c, the deciding one first: its bound is the bound.

        Args:
            accuracy: width of the deciding interval, against its bound.
            stop: asked between two programs. Ends the halving.
            most: programs to solve.
        """
        unlimited = self._base_at(np.inf)
        if not np.isfinite(unlimited):
            return [Interval(np.inf, 0.0, np.inf, unlimited)]
        edge = max(float(np.maximum.reduceat(self._spread(), self.encoded.starts) @ self.encoded.sizes), 1e-12)
        heap = [Interval(edge + unlimited, edge, np.inf, unlimited)]
        while most > 0 and np.isfinite(base := self._base_at(edge)):
            # Downwards in steps of a half, to where nothing fits any more.
            heap.append(Interval(edge / 2 + base, edge / 2, edge, base))
            edge, most = edge / 2, most - 1
            if edge < 1e-9 * heap[0].low:
                heap.append(Interval(self._base_at(edge), 0.0, edge, self._base_at(edge)))
                break
        heapify(heap)
        while most > 0 and heap[0].high - heap[0].low > accuracy * heap[0].bound and not stop():
            for half in self.halves(heappop(heap)):
                heappush(heap, half)
            most -= 1
        return sorted(heap)

    def halves(self, interval: Interval) -> tuple[Interval, Interval]:
        """The two halves of an interval."""
        middle = 2 * interval.low if np.isinf(interval.high) else (interval.low + interval.high) / 2
        # The bound of the whole interval holds for its halves.
        base = max(interval.base, self._base_at(middle))
        return (
            Interval(interval.low + base, interval.low, middle, base),
            Interval(middle + interval.base, middle, interval.high, interval.base),
        )

    def _base_at(self, budget: float) -> float:
        return max(self.least_base(budget).bound * (1 - 1e-7), 0.0)

    def _spread(self) -> Floats:
        """(O,) load of an option's items, spread over all ranks."""
        return self.encoded.total[:, 0] / self.encoded.ranks - self.encoded.base[:, 0]

    def _fits(self, budget: float) -> Bools:
        """(O,) whether each of an option's items fits an empty rank."""
        encoded = self.encoded
        largest = np.concatenate([[budget], encoded.capacity - self._least_memory])
        too_big = (encoded.item_size > largest * (1 + _SLACK)).any(axis=1)
        fits: Bools = np.bincount(encoded.item_option[too_big], minlength=len(encoded.base)) == 0
        return fits

    def _rows(self, budget: float) -> tuple[Floats, Floats]:
        """All the rows: the same number, in the same order, for every c."""
        encoded = self.encoded
        if self._memory_rows is None:
            self._memory_rows = [
                self._sums(dim, encoded.base[:, dim], capacity, capacity - least)
                for dim, (capacity, least) in enumerate(zip(encoded.capacity, self._least_memory, strict=True), 1)
            ]
        load_rows = self._sums(0, np.zeros(len(encoded.base)), budget, budget)
        rows, limits = zip(load_rows, *self._memory_rows, strict=True)
        return np.concatenate(rows), np.concatenate(limits)

    def _sums(self, dim: int, everywhere: Floats, most: float, budget: float) -> tuple[Floats, Floats]:
        """The rows of one dimension, scaled to coefficients of at most 1."""
        rows, limits = [], []
        bounded = bool(np.isfinite(most))
        sizes, distinct, which = self._sizes[dim]
        values = np.zeros((_FUNCTIONS, len(sizes)))
        if bounded and budget > 0:
            values = _dual_feasible(distinct / budget * (1 - _SLACK))[:, which]
        for ranks, inside in self._inside:
            counted = self.encoded.item_count * inside
            total = self._per_option((sizes * counted)[None]) + ranks * everywhere
            rows.append(total if bounded else 0 * total)
            limits.append([ranks * most if bounded else 1.0])
            rows.append(self._per_option(values * counted))
            limits.append([float(ranks)] * _FUNCTIONS)
        return _scaled(np.concatenate(rows), np.concatenate(limits))

    def _per_option(self, values: Floats) -> Floats:
        """(n, O) sums over the items per option, of (n, I)."""
        running = np.zeros((len(values), values.shape[1] + 1))
        np.cumsum(values, axis=1, out=running[:, 1:])
        sums: Floats = running[:, self._edges[1:]] - running[:, self._edges[:-1]]
        # What is left of a difference of equal sums is rounding, not a size.
        return np.where(sums > 1e-12 * running[:, -1:], sums, 0.0)


def _scaled(rows: Floats, limits: Floats) -> tuple[Floats, Floats]:
    """Coefficients of at most 1."""
    largest = np.abs(rows).max(axis=1, initial=0.0)
    scale = np.where(largest > 0, largest, 1.0)
    return rows / scale[:, None], limits / scale * (1 + _SLACK)


def _dual_feasible(sizes: Floats) -> Floats:
    """(functions, n) values of n sizes."""
    sizes = np.minimum(sizes, 1.0)
    steps = np.array(_ROUNDING)[:, None]
    rounded = np.floor((steps + 1) * sizes[None]) / steps
    small = np.unique(sizes[(sizes > 0.02) & (sizes <= 0.5)])
    if not len(small):
        small = np.array([0.5])
    picked = small[np.linspace(0, len(small) - 1, _CUTOFFS).astype(int)]
    edges = (picked * (1 - 1e-9))[:, None]
    cut_off = np.where(sizes > 1 - edges, 1.0, np.where(sizes < edges, 0.0, sizes))
    return np.concatenate([rounded, cut_off])

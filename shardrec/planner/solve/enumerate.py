"""Gap closed by enumeration: of options and ways, all that a better plan could have, chosen in whole numbers.

Asked for is a proof that no plan costs less than a target, or one that does. For a box of rooms and its prices
(:mod:`cells`), a plan below the target has a load on every rank within some *budget* of the bound. Each of its options
may cost that much more than its table's best, and each of its ways that much less than the room is worth, and no more:
what costs more is in no such plan (reduced costs). What is left is few where the box is small and the bound is near.
All of it goes into one integer programme, which has no solution, and the box is closed, however weak its bound was, or
has one, and its options are tried.

Only ways that cannot have another or a larger piece are listed; a piece may take a larger one's place.

The idea is from vehicle routing: Baldacci, Christofides and Mingozzi, "An exact algorithm for the vehicle routing
problem based on the set partitioning formulation with additional cuts" (2008).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import highspy
import numpy as np
from scipy.sparse import coo_matrix

from shardrec.planner.solve.alike import Alike
from shardrec.planner.solve.cells import Box, Cells
from shardrec.planner.solve.encode import Encoded, Floats, Ints
from shardrec.planner.solve.pricing import Pricing
from shardrec.planner.solve.problem import SolveLimits
from shardrec.planner.solve.rows import Rows
from shardrec.planner.solve.sizes import GRID

__all__ = ["choose", "enumerated", "fillings"]

_MOST_WAYS = 12_000
_TRIES_PER_WAY = 30
_SHARED = 4
"""Numbers of tables with shares that are looked at apart; so many or more are together."""
_WIDTH = 2
"""Width of the boxes for which options and ways are listed."""
_WIDEST = GRID // 20
_AIM = 1.0
"""Of the gap: how far above the bound that is known the first level is."""
_STEP = 1.004
"""From one level to the next."""
_NODES = 200
_BOXES_PER_EFFORT = 3
_SECONDS = 2.0
"""Time limit of a programme, if there is one at all."""
_SLACK = 1e-6
_FEASIBLE = 2


@dataclass(frozen=True, eq=False)
class Chosen:
    """What a programme came to.

    Args:
        bound: of the cost in the box, of the most load; at least the target if the box is closed.
        counts: options of the smaller problem, and how many tables take them; None without a solution.
    """

    bound: float
    counts: dict[int, int] | None = None


def enumerated(
    encoded: Encoded,
    rows: Rows,
    bound: float,
    limits: SolveLimits,
    cost: Callable[[], float],
    attempt: Callable[[Ints], object],
    stop: Callable[[], bool],
) -> float:
    """A bound of the cost; that which closes the gap, if it is not stopped.

    Args:
        encoded: the problem.
        rows: other limits.
        bound: proven already, or 0.
        limits: with the gap to be proven.
        cost: of the best plan so far; finite.
        attempt: packs (O,) counts of options.
        stop: asked between boxes.

    Returns:
        The best bound; none better than that known if there are parts on hosts, and not two hosts.
    """
    most = cost()
    alike = Alike.of(encoded, most, rows) if most > 0 else None
    if alike is None:
        return bound
    seconds = _SECONDS if np.isfinite(limits.seconds) else np.inf
    found = _Enumeration(alike, most, limits.gap, bound, seconds)
    return max(bound, found.run(_BOXES_PER_EFFORT * limits.effort, cost, attempt, stop))


class _Enumeration:
    """The search: the box of the least bound is next, and its bound is to be raised to a *level*, as a first step.

    Plans are looked for among what is below the level. So a low one, to begin with, leaves little to list, and the
    plans found there make it unnecessary to go far above it.
    """

    def __init__(self, alike: Alike, cost: float, gap: float, bound: float, seconds: float) -> None:
        self.alike, self.most, self.seconds = alike, cost, seconds
        self.pricing = Pricing(alike)
        shared = [(number, float(number)) for number in range(1, _SHARED)] + [(_SHARED, np.inf)]
        numbers = [(0, 0.0), *(shared if alike.share.any() else ())]
        self.cells = [Cells(alike.ranks, least, most) for least, most in numbers]
        self.per_cost = (1 + 1e-6) / (1 + gap) / cost
        self.target = cost * self.per_cost
        self.level = min(self.target, max(bound * (1 + _AIM * gap) / cost, self.target / 2))

    def run(
        self, boxes: int, cost: Callable[[], float], attempt: Callable[[Ints], object], stop: Callable[[], bool]
    ) -> float:
        for _ in range(boxes):
            cells = min(self.cells, key=lambda cells: cells.deciding)
            if stop() or cells.deciding >= self.target:
                break
            while cells.deciding >= self.level:
                self.level = min(self.level * _STEP, self.target)
            counts = self._step(cells)
            if counts is not None:
                attempt(self.alike.original(counts))
                self._lower(cost() * self.per_cost)
        left = min(cells.deciding for cells in self.cells)
        return max(min(self.target, left), 0.0) * self.most * (1 - 1e-9)

    def _step(self, cells: Cells) -> dict[int, int] | None:
        """Price a box of the least bound, or list what is left in it; counts of options to try."""
        box = cells.box()
        self._price(box, closely=False)
        if self.pricing.bound(box)[0] + box.mean >= self.level:
            cells.width = min(2 * cells.width + 1, _WIDEST)
            return None
        if cells.width > _WIDTH:
            cells.width //= 2
            return None
        self._price(box, closely=True)
        found = choose(self.pricing, box, self.level, self.seconds)
        if found.bound >= self.level:
            cells.raised(box, self.level)
            cells.width = _WIDTH
        elif cells.width > 0:
            cells.width //= 2
        else:
            # Where not even a single cell is closed, there is no use in raising others above it.
            self._lower(found.bound)
            cells.raised(box, found.bound)
            cells.width = _WIDTH
        return found.counts

    def _lower(self, target: float) -> None:
        if target < self.target:
            self.target, self.level = target, min(self.level, target)
            for cells in self.cells:
                cells.keep(target)

    def _price(self, box: Box, *, closely: bool) -> None:
        prices = self.pricing.price(box, self.level - box.mean, closely=closely)
        for cells in self.cells:
            cells.learn(prices, self.target)


def choose(pricing: Pricing, box: Box, target: float, seconds: float) -> Chosen:
    """Whether a box has a plan below a target, in whole numbers.

    Args:
        pricing: with prices for the box.
        box: rooms.
        target: of the most load.
        seconds: time limit.
    """
    bound, prices = pricing.bound(box)
    budget = target - box.mean - bound
    if budget <= 0:
        return Chosen(bound + box.mean)
    over = pricing.over(prices, box.high[0])
    if not box.most:
        over = np.where(pricing.alike.share > 0, np.inf, over)
    options = undominated(pricing, np.flatnonzero(over <= budget + 1e-9).tolist())
    sizes = sorted({size for option in options for size in pricing.pieces[option]})
    # Ranks of equal rooms are one class.
    same = len(set(box.high)) == 1
    listed = []
    for room in box.high[:1] if same else box.high:
        found = fillings(sizes, prices.value, room, budget + 1e-9, _MOST_WAYS)
        if found is None:
            return Chosen(bound + box.mean)
        listed.append(found)
    ranks = (sum(pricing.alike.ranks),) if same else pricing.alike.ranks
    return _Whole(pricing, box, options, sizes, listed, ranks).solve(target, bound, seconds)


def fillings(sizes: Sequence[int], value: Floats, room: int, budget: float, most: int) -> list[tuple[int, ...]] | None:
    """The ways to fill a room that cannot have another or a larger piece, and are worth nearly as much as it.

    Args:
        sizes: ascending.
        value: (G + 1,) the value function of a knapsack.
        room: of the rank.
        budget: what a way may be worth less than the room.
        most: ways to list.

    Returns:
        Sizes of each way, descending; None if there are more.
    """
    falling = list(sizes)[::-1]
    larger = [room + GRID, *falling[:-1]]
    worth = value.tolist()
    found: list[tuple[int, ...]] = []
    tries = 0

    def extend(at: int, left: int, spent: float, way: tuple[int, ...], spare: int) -> None:
        """``spare``: how much it takes to make some piece the next larger one."""
        nonlocal tries
        tries += 1
        if worth[room] - spent - worth[left] > budget or tries > _TRIES_PER_WAY * most:
            return
        while at < len(falling) and falling[at] > left:
            at += 1
        if at == len(falling):
            if spare > left:
                found.append(way)
            return
        for next_at in range(at, len(falling)):
            size = falling[next_at]
            gap = min(spare, larger[next_at] - size)
            extend(next_at, left - size, spent + worth[size], (*way, size), gap)

    extend(0, room, 0.0, (), room + GRID)
    return None if tries > _TRIES_PER_WAY * most or len(found) > most else found


def undominated(pricing: Pricing, options: Sequence[int]) -> list[int]:
    """The options than which no other of the table is better in everything that a programme counts."""
    alike = pricing.alike
    limits = alike.rows[list(pricing.limits)]
    pieces = {
        option: sorted((s for s, n in pricing.pieces[option].items() for _ in range(int(n))), reverse=True)
        for option in options
    }
    kept: dict[int, list[int]] = {}

    def better(one: int, other: int) -> bool:
        return (
            pricing.base[one] <= pricing.base[other]
            and alike.share[one] == alike.share[other]
            and len(pieces[one]) <= len(pieces[other])
            and all(mine <= its for mine, its in zip(pieces[one], pieces[other], strict=False))
            and bool((limits[:, one] <= limits[:, other]).all())
        )

    for option in sorted(options, key=lambda o: (pricing.base[o], len(pieces[o]), sum(pieces[o]), o)):
        among = kept.setdefault(int(alike.group[option]), [])
        if not any(better(one, option) for one in among):
            among.append(option)
    return [option for among in kept.values() for option in among]


class _Whole:
    """The integer programme of a box.

    Columns: options, ways, and for each size, how many of its pieces take a larger piece's place. Rows: one per table
    group, one per class of ranks, one per size, then limits.
    """

    def __init__(
        self,
        pricing: Pricing,
        box: Box,
        options: list[int],
        sizes: list[int],
        listed: list[list[tuple[int, ...]]],
        ranks: Sequence[int],
    ) -> None:
        alike = pricing.alike
        self._pricing, self._box, self._options = pricing, box, options
        self._columns = [(kind, way) for kind, found in enumerate(listed) for way in found]
        groups, first = len(alike.sizes), len(alike.sizes) + len(ranks)
        self._lower = [*alike.sizes.astype(float).tolist(), *[-np.inf] * len(ranks), *[0.0] * len(sizes)]
        self._upper = [*alike.sizes.astype(float).tolist(), *map(float, ranks), *[np.inf] * len(sizes)]
        row_of = {size: first + index for index, size in enumerate(sizes)}
        self._entries: list[tuple[int, int, float]] = []
        for column, option in enumerate(options):
            self._entries.append((int(alike.group[option]), column, 1.0))
            self._entries += [(row_of[size], column, -count) for size, count in pricing.pieces[option].items()]
        for column, (kind, way) in enumerate(self._columns, len(options)):
            self._entries.append((groups + kind, column, 1.0))
            self._entries += [(row_of[size], column, float(way.count(size))) for size in set(way)]
        after = len(options) + len(self._columns)
        for index in range(len(sizes)):
            self._entries.append((first + index, after + index, -1.0))
            if index:
                self._entries.append((first + index - 1, after + index, 1.0))
        self._count = after + len(sizes)
        most = alike.sizes[alike.group[options]].astype(float).tolist()
        self._most = [*most, *(float(ranks[kind]) for kind, _ in self._columns), *[np.inf] * len(sizes)]
        self._limit()

    def _limit(self) -> None:
        pricing, alike, box = self._pricing, self._pricing.alike, self._box
        if box.most and len(alike.ranks) > 1:
            self._row((alike.share > 0).astype(np.float64), box.least, box.most)
            if box.apart > 0:
                self._row(alike.share, box.apart * (1 - _SLACK), np.inf)
        for number in pricing.limits:
            self._row(alike.rows[number], -np.inf, float(alike.limits[number]) * (1 + _SLACK))

    def _row(self, values: Floats, low: float, high: float) -> None:
        entries = enumerate(values[self._options].tolist())
        self._entries += [(len(self._lower), column, value) for column, value in entries if value]
        self._lower.append(float(low))
        self._upper.append(float(high))

    def solve(self, target: float, bound: float, seconds: float) -> Chosen:
        mean = self._box.mean
        self._row(self._pricing.base, -np.inf, target - mean + _SLACK)
        solver = self._passed(seconds)
        solver.run()
        status, info = solver.getModelStatus(), solver.getInfo()
        if status == highspy.HighsModelStatus.kInfeasible:
            return Chosen(target)
        # A programme that was stopped has proven no more than this.
        proven = float(info.mip_dual_bound)
        bound = max(bound, proven - _SLACK) if np.isfinite(proven) else bound
        if info.primal_solution_status != _FEASIBLE:
            return Chosen(bound + mean)
        values = np.rint(solver.getSolution().col_value[: len(self._options)]).astype(np.int64).tolist()
        counts = {option: value for option, value in zip(self._options, values, strict=True) if value}
        return Chosen(bound + mean, counts)

    def _passed(self, seconds: float) -> Any:
        solver: Any = highspy.Highs()  # type: ignore[no-untyped-call]
        for name, value in (
            ("output_flag", False),
            ("threads", 1),
            ("random_seed", 0),
            # It takes far longer than the rest, and cuts and reduced costs do as well.
            ("presolve", "off"),
            ("mip_rel_gap", 1e-3),
            ("mip_max_nodes", _NODES),
            ("time_limit", min(seconds, 1e9)),
        ):
            solver.setOptionValue(name, value)
        rows, columns, values = zip(*self._entries, strict=True)
        matrix = coo_matrix((values, (rows, columns)), shape=(len(self._lower), self._count)).tocsr()
        whole = len(self._options) + len(self._columns)
        solver.passModel(
            self._count,
            len(self._lower),
            matrix.nnz,
            highspy.MatrixFormat.kRowwise.value,
            highspy.ObjSense.kMinimize.value,
            0.0,
            np.append(self._pricing.base[self._options], np.zeros(self._count - len(self._options))),
            np.zeros(self._count),
            np.array(self._most),
            np.array(self._lower),
            np.array(self._upper),
            matrix.indptr[:-1].astype(np.int32),
            matrix.indices.astype(np.int32),
            matrix.data,
            (np.arange(self._count) < whole).astype(np.int32),
        )
        return solver

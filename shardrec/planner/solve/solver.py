"""The solver: a proven bound first, then choices of options near it, packed and improved until the gap is closed.

1. :mod:`relax` proves a bound, and finds which balance of "load on every rank" and "load of a rank's pieces" is
promising. 2. For such balances a small integer programme (HiGHS) chooses options under the same rows that prove the
   bound; it knows how many tables take which option, not where they go.
3. The parts are packed and improved (:mod:`packing`), then single tables try other options (:mod:`switch`).
4. What is small and not closed yet goes to HiGHS as a whole (:mod:`exact`), which may also raise the bound.

The search has no random numbers. It ends when the gap is closed or its rounds are used up, or, as the only thing that
depends on the machine, when the clock runs out; the solution says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from time import monotonic

import numpy as np

from shardrec.planner.solve.encode import Encoded, Floats, Ints, encode
from shardrec.planner.solve.exact import solve_exactly
from shardrec.planner.solve.packing import Packing
from shardrec.planner.solve.problem import Place, Problem, Solution, SolveLimits
from shardrec.planner.solve.relax import Interval, Relaxation
from shardrec.planner.solve.switch import switch_options

__all__ = ["solve"]

_ROUNDS = 400
"""Most steps of improving one packing."""
_MERGED = 4e-3
"""Width of the intervals that are priced for whole tables, against their bounds."""
_STUCK = 3e-4
"""Width at which an interval is not cut further."""
_STEP = 1e-3
"""Least distance of two values of c for which options are chosen."""
_WEIGHTS = (0.1,)
"""Of the pieces' load, where choices are to leave room."""
_ROUNDED = ((1.0, 0.1), (1.0, 1.0), (0.5, 1.0))
"""Limits on the size of a piece, against c, and weights of the pieces' load, for the first plans."""
_POLISHED = 20
_SWITCHES_PER_EFFORT = 5
_NODES_PER_EFFORT = 10
_MEMORY_SHARES = (1.0, 0.99, 0.97)
"""Parts of the capacity that the choice of options may use: what fits on the whole may not fit rank by rank."""
_FILLS = ((0.0, 0.0), (0.0, 0.5), (0.3, 0.5), (1.0, 0.9))
"""Ways to pack: how much bytes count in the choice of the rank, and in the order."""


def solve(problem: Problem, limits: SolveLimits | None = None) -> Solution | None:
    """A good assignment and a proven bound.

    Args:
        problem: each table with at least one option.
        limits: when to stop.

    Returns:
        The best assignment found; None if none was found that fits memory.
    """
    if not problem.tables:
        idle = tuple(0.0 for _ in problem.capacity)
        return Solution(choice={}, places={}, loads=(0.0,) * problem.ranks, memory=(idle,) * problem.ranks, bound=0.0)
    return _Search(encode(problem), limits or SolveLimits()).run()


class _Search:
    def __init__(self, encoded: Encoded, limits: SolveLimits) -> None:
        self.encoded = encoded
        self.limits = limits
        self.begin = monotonic()
        self.relaxation = Relaxation(encoded)
        self.bound = 0.0
        self.accuracy = max(2e-5, limits.gap / 2)
        self.intervals: list[Interval] = []
        self.rooms: list[float] = []
        self.pool: list[Packing] = []
        self.best: Packing | None = None
        self.timed_out = False
        self.tried: set[bytes] = set()

    def run(self) -> Solution | None:
        self.intervals = self.relaxation.intervals(self.accuracy)
        self.bound = self.intervals[0].bound
        if not np.isfinite(self.bound):
            return None
        heapify(self.intervals)
        self._round()
        self._search()
        self._polish()
        if not self._closed() and self._time_left() > 0.5:
            exact = solve_exactly(
                self.encoded,
                self.best,
                self.bound,
                gap=self.limits.gap,
                nodes=_NODES_PER_EFFORT * self.limits.effort,
                seconds=self._time_left(),
            )
            if exact is not None:
                self.bound = max(self.bound, exact.bound)
                self.timed_out |= exact.timed_out
                if exact.packing is not None:
                    self._keep(exact.packing)
        return None if self.best is None else self._solution(self.best)

    def _round(self) -> None:
        """Quick first plans: fractional choices for the deciding c, rounded table by table.

        Smaller pieces cost more in all and pack better, so the choices are made with several limits on their size.
        """
        room = next((each.high for each in self.intervals if np.isfinite(each.high)), 2 * self.intervals[0].low)
        for piece_share, weight in _ROUNDED:
            for memory_share in _MEMORY_SHARES:
                if self._closed() or self._out_of_time():
                    return
                found = self.relaxation.least_base(
                    room, weight=weight, memory_share=memory_share, piece_share=piece_share
                )
                if found is None or found.values is None or self._try(self._rounded(found.values)):
                    break

    def _rounded(self, values: Floats) -> Ints:
        """Whole counts: in each group, the largest remainders are rounded up."""
        counts = np.floor(values + 1e-9).astype(np.int64)
        for size, span in zip(self.encoded.sizes, self.encoded.group_options, strict=True):
            part = slice(span.start, span.stop)
            order = np.argsort(counts[part] - values[part], kind="stable")
            counts[part][order[: int(size - counts[part].sum())]] += 1
        return counts

    def _search(self) -> None:
        """Price the deciding interval for whole tables, pack what was chosen, cut it; until the gap is closed."""
        proven, stuck = self.bound, np.inf
        self.intervals = self.relaxation.merged(self.intervals, _MERGED)
        heapify(self.intervals)
        half = self._time_left() / 2  # of no effect without a time limit
        for _ in range(self.limits.effort):
            first = self.intervals[0]
            self.bound = max(proven, self.bound, min(stuck, first.bound))
            if self._closed() or self._out_of_time() or not np.isfinite(first.bound):
                return
            if self.best is not None and (first.bound >= self.best.cost or self._time_left() < half):
                return
            heappop(self.intervals)
            if first.whole or np.isinf(first.high):
                if first.high - first.low <= _STUCK * first.bound:
                    # The rows allow it and packing does not find it: nothing here can raise the bound further.
                    stuck = min(stuck, first.bound)
                    heappush(self.intervals, Interval(np.inf, first.low, first.high, np.inf))
                    continue
                for part in self.relaxation.halves(first):
                    heappush(self.intervals, part)
                continue
            cutoff = np.inf if self.best is None else self.best.cost
            priced, values = self.relaxation.whole(first, cutoff, self._share_of_time())
            heappush(self.intervals, priced)
            if values is None or not self._new_room(first.high):
                continue
            if not self._try(values.astype(np.int64)):
                self._choose_with_slack(first.high, _MEMORY_SHARES)
            elif not self._closed():
                self._choose_with_slack(first.high, (1.0,))

    def _new_room(self, room: float) -> bool:
        """Whether no c as near as this was tried."""
        if any(abs(room - other) < _STEP * other for other in self.rooms):
            return False
        self.rooms.append(room)
        return True

    def _choose_with_slack(self, room: float, memory_shares: Sequence[float]) -> None:
        """Choices that put a little more on every rank where that leaves the pieces room."""
        for share in memory_shares:
            for weight in _WEIGHTS:
                found = self.relaxation.least_base(
                    room, whole=True, weight=weight, memory_share=share, seconds=self._share_of_time()
                )
                if found is not None and found.values is not None:
                    self._try(found.values.astype(np.int64))
            if self.best is not None:
                return

    def _try(self, counts: Ints) -> bool:
        """Pack a choice of options; whether it fits memory."""
        key = counts.tobytes()
        if key in self.tried:
            return True
        self.tried.add(key)
        encoded = self.encoded
        demand: dict[int, int] = {}
        for option in np.flatnonzero(counts):
            for block, count in encoded.option_blocks[option]:
                demand[block] = demand.get(block, 0) + count * int(counts[option])
        best: Packing | None = None
        for memory_weight, memory_order in _FILLS:
            packing = Packing(encoded, counts)
            if packing.fits() and packing.fill(demand.items(), memory_weight, memory_order):
                packing.improve(_ROUNDS, self.bound)
                if best is None or packing.cost < best.cost:
                    best = packing
                    self._keep(packing)
                if self._closed():
                    break
        if best is not None:
            self.pool.append(best)
        return best is not None

    def _keep(self, packing: Packing) -> None:
        if self.best is None or packing.cost < self.best.cost:
            self.best = packing

    def _polish(self) -> None:
        """Let single tables take other options, in the best packings of the search."""
        self.pool.sort(key=lambda packing: packing.cost)
        switches = _SWITCHES_PER_EFFORT * self.limits.effort
        for packing in self.pool[:_POLISHED]:
            while True:
                if self._closed() or self._out_of_time() or not switches:
                    return
                switches -= 1
                better = switch_options(packing)
                if better is None:
                    break
                better.improve(_ROUNDS, self.bound)
                packing = better
                self._keep(better)

    def _closed(self) -> bool:
        return self.best is not None and self.best.cost <= self.bound * (1 + self.limits.gap)

    def _share_of_time(self) -> float:
        return max(0.1, self._time_left() / 4)

    def _time_left(self) -> float:
        return self.limits.seconds - (monotonic() - self.begin)

    def _out_of_time(self) -> bool:
        if self._time_left() <= 0:
            self.timed_out = True
        return self.timed_out

    def _solution(self, packing: Packing) -> Solution:
        encoded = self.encoded
        left = {block: [p for p, n in enumerate(at) for _ in range(int(n))] for block, at in packing.at.items()}
        choice: dict[str, int] = {}
        places: dict[str, tuple[Place, ...]] = {}
        for names, span in zip(encoded.groups, encoded.group_options, strict=True):
            options = [option for option in span for _ in range(int(packing.counts[option]))]
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
            loads=tuple(packing.loads.tolist()),
            memory=tuple(map(tuple, packing.memory.tolist())),
            bound=min(self.bound, packing.cost),
            timed_out=self.timed_out,
        )

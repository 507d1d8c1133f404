"""The solver: a proven bound first, then choices of options near it, packed and improved until the gap is closed.

With E the load on every rank and c the most that the pieces of one come to, the cost is E + c; all of it goes by c.

1. :mod:`relax` proves a bound, and finds which values of c are promising. What is small goes to HiGHS as a whole
   (:mod:`exact`); where few tables fill the ranks, all combinations of their options are gone through (:mod:`combine`).
2. Where many tables share many ranks, or nearly all of the memory, ranks are filled in time and memory at once
   (:mod:`tight`).
3. :mod:`rebuild` improves the best plans by taking a few tables off and putting them back.
4. On many hosts, sets of parts that fit a host give the bound and the plan (:mod:`hostsearch`). On one or two, all that
   a better plan could have is listed (:mod:`enumerate`): a plan of it, or a proof.
5. Where that leaves a gap, options and ways to fill a rank are chosen together (:mod:`patterns`); integer programmes
   raise the bound further, and what they choose is packed.

The search ends when the gap is closed or its rounds are used up, or, as the only thing that depends on the machine,
when the clock runs out; the solution says so. The clock counts processor time, so that a busy machine makes a search
longer, not worse.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from heapq import heapify, heappop, heappush

import numpy as np

from shardrec.planner.solve.clock import AT_ONCE
from shardrec.planner.solve.combine import combined
from shardrec.planner.solve.encode import Encoded, Floats, Ints, encode
from shardrec.planner.solve.enumerate import enumerated
from shardrec.planner.solve.exact import solve_exactly
from shardrec.planner.solve.hostsearch import HostSearch
from shardrec.planner.solve.incumbent import Incumbent
from shardrec.planner.solve.packing import Packing, rounded, spread
from shardrec.planner.solve.patterns import PatternProgramme
from shardrec.planner.solve.problem import Problem, Solution, SolveLimits
from shardrec.planner.solve.rebuild import Rebuilder
from shardrec.planner.solve.relax import Interval, Relaxation
from shardrec.planner.solve.sizes import host_blocks
from shardrec.planner.solve.tight import many_tables, tight_plans

__all__ = ["solve"]

_MERGED = 4e-3
"""Width of the intervals that are priced for whole tables, against their bounds."""
_STUCK = 3e-4
"""Width at which an interval is not cut further."""
_STEP = 1e-3
"""Least distance of two values of c for which options are chosen."""
_WEIGHT = 0.1
"""Of the pieces' load, where choices are to leave room."""
_ROUNDED = ((1.0, 0.1), (1.0, 1.0), (0.5, 1.0))
"""Limits on the size of a piece, against c, and weights of the pieces' load, for the first plans."""
_ROOMS = (1.0, 1.002, 1.005, 1.01, 1.02, 1.035)
"""Of the deciding c: rooms for which ways to fill a rank are chosen."""
_SHRUNK = (0.97, 0.985, 0.995)
"""Of the best cost: what is aimed at where a part of the best plan is kept."""
_KINDS_OF_ROOMS = 60
_PATTERN_NODES = 60
_DIVES_PER_EFFORT = 1
_EFFORT_PER_PROGRAMME = 5
_REBUILT = 3
"""Of the best plans, or times that the best is, improved."""
_EFFORT_PER_ROOM = 10
_REBUILDS_PER_EFFORT = 100
_NODES_PER_EFFORT = 10
_COMBINATIONS_PER_EFFORT = 300
_ENUMERATED = 100
"""Most tables whose options are listed."""
_MEMORY_SHARES = (1.0, 0.99, 0.97)
"""Parts of the capacity that the choice of options may use: what fits on the whole may not fit rank by rank."""


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


class _Search(Incumbent):
    def __init__(self, encoded: Encoded, limits: SolveLimits) -> None:
        super().__init__(encoded, limits)
        self.relaxation = Relaxation(encoded)
        few = encoded.sizes.sum() <= _ENUMERATED
        # With few tables, programmes that prove more come later, and these take their time.
        self.accuracy = max(2e-5, limits.gap / (2 if few else 40))
        self.intervals: list[Interval] = []
        self.rooms: list[float] = []
        self.seed = 0
        local = host_blocks(encoded)[0]
        self.listed = few and (local == 1 or encoded.ranks <= 2 * local)

    def run(self) -> Solution | None:
        self.intervals = self.relaxation.intervals(self.accuracy)
        self.bound = self.intervals[0].bound
        if not np.isfinite(self.bound):
            return None
        heapify(self.intervals)
        self._round()
        if self.best is None:
            self._try(spread(self.encoded))
        if not self._exact():
            self._fill_jointly(0.6)
            self._combine()
            if HostSearch.applies(self.encoded, self.best):
                self._rebuild(0.15)
                self._by_hosts(0.85)
            elif self.listed:
                self._rebuild(0.1)
                self._enumerate(0.93)
            self._fill()
            self._rebuild(0.35)
            self._refill()
            if not self.listed or self.best is None:
                # Lists prove more, in less time.
                self._search()
            self._rebuild(1.0)
        return None if self.best is None else self.best.solution(self.bound, self.timed_out)

    def _fill_jointly(self, share: float) -> None:
        """Fill ranks in time and memory at once, where there are many tables, for a part of the time that is left."""
        if self._closed() or self._out_of_time() or not many_tables(self.encoded):
            return
        until = self._after(share)
        first, stop = self.intervals[0], partial(self._only, until)
        for packing in tight_plans(self.encoded, self.relaxation, first, self.limits, stop):
            self._improve(packing)
            if self._closed():
                return

    def _enumerate(self, share: float) -> None:
        """List all that a better plan could have, for a part of the time that is left."""
        if self.listed and self.best and not self._closed() and not self._out_of_time():
            stop = partial(self._only, self._after(share))
            rows = self.relaxation.limits()
            self.bound = enumerated(
                self.encoded, rows, self.bound, self.limits, self._cost, self._try_placed, self.clock, stop
            )

    def _combine(self) -> None:
        """Go through all the combinations of options, where few tables fill the ranks."""
        if self._closed() or self._out_of_time():
            return
        until = self._after(0.95)
        most = _COMBINATIONS_PER_EFFORT * self.limits.effort
        found = combined(self.encoded, self.best, self.limits.gap, most, partial(self._only, until))
        self.bound = max(self.bound, found.bound)
        if found.packing is not None:
            self._add(found.packing)

    def _exact(self) -> bool:
        """Solve the problem as a whole, if it is small; whether that leaves nothing to do."""
        if self._closed() or self._out_of_time():
            return False
        nodes, left = _NODES_PER_EFFORT * self.limits.effort, self._time_left()
        exact = solve_exactly(self.encoded, self.best, self.bound, gap=self.limits.gap, nodes=nodes, seconds=left)
        if exact is None:
            return False
        self.bound = max(self.bound, exact.bound)
        self.timed_out |= exact.timed_out
        if exact.packing is not None:
            self._add(exact.packing)
        return exact.finished

    def _by_hosts(self, share: float) -> None:
        """Bound and plans by sets of parts that fit a host, for a part of the time that is left."""
        if self.best is None or self._closed() or self._out_of_time():
            return
        until = self._after(share)
        limits, value = self.relaxation.limits(), self.relaxation.value
        search = HostSearch(self.encoded, self.best, self.intervals, limits, self.limits.gap, value, self.clock)
        for packing in search.run(self.limits.effort, partial(self._only, until), self._time_left):
            self._add(packing)
        self.bound = max(self.bound, min(search.bound, self.best.cost))

    def _fill(self) -> None:
        """Choose options and ways to fill ranks together, near the deciding c."""
        first = self.intervals[0]
        if np.isinf(first.high) or not len(self.encoded.piece_load):
            return
        until = self._time_left() * 0.55
        for factor in _ROOMS[: max(2, self.limits.effort // _EFFORT_PER_ROOM)]:
            if self._closed() or self._out_of_time() or self._time_left() < until:
                return
            rooms = np.full(self.encoded.ranks, first.high * factor)
            self._filled(rooms, self.encoded.sizes, None)

    def _refill(self) -> None:
        """The same for the best plan, where parts of several pieces stay in their places."""
        for factor in _SHRUNK:
            if self.best is None or self._closed() or self._out_of_time():
                return
            kept = self.best.bound_to_places()
            if not kept.at:
                return
            aim = max(self.best.cost * factor, self.bound)
            rooms = np.maximum(aim - self.best.base - (kept.loads - kept.base), 0.0)
            # Few kinds of rooms make few patterns.
            step = float(rooms.max()) / _KINDS_OF_ROOMS
            if step > 0:
                placed = np.bincount(self.encoded.option_group, kept.counts, len(self.encoded.groups))
                tables = self.encoded.sizes - placed.astype(np.int64)
                self._filled(np.floor(rooms / step) * step, tables, kept)

    def _filled(self, rooms: Floats, tables: Ints, kept: Packing | None) -> None:
        if rooms.max() <= 0 or not tables.any():
            return
        programme = PatternProgramme(self.encoded, rooms, tables)
        cutoff = np.inf if self.best is None else max(self.best.cost - float(rooms.max()), 0.0)
        if kept is not None:
            cutoff = np.inf
        until = self._time_left() * 0.7
        filled = programme.solve(
            cutoff,
            dives=_DIVES_PER_EFFORT * self.limits.effort,
            nodes=_PATTERN_NODES,
            stop=partial(self._only, until),
            seconds=max(0.1, self._time_left() / 10),
        )
        if filled.counts is None:
            return
        packing = programme.packed(filled, kept)
        if packing is not None:
            self._improve(packing)

    def _rebuild(self, share: float) -> None:
        """Take tables off and put them back, in the best plans."""
        self.pool.sort(key=lambda packing: packing.cost)
        until = self._after(share)
        starts = [packing for packing in self.pool[:_REBUILT] if packing.cost <= 1.1 * self.pool[0].cost]
        for number in range(_REBUILT if starts else 0):
            if self._closed() or self._out_of_time():
                return
            stop_at = until + (self._time_left() - until) * (_REBUILT - 1 - number) / (_REBUILT - number)
            stop = partial(self._only, stop_at if np.isfinite(stop_at) else -np.inf)
            # Which plan a search ends at is much a matter of chance: several find more than one.
            searches = [partial(self._rebuilt, starts[number % len(starts)], stop) for _ in range(AT_ONCE)]
            for found in self.clock.together([partial(one, seed) for seed, one in enumerate(searches, self.seed)]):
                if found is not None:
                    self._add(found)
            self.seed += AT_ONCE

    def _rebuilt(self, start: Packing, stop: Callable[[], bool], seed: int) -> Packing | None:
        rounds = _REBUILDS_PER_EFFORT * self.limits.effort // _REBUILT
        search = Rebuilder(self.encoded, self.relaxation.value, seed=seed)
        return search.run(start, rounds, stop, self.bound * (1 + self.limits.gap))

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
                if found is None or found.values is None or self._try(rounded(self.encoded, found.values)):
                    break

    def _search(self) -> None:
        """Price the deciding interval for whole tables, pack what was chosen, cut it; until the gap is closed."""
        proven, stuck = self.bound, np.inf
        self.intervals = self.relaxation.merged(self.intervals, _MERGED)
        heapify(self.intervals)
        half = self._time_left() / 2  # of no effect without a time limit
        for _ in range(max(3, self.limits.effort // _EFFORT_PER_PROGRAMME)):
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
            seconds = self._share_of_time()
            found = self.relaxation.least_base(room, whole=True, weight=_WEIGHT, memory_share=share, seconds=seconds)
            if found is not None and found.values is not None:
                self._try(found.values.astype(np.int64))
            if self.best is not None:
                return

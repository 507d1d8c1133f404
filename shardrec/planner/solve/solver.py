"""The solver: a proven bound first, then choices of options near it, packed and improved until the gap is closed.

With E the load on every rank and c the most that the pieces of one come to, the cost is E + c; all of it goes by c.

1. :mod:`relax` proves a bound, and finds which values of c are promising.
2. For those, :mod:`patterns` raises the bound, and chooses options and ways to fill a rank together, in whole numbers.
3. :mod:`rebuild` improves the best plans by taking a few tables off and putting them back.
4. Where that leaves a gap, integer programmes over "how many tables take which option" raise the bound further, and
   their choices are packed (:mod:`packing`).
5. What is small goes to HiGHS as a whole (:mod:`exact`) before all that, which may also raise the bound.

The search ends when the gap is closed or its rounds are used up, or, as the only thing that depends on the machine,
when the clock runs out; the solution says so. The clock counts processor time, so that a busy machine makes a search
longer, not worse.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from heapq import heapify, heappop, heappush
from time import process_time

import numpy as np

from shardrec.planner.solve.curve import Curve
from shardrec.planner.solve.encode import Encoded, Floats, Ints, encode
from shardrec.planner.solve.exact import solve_exactly
from shardrec.planner.solve.packing import Packing, spread
from shardrec.planner.solve.patterns import PatternProgramme
from shardrec.planner.solve.problem import Place, Problem, Solution, SolveLimits
from shardrec.planner.solve.rebuild import Rebuilder
from shardrec.planner.solve.relax import Interval, Relaxation

__all__ = ["solve"]

_ROUNDS = 400
"""Most steps of improving one packing."""
_MERGED = 4e-3
"""Width of the intervals that are priced for whole tables, against their bounds."""
_COARSE = 0.01
"""Width of the intervals that are priced by ways to fill hosts and ranks."""
_STUCK = 3e-4
"""Width at which an interval is not cut further."""
_STEP = 1e-3
"""Least distance of two values of c for which options are chosen."""
_WEIGHTS = (0.1,)
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
"""Plans that are improved."""
_EFFORT_PER_RAISE = 4
_EFFORT_PER_ROOM = 10
_REBUILDS_PER_EFFORT = 25
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
        self.begin = process_time()
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
        if self.best is None:
            self._try(spread(self.encoded))
        if self._exact():
            return None if self.best is None else self._solution(self.best)
        self._raise(0.1)
        self._fill()
        self._rebuild(0.35)
        self._refill()
        self._lift(0.7)
        self._search()
        self._rebuild(1.0)
        return None if self.best is None else self._solution(self.best)

    def _exact(self) -> bool:
        """Solve the problem as a whole, if it is small; whether that leaves nothing to do."""
        if self._closed() or self._out_of_time():
            return False
        exact = solve_exactly(
            self.encoded,
            self.best,
            self.bound,
            gap=self.limits.gap,
            nodes=_NODES_PER_EFFORT * self.limits.effort,
            seconds=self._time_left(),
        )
        if exact is None:
            return False
        self.bound = max(self.bound, exact.bound)
        self.timed_out |= exact.timed_out
        if exact.packing is not None:
            self._keep(exact.packing)
            self.pool.append(exact.packing)
        return exact.finished

    def _raise(self, share: float) -> None:
        """Price the deciding intervals by patterns, for a part of the time that is left."""
        until = self._time_left() * (1 - share)
        # Coarse at first: pricing an interval takes long, and holds for all of it.
        self.intervals = self.relaxation.merged(self.intervals, _COARSE)
        heapify(self.intervals)
        for _ in range(max(2, self.limits.effort // _EFFORT_PER_RAISE)):
            first = self.intervals[0]
            self.bound = max(self.bound, min(first.bound, self.best.cost if self.best else np.inf))
            if self._closed() or self._out_of_time() or self._time_left() < until or np.isinf(first.high):
                return
            if self.best is not None and first.bound >= self.best.cost:
                return
            heappop(self.intervals)
            raised = self.relaxation.strengthened(first, np.inf if self.best is None else self.best.cost)
            if raised.base <= first.base + _STUCK * first.bound and first.high - first.low > 2 * _STUCK * first.bound:
                for part in self.relaxation.halves(raised):
                    heappush(self.intervals, part)
            else:
                heappush(self.intervals, raised)
                if raised.bound <= first.bound + 1e-5 * first.bound:
                    return

    def _lift(self, share: float) -> None:
        """Raise the curve of bounds by room, for a part of the time that is left."""
        if self.best is None or self._closed() or self.best.cost <= 0:
            return
        until = self._time_left() * (1 - share) if np.isfinite(self._time_left()) else -np.inf
        curve = Curve(self.encoded, self.best.cost, self.relaxation.limits())
        target = self.best.cost / (1 + self.limits.gap) * (1 + 1e-6)
        self.bound = max(self.bound, curve.lift(target, self.limits.effort, partial(self._only, until)))

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
                self._filled(np.floor(rooms / step) * step, self._tables_but(kept), kept)

    def _tables_but(self, kept: Packing) -> Ints:
        placed = np.bincount(self.encoded.option_group, kept.counts, len(self.encoded.groups))
        return self.encoded.sizes - placed.astype(np.int64)

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
            packing.improve(_ROUNDS, self.bound)
            self.pool.append(packing)
            self._keep(packing)

    def _rebuild(self, share: float) -> None:
        """Take tables off and put them back, in the best plans."""
        self.pool.sort(key=lambda packing: packing.cost)
        until = self._time_left() * (1 - share) if np.isfinite(self._time_left()) else 0.0
        starts = [packing for packing in self.pool[:_REBUILT] if packing.cost <= 1.1 * self.pool[0].cost]
        for number, start in enumerate(starts):
            if self._closed() or self._out_of_time():
                return
            left = self._time_left()
            stop_at = left - (left - until) / (len(starts) - number) if np.isfinite(left) else 0.0
            found = Rebuilder(self.encoded, self.relaxation.value, seed=number).run(
                start,
                _REBUILDS_PER_EFFORT * self.limits.effort // len(starts),
                partial(self._only, stop_at),
                self.bound * (1 + self.limits.gap),
            )
            if found is not None:
                self.pool.append(found)
                self._keep(found)

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

    def _closed(self) -> bool:
        return self.best is not None and self.best.cost <= self.bound * (1 + self.limits.gap)

    def _share_of_time(self) -> float:
        return max(0.1, self._time_left() / 4)

    def _time_left(self) -> float:
        return self.limits.seconds - (process_time() - self.begin)

    def _only(self, seconds: float) -> bool:
        """Whether no more than so many seconds are left."""
        return self._time_left() <= seconds

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

"""The solver: a proven bound first, then choices of options near it, packed and improved until the gap is closed.

With E the load on every rank and c the most that the items of one come to, the makespan is E + c. All of it goes by c.

1. :mod:`relax` proves a bound, and finds which values of c are promising. What its linear programs choose there is
   rounded, packed (:mod:`packing`) and gives the first plans. MULTIFIT (:mod:`rebuild`) gives others.
2. Where none fits memory, :mod:`rebuild` moves items until one does, with the bytes of a rank in the place of its load.
3. What is small goes to HiGHS as a whole (:mod:`exact`).
4. :mod:`rebuild` improves the best plans by taking a few tables off and putting them back.

The search ends when the gap is closed or its rounds are used up, or, as the only thing that depends on the machine,
when its CPU-time budget is used up. The solution says so. A busy machine makes a search longer, not worse.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from time import thread_time

import numpy as np

from shardrec.planner.solve.encode import Encoded, Ints, encode
from shardrec.planner.solve.exact import solve_exactly
from shardrec.planner.solve.packing import Packing, compact, demand, rounded
from shardrec.planner.solve.problem import FIRST_PLAN, Problem, Solution, SolveLimits
from shardrec.planner.solve.rebuild import Rebuilder, by_memory
from shardrec.planner.solve.relax import Relaxation

_BOUNDING = 0.25
"""Share of the time, where it is limited, after which the bound is not raised further."""
_STARTING = 0.25
"""Share of the time that is left then, after which no other first plan is made."""
_ROUNDED = ((1.0, 0.1), (1.0, 1.0), (0.5, 1.0))
"""Limits on the size of an item, against c, and weights of the items' load, for the first plans."""
_MANY_GROUPS = 3000
"""Tables that differ, beyond which no linear programs are solved."""
_ITEM_SHARES = (1.0, 0.3, 0.1, 0.03, 0.01)
"""Of the capacity and the budget, the most for an item, then: small ones pack well and take more in all."""
_FILLS = ((0.0, 0.0), (0.0, 0.5), (0.3, 0.5), (1.0, 0.9))
"""Ways to pack, the next where one does not fit memory: how much bytes count for the rank, and in the order."""
_BUDGETS = (1.0, 1.005, 1.01, 1.02, 1.05, 1.1, 1.25, 1.5, 2.0)
"""Of the deciding c: budgets for which options are chosen. The bound is weak where few tables fill the ranks."""
_POPULATIONS = (8, 4, 2, 2)
"""Plans that are improved together, in one phase after the other. Each phase has the same number of proposals."""
_REPAIRED = 4
"""Packings that are repaired together."""
_SOFT = 4
"""One search in this number may exceed the memory on its way: if memory is tight, other searches find little."""
_PROPOSALS_PER_EFFORT = 1500
_NODES_PER_EFFORT = 10


def solve(problem: Problem, limits: SolveLimits | None = None) -> Solution | None:
    """A good assignment and a proven bound.

    Returns:
        The best assignment found. None if none was found that fits memory. A time limit is exceeded until there is one.
    """
    if not problem.tables:
        idle = tuple(0.0 for _ in problem.capacity)
        return Solution(choice={}, places={}, loads=(0.0,) * problem.ranks, memory=(idle,) * problem.ranks, bound=0.0)
    encoded = encode(problem)
    search = _Search(encoded, limits or SolveLimits())
    solution = search.run()
    if solution is None and search.timed_out:  # before there was a first plan
        solution = _Search(encoded, FIRST_PLAN).run()
        return solution and replace(solution, timed_out=True, exhausted=False)
    return solution


class _Search:
    def __init__(self, encoded: Encoded, limits: SolveLimits) -> None:
        self.encoded, self.limits = encoded, limits
        self.start = thread_time()
        self.bound = 0.0
        self.pool: list[Packing] = []
        self.best: Packing | None = None
        self.timed_out = False
        self.budget = 0.0  # the deciding c
        self.search: Rebuilder | None = None

    def run(self) -> Solution | None:
        if len(self.encoded.groups) > _MANY_GROUPS:
            self._start_many()
        else:
            self._start()
        if not np.isfinite(self.bound):
            return None
        if self.best is None:
            self._multifit()
        if self.best is None and not self._out_of_time():
            self._repair()
        if not self._exact():
            self._rebuild()
        closed = self._closed()
        timed_out = self.timed_out or (not closed and self._out_of_time())
        if self.best is None:
            return None
        # Unseen otherwise: the search ends at the bound, and the report has the lower of the two.
        if self.bound > self.best.cost * (1 + 1e-6):
            warnings.warn(
                f"the bound on plans' costs is {self.bound}, and a plan costs {self.best.cost}: this is a fault of "
                "shardrec. Report the tables and the topology, and take the plan for one whose gap is not known",
                RuntimeWarning,
                stacklevel=2,
            )
        solution = self.best.solution(self.bound)
        return replace(solution, timed_out=timed_out, exhausted=not closed and not timed_out)

    def _start(self) -> None:
        """The bound, and first plans at budgets near to the deciding one."""
        relaxation = Relaxation(self.encoded)
        stop = partial(self._only, self._time_left() * (1 - _BOUNDING))
        intervals = relaxation.intervals(max(2e-5, self.limits.gap / 40), stop)
        self.bound = intervals[0].bound
        if not np.isfinite(self.bound):
            return
        self.budget = next((each.high for each in intervals if np.isfinite(each.high)), 2 * intervals[0].low)
        stop = partial(self._only, self._time_left() * (1 - _STARTING))
        for factor in _BUDGETS:
            self._round(relaxation, self.budget * factor, stop)

    def _start_many(self) -> None:
        """Where linear programs over all tables take minutes: the ranks' mean load, and options of little work."""
        encoded = self.encoded
        least = np.minimum.reduceat(encoded.total[:, 0], encoded.starts)
        self.budget = self.bound = float(least @ encoded.sizes) / encoded.ranks * (1 - 1e-9)
        for share in _ITEM_SHARES:
            if self._time_left() > 0:
                self._try(compact(encoded, share, self.bound))

    def _round(self, relaxation: Relaxation, budget: float, stop: Callable[[], bool]) -> None:
        """Quick first plans: fractional choices for a budget c, rounded table by table.

        Smaller items cost more in all and pack better, so the choices are made with several limits on their size.
        """
        for item_share, weight in _ROUNDED:
            if self._closed() or stop():
                return
            outcome = relaxation.least_base(budget, weight=weight, item_share=item_share)
            if outcome.values is not None:
                self._try(rounded(self.encoded, outcome.values))

    def _try(self, counts: Ints) -> None:
        """Pack a choice of options, if it fits memory."""
        for memory_weight, memory_order in _FILLS:
            packing = Packing(self.encoded, counts)
            if packing.fits() and packing.fill(demand(self.encoded, counts).items(), memory_weight, memory_order):
                self._add(packing)
                return

    def _multifit(self) -> Rebuilder:
        """First plans that take options as they fit time and memory."""
        if self.search is None:
            self.search = Rebuilder(self.encoded)
            stop = partial(self._only, self._time_left() * (1 - _STARTING))
            for packing in self.search.multifit(self.budget, lambda: self._closed() or stop()):
                self._add(packing)
        return self.search

    def _repair(self) -> None:
        """A first plan where tables could not be packed: the memory of the fullest rank is lowered."""
        search = Rebuilder(by_memory(self.encoded))
        stop = partial(self._only, self._time_left() / 2)
        starts = _best_of(list(search.multifit(1.0, stop)), _REPAIRED)
        if starts:
            most = _PROPOSALS_PER_EFFORT * self.limits.effort
            repaired = search.run(starts, most, stop, floor=1.0)
            best = min(
                (improvement or start for improvement, start in zip(repaired, starts, strict=True)),
                key=lambda each: each.cost,
            )
            # The same options and places, with other sizes of the gangs.
            packing = Packing.fitting(self.encoded, best.counts, best.gangs)
            if packing is not None:
                self._add(packing)

    def _exact(self) -> bool:
        """Solve the problem as a whole, if it is small. Whether that leaves nothing to do."""
        if self._closed() or self._out_of_time():
            return False
        nodes, left = _NODES_PER_EFFORT * self.limits.effort, self._time_left()
        exact = solve_exactly(self.encoded, self.best, self.bound, gap=self.limits.gap, nodes=nodes, seconds=left)
        if exact is None:
            return False
        packing, outcome = exact
        self.bound = max(self.bound, outcome.bound)
        self.timed_out |= outcome.timed_out
        if packing is not None:
            self._add(packing)
        return outcome.finished

    def _rebuild(self) -> None:
        """Take tables off and put them back, in the best plans: fewer in each phase, with more proposals for each."""
        if not self.pool or self._closed() or self._out_of_time():
            return
        search = self._multifit()
        for phase, size in enumerate(_POPULATIONS):
            if self._closed() or self._out_of_time():
                return
            starts = _best_of(self.pool, size)
            most = _PROPOSALS_PER_EFFORT * self.limits.effort // len(_POPULATIONS)
            end = self._time_left() * (1 - 1 / (len(_POPULATIONS) - phase))
            each = search.run(
                starts,
                most,
                partial(self._only, end),
                floor=self.bound * (1 + self.limits.gap),
                seed=phase,
                soft=[number % _SOFT == _SOFT - 1 for number in range(size)],
            )
            self.pool = []
            for start, improved in zip(starts, each, strict=True):
                self._add(improved or start)

    def _add(self, packing: Packing) -> None:
        """One more of those to improve. The best so far, if it is."""
        self.pool.append(packing)
        if self.best is None or packing.cost < self.best.cost:
            self.best = packing

    def _closed(self) -> bool:
        return self.best is not None and self.best.cost <= self.bound * (1 + self.limits.gap)

    def _time_left(self) -> float:
        return self.limits.seconds - (thread_time() - self.start)

    def _only(self, seconds: float) -> bool:
        """Whether at most this number of seconds is left. False without a time limit."""
        return self.limits.seconds < np.inf and self._time_left() <= seconds

    def _out_of_time(self) -> bool:
        if self._time_left() <= 0:
            self.timed_out = True
        return self.timed_out


def _best_of(packings: list[Packing], count: int) -> list[Packing]:
    """At most ``count`` packings with the least cost, of different costs. The same ones again where there are fewer."""
    different = {packing.cost: packing for packing in packings}
    best = [different[cost] for cost in sorted(different)]
    return [best[number % len(best)] for number in range(count)] if best else []

"""Bound and plans by hosts: the room that decides is priced; where that is of no use, cases and whole numbers follow.

See :mod:`hosts` for the programme. A bound for a room holds for all below it: so one that is a little above the room
that decides is priced first, the more the further there is to go.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from itertools import count

import numpy as np

from shardrec.planner.solve.encode import Encoded, Floats
from shardrec.planner.solve.hosts import GRID, Hosts
from shardrec.planner.solve.inside import Inside
from shardrec.planner.solve.packing import Packing
from shardrec.planner.solve.relax import Interval
from shardrec.planner.solve.rows import Rows
from shardrec.planner.solve.sizes import host_blocks

__all__ = ["HostSearch"]

Counts = dict[float, tuple[float, float]]

_SMALL = 0.1
"""Part of the cost up to which a part of a host counts as free pieces."""
_KINDS = 300
_HOSTS = 4
"""Least number of hosts: on fewer, the other ways are better."""
_NEAR = 3
"""Steps between rooms for which plans are looked for."""
_AIMS = (0.97, 1.0)
"""Of the best cost: what plans are hoped for. The less, the sooner is the bound where they would be."""
_CASES, _FEW_CASES = 16, 5
"""Most cases that one room is cut into."""
_WHOLE = 0.01
_NODES = 200
"""Most branches when whole numbers are looked for."""
_SECONDS = 1.5
_IMPROVED = 400


class HostSearch:
    """The search.

    Args:
        encoded: the problem.
        best: a plan.
        intervals: bounds that are known.
        rows: other limits.
        gap: between plan and bound that is good enough.
    """

    def __init__(self, encoded: Encoded, best: Packing, intervals: Sequence[Interval], rows: Rows, gap: float) -> None:
        self.encoded, self.best, self.gap = encoded, best, gap
        self.hosts = Hosts(encoded, best.cost, rows, _SMALL)
        self.curve: Floats = np.full(GRID + 1, -np.inf)
        """(G + 1,) by room, a bound of E."""
        self._done, self._stuck, self._planned = (np.zeros(GRID + 1, dtype=bool) for _ in range(3))
        for interval in intervals:
            if np.isfinite(interval.high):
                self._learn(int(interval.high / self.hosts.step * (1 - 1e-9)) - 1, interval.base)

    @staticmethod
    def applies(encoded: Encoded, best: Packing | None) -> bool:
        """Whether there are many hosts to fill, and not too many kinds of parts to fill them with."""
        if best is None or best.cost <= 0 or not 1 < host_blocks(encoded)[0] <= encoded.ranks // _HOSTS:
            return False
        return len(Inside(encoded, best.cost / GRID, GRID, int(_SMALL * GRID)).kinds) <= _KINDS

    @property
    def bound(self) -> float:
        """No plan costs less."""
        return min(float(self._costs().min()), self.hosts.most) * (1 - 1e-9)

    def _costs(self) -> Floats:
        """(G + 1,) the least cost that the curve allows, by room."""
        rooms: Floats = np.arange(GRID + 1, dtype=np.float64)
        return rooms * self.hosts.step + np.maximum(self.curve, 0.0)

    def _learn(self, room: int, bound: float) -> None:
        """Raise the curve for a room, that is at least -1, and all below it."""
        self.curve[: room + 1] = np.maximum(self.curve[: room + 1], bound)

    def run(self, rounds: int, stop: Callable[[], bool], seconds: Callable[[], float]) -> list[Packing]:
        """Price and plan by turns, until the gap is closed; the plans.

        Args:
            rounds: most rooms to price, and most to plan for.
            stop: asked between them.
            seconds: what is left of the time.
        """
        self._found: list[Packing] = []
        for aim in _AIMS:
            self._search(aim, rounds, stop, seconds)
            room = min(int(self._costs().argmin()) + 2 * _NEAR, GRID)
            if stop() or self._closed():
                break
            if not self._planned[room]:
                self._planned[max(room - _NEAR, 0) : room + _NEAR + 1] = True
                self._plan(room, seconds)
        return self._found

    def _closed(self) -> bool:
        return self.best.cost <= self.bound * (1 + self.gap)

    def _search(self, aim: float, rounds: int, stop: Callable[[], bool], seconds: Callable[[], float]) -> None:
        """Raise the bound to what a plan of so much of the best one's cost would need."""
        hosts, near = self.hosts, _NEAR
        done, stuck, planned = self._done, self._stuck, self._planned
        shrink, tried, reach = 1, -1, near
        for _ in range(rounds):
            target = aim * self.best.cost / (1 + self.gap) * (1 + 1e-6)
            costs = np.where(done, np.inf, self._costs())
            room = int(costs.argmin())
            least = float(costs[room])
            if least >= target or stop():
                return
            enough = target - room * hosts.step
            if not stuck[room]:
                shrink, tried = (shrink * 4, room) if room == tried else (1, room)
                wide = int((target - least) / hosts.step) // shrink // 2
                above = min(room + wide, GRID)
                self._learn(above, hosts.price(above, enough, stop))
                if wide == 0:
                    # Rooms with the same bound need no programme of their own.
                    alike = (np.arange(GRID + 1) >= room) & (self.curve >= self.curve[room] - 1e-6 * hosts.most)
                    stuck |= alike & (self._costs() < target)
                continue
            above = min(room + reach, GRID)
            self._learn(above, self._cases(above, enough, _CASES if reach == 0 else _FEW_CASES, stop))
            if self._costs()[room] >= least + (target - least) / 2:
                reach = min(reach * 2 + 1, GRID // 20)
            elif not planned[room]:
                planned[max(room - 2 * near, 0) : room + 2 * near + 1] = True
                self._plan(min(room + 2 * near, GRID), seconds)
            elif reach:
                reach //= 3
            else:
                done[room : room + near], reach = True, near

    def _cases(self, room: int, enough: float, most: int, stop: Callable[[], bool]) -> float:
        """A bound of E for a room by cases: how many tables take options with much load on every rank.

        Such numbers are whole in every plan, and not in the programme's solutions.
        """
        hosts, numbers = self.hosts, count(1)
        cases: list[tuple[float, int, Counts, tuple[float, int]]] = []

        def look(counts: Counts, least: float) -> None:
            hosts.restrict(counts)
            bound = max(hosts.price(room, enough, stop), least)
            heappush(cases, (bound, next(numbers), counts, self._cut(hosts.chosen())))

        look({}, -np.inf)
        first = cases[0][0]
        for looked in range(most):
            least, _, counts, (load, number) = cases[0]
            # Cases that gain little end up no higher.
            hopeless = looked > 2 and least - first < (enough - first) * looked / (4 * most)
            if least >= enough or load <= 0 or hopeless or stop():
                break
            heappop(cases)
            lower, upper = counts.get(load, (-np.inf, np.inf))
            look(counts | {load: (number + 1.0, upper)}, least)
            look(counts | {load: (lower, float(number))}, least)
        hosts.restrict({})
        return cases[0][0]

    def _cut(self, chosen: Floats) -> tuple[float, int]:
        """The load from which on the number of tables is not whole, and that number rounded down."""
        base = self.encoded.base_load
        order = np.argsort(-base, kind="stable")
        order = order[(chosen[order] > 1e-6)]
        sums = np.cumsum(chosen[order])
        ends = np.append(base[order][1:] < base[order][:-1], True)
        parts = np.abs(sums - np.rint(sums))
        gain = np.where(ends & (parts > _WHOLE), parts * base[order], 0.0)
        if not len(gain) or gain.max() <= 0:
            return 0.0, 0
        best = int(gain.argmax())
        return float(base[order][best]), int(np.floor(sums[best]))

    def _plan(self, room: int, seconds: Callable[[], float]) -> bool:
        """Look for a better plan; whether there is one."""
        hosts = self.hosts
        cutoff = self.best.cost * (1 - 1e-4) - room * hosts.step
        # Without a time limit, the nodes alone decide when it ends.
        limit = min(max(seconds() / 4, 0.1), _SECONDS) if np.isfinite(seconds()) else np.inf
        packing = hosts.plan(room, cutoff, nodes=_NODES, seconds=limit)
        if packing is None:
            return False
        packing.improve(_IMPROVED, self.bound)
        self._found.append(packing)
        if packing.cost >= self.best.cost:
            return False
        self.best = packing
        return True

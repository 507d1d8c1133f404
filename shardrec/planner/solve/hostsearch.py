"""Bound and plans by hosts: rooms are priced from the largest down; where that is of no use, cases and plans follow.

See :mod:`hosts` for the programme. A bound for a room holds for all below it, so the next to price is the largest for
which it is not enough. Where the programme stays below what is asked for, no other room needs to be above it.

Its solutions choose nearly whole numbers of options. Rounded, packed and mended by local search (:mod:`rebuild`) among
options that cost little more at the programme's prices, they are plans; of many tables, whole numbers of options, sets
and ways are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from heapq import heappop, heappush
from itertools import count

import numpy as np

from shardrec.planner.solve.clock import AT_ONCE, Clock
from shardrec.planner.solve.encode import Encoded, Floats
from shardrec.planner.solve.hosts import GRID, Hosts
from shardrec.planner.solve.inside import Inside
from shardrec.planner.solve.packing import Packing, demand, rounded
from shardrec.planner.solve.rebuild import Rebuilder
from shardrec.planner.solve.relax import Interval
from shardrec.planner.solve.rows import Rows
from shardrec.planner.solve.sizes import host_blocks

__all__ = ["HostSearch"]

Counts = dict[float, tuple[float, float]]

_SMALL = 0.1
"""Part of the cost up to which a part of a host counts as free pieces."""
_KINDS = 1000
_HOSTS = 4
"""Least number of hosts: on fewer, the other ways are better."""
_NEAR = 3
"""Steps between rooms for which plans are looked for."""
_CASES = (8, 24, 48, 96)
"""Most cases that one room is cut into, at first and later."""
_PROBES = 12
"""Rooms that are looked at to find the one that decides."""
_WHOLE = 0.01
_NODES = 200
"""Most branches when whole numbers are looked for."""
_PART = 0.7
"""Of the time that is left, the most that one search for whole numbers may take."""
_IMPROVED = 400
_OFFSETS = (2, 4, 6, 8, 10, 12)
"""Steps above the room that decides: where whole numbers are looked for."""
_FEW_TABLES = 50
_STRETCH, _VALLEYS = 40, 2
"""Rooms that are taken together, and of how many such stretches plans are repaired."""
_REBUILDS_PER_ROUND, _REBUILDS = 25, 8000
"""Rounds of local search for a plan."""


class HostSearch:
    """The search.

    Args:
        encoded: the problem.
        best: a plan.
        intervals: bounds that are known.
        rows: other limits.
        gap: between plan and bound that is good enough.
        value: of pieces by size, for :class:`Rebuilder`.
        clock: of the search.
    """

    def __init__(
        self,
        encoded: Encoded,
        best: Packing,
        intervals: Sequence[Interval],
        rows: Rows,
        gap: float,
        value: Floats,
        clock: Clock,
    ) -> None:
        self.encoded, self.best, self.gap, self._value, self._clock = encoded, best, gap, value, clock
        self.hosts = Hosts(encoded, best.cost, rows, _SMALL)
        self.curve: Floats = np.full(GRID + 1, -np.inf)
        """(G + 1,) by room, a bound of E."""
        self._planned = np.zeros(GRID + 1, dtype=bool)
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
            rounds: most rooms to price each time; plans are repaired for some times as long.
            stop: asked between them.
            seconds: what is left of the time.
        """
        self._found: list[Packing] = []
        for cases in _CASES:
            before = self.best.cost
            for prove in (self._sweep, partial(self._split, cases)):
                prove(rounds, stop)
                self._improve(rounds, stop, seconds)
                if stop() or self._closed():
                    return self._found
            if self.best.cost == before:
                break
        return self._found

    def _improve(self, rounds: int, stop: Callable[[], bool], seconds: Callable[[], float]) -> None:
        """Look for better plans near the rooms that decide."""
        rooms = self._valleys()
        # With few tables, nearly all choices are whole, and local search does the rest; with many, it is lost.
        if self.encoded.sizes.sum() > _FEW_TABLES:
            found = False
            for near in _OFFSETS:
                if not (stop() or self._closed()):
                    found |= self._plan(rooms[0] + near, stop, seconds)
            if found:
                return
        for room in rooms[:_VALLEYS]:
            if not (stop() or self._closed()):
                self._repaired(room + _NEAR, rounds, stop)

    def _valleys(self) -> list[int]:
        """Of each stretch of rooms, that with the least bound; the least first."""
        costs = self._costs()
        least = [begin + int(costs[begin : begin + _STRETCH].argmin()) for begin in range(0, GRID + 1, _STRETCH)]
        return sorted(least, key=lambda room: costs[room])

    def _closed(self) -> bool:
        return self.best.cost <= self.bound * (1 + self.gap)

    @property
    def _target(self) -> float:
        """What no plan is to cost less than."""
        return self.best.cost / (1 + self.gap) * (1 + 1e-6)

    def _probe(self, stop: Callable[[], bool]) -> float:
        """Look for the room that decides, from the least bound on; a bound that no room needs to be above."""
        target = self._target
        for _ in range(_PROBES):
            costs = self._costs()
            room = int(costs.argmin())
            # Rooms with the same bound of E: one of them in the middle tells most.
            alike = np.flatnonzero(self.curve >= self.curve[room] - 1e-9 * self.hosts.most)
            room = (room + int(alike[-1]) + 1) // 2
            if costs.min() >= target or stop():
                break
            target = self._lowered(target, room, stop)
        return target

    def _lowered(self, target: float, room: int, stop: Callable[[], bool]) -> float:
        """Price a room; where it stays below the target, it is of no use to raise others any further."""
        step = self.hosts.step
        self._learn(room, self.hosts.price(room, target - room * step, stop, brief=True))
        left = room * step + self.hosts.reached
        return min(target, left if np.isfinite(left) else float(self._costs()[room]))

    def _sweep(self, rounds: int, stop: Callable[[], bool]) -> None:
        """Raise the bound of all rooms to the target, or as far as the programme goes.

        From the largest room down: what is proven for one holds for those below it, as far as they are not much less.
        """
        target, reach = self._probe(stop), 0
        for _ in range(rounds):
            low = np.flatnonzero(self._costs() < target)
            if not len(low) or stop():
                return
            before = target
            target = self._lowered(target, int(low[max(len(low) - 1 - reach, 0)]), stop)
            reach = 0 if target == before else 2 * reach + 1

    def _split(self, most: int, rounds: int, stop: Callable[[], bool]) -> None:
        """Raise the bound of the deciding rooms to the target by cases, as far as that goes."""
        cover: list[Counts] = []
        target, reach, step = self._target, _NEAR, self.hosts.step
        for _ in range(rounds):
            if self._costs().min() >= target or stop():
                return
            room = int(self._costs().argmin())
            above = min(room + reach, GRID)
            enough = target - room * step
            # What was cut to prove it for one room often does for the next.
            again = bool(cover)
            if again:
                found = self._covered(cover, above, enough, stop)
            else:
                found, cover = self._cases(above, enough, most, stop)
            self._learn(above, found)
            if found >= enough:
                reach = 2 * reach + 1 if again else _NEAR
                continue
            cover = []
            if not again:
                # As in a sweep: if one room stays below, no others need to be above it.
                target = min(target, max(above * step + found, float(self._costs()[room])))
            reach = _NEAR if again else reach // 3

    def _covered(self, cover: Sequence[Counts], room: int, enough: float, stop: Callable[[], bool]) -> float:
        """A bound of E for a room by cases that cover all plans, as far as it is enough."""
        hosts, bound = self.hosts, np.inf
        for counts in cover:
            hosts.columns.restrict(counts)
            bound = min(bound, hosts.price(room, enough, stop, brief=True))
            if bound < enough:
                break
        hosts.columns.restrict({})
        return bound if bound >= enough else -np.inf

    def _cases(self, room: int, enough: float, most: int, stop: Callable[[], bool]) -> tuple[float, list[Counts]]:
        """A bound of E for a room by cases: how many tables take options with much load on every rank; and the cases.

        Such numbers are whole in every plan, and not in the programme's solutions.
        """
        hosts, numbers = self.hosts, count(1)
        cases: list[tuple[float, int, Counts, tuple[float, int]]] = []

        def look(counts: Counts, least: float) -> None:
            hosts.columns.restrict(counts)
            bound = max(hosts.price(room, enough, stop), least)
            heappush(cases, (bound, next(numbers), counts, self._cut(hosts.columns.chosen())))

        look({}, -np.inf)
        first = cases[0][0]
        for looked in range(most):
            least, _, counts, (load, number) = cases[0]
            # Cases that gain little end up no higher.
            hopeless = looked > 2 and least - first < (enough - first) * looked / most
            if least >= enough or load <= 0 or hopeless or stop():
                break
            heappop(cases)
            lower, upper = counts.get(load, (-np.inf, np.inf))
            look(counts | {load: (number + 1.0, upper)}, least)
            look(counts | {load: (lower, float(number))}, least)
        hosts.columns.restrict({})
        return cases[0][0], [counts for _, _, counts, _ in cases]

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

    def _repaired(self, room: int, rounds: int, stop: Callable[[], bool]) -> None:
        """Look for a better plan from the options that are chosen for about a room, which are nearly whole."""
        encoded, room = self.encoded, min(room, GRID)
        bound = self.hosts.price(room, np.inf, stop)
        self._learn(room, bound)
        left = self.best.cost - room * self.hosts.step - bound
        if stop() or self._closed() or left <= 0:
            return
        counts = rounded(encoded, self.hosts.columns.chosen())
        packing = Packing(encoded, counts)
        if not packing.fill(demand(encoded, counts).items()):
            return
        self._keep(packing)
        # The options of a better plan are, all together, no further above the least prices than what is left. With
        # those alone that are within a table's part of it, local search goes where the programme points; with all,
        # it ends with one that is easily placed, and costs more.
        only = (self.hosts.extra(room) <= left / encoded.sizes.sum()) | (counts > 0)
        most = min(_REBUILDS_PER_ROUND * rounds, _REBUILDS)

        def searched(seed: int) -> Packing | None:
            search = Rebuilder(encoded, self._value, seed=seed, only=only)
            return search.run(packing, most, stop, self.bound * (1 + self.gap))

        seeds = range(len(self._found), len(self._found) + AT_ONCE)
        for found in self._clock.together([partial(searched, seed) for seed in seeds]):
            if found is not None:
                self._keep(found)

    def _keep(self, packing: Packing) -> bool:
        self._found.append(packing)
        if packing.cost >= self.best.cost:
            return False
        self.best = packing
        return True

    def _plan(self, room: int, stop: Callable[[], bool], seconds: Callable[[], float]) -> bool:
        """Look for a better plan with about a room; whether there is one."""
        hosts = self.hosts
        if room > GRID or self._planned[room]:
            return False
        self._planned[max(room - 1, 0) : room + 2] = True
        # Columns that are best for this very room.
        self._learn(room, hosts.price(room, np.inf, stop))
        cutoff = self.best.cost * (1 - 1e-4) - room * hosts.step
        # Without a time limit, the nodes alone decide when it ends.
        packing = hosts.plan(room, cutoff, nodes=_NODES, seconds=max(_PART * seconds(), 0.1))
        if packing is None:
            return False
        packing.improve(_IMPROVED, self.bound)
        return self._keep(packing)

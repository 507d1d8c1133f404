"""What a search has so far: the best packing and the bound, others to improve, and the time that is left."""

from __future__ import annotations

import numpy as np

from shardrec.planner.solve.clock import Clock
from shardrec.planner.solve.encode import Encoded, Ints
from shardrec.planner.solve.packing import Packing, demand
from shardrec.planner.solve.problem import SolveLimits

__all__ = ["Incumbent"]

_ROUNDS = 400
"""Most steps of improving one packing."""
_FILLS = ((0.0, 0.0), (0.0, 0.5), (0.3, 0.5), (1.0, 0.9))
"""Ways to pack: how much bytes count in the choice of the rank, and in the order."""


class Incumbent:
    """The state of a search, and what its steps do to it.

    Args:
        encoded: the problem.
        limits: when to stop.

    Attributes:
        clock: since the search began.
        bound: proven.
        pool: packings to improve.
        best: that of the least cost.
        timed_out: whether the clock ended something.
    """

    def __init__(self, encoded: Encoded, limits: SolveLimits) -> None:
        self.encoded = encoded
        self.limits = limits
        self.clock = Clock()
        self.bound = 0.0
        self.pool: list[Packing] = []
        self.best: Packing | None = None
        self.timed_out = False
        self._tried: set[bytes] = set()

    def _try(self, counts: Ints) -> bool:
        """Pack a choice of options; whether it fits memory."""
        key = counts.tobytes()
        if key in self._tried:
            return True
        self._tried.add(key)
        encoded = self.encoded
        wanted = demand(encoded, counts)
        best: Packing | None = None
        for memory_weight, memory_order in _FILLS:
            packing = Packing(encoded, counts)
            if packing.fits() and packing.fill(wanted.items(), memory_weight, memory_order):
                packing.improve(_ROUNDS, self.bound)
                if best is None or packing.cost < best.cost:
                    best = packing
                    self._keep(packing)
                if self._closed():
                    break
        if best is not None:
            self.pool.append(best)
        return best is not None

    def _try_placed(self, counts: Ints, packing: Packing | None) -> None:
        """Pack a choice of options, and improve a packing of it."""
        self._try(counts)
        if packing is not None:
            self._improve(packing)

    def _improve(self, packing: Packing) -> None:
        """Improve a packing, and add it."""
        packing.improve(_ROUNDS, self.bound)
        self._add(packing)

    def _add(self, packing: Packing) -> None:
        """One more of those to improve; the best so far, if it is."""
        self.pool.append(packing)
        self._keep(packing)

    def _keep(self, packing: Packing) -> None:
        if self.best is None or packing.cost < self.best.cost:
            self.best = packing

    def _cost(self) -> float:
        return np.inf if self.best is None else self.best.cost

    def _closed(self) -> bool:
        return self.best is not None and self.best.cost <= self.bound * (1 + self.limits.gap)

    def _share_of_time(self) -> float:
        return max(0.1, self._time_left() / 4)

    def _time_left(self) -> float:
        return self.limits.seconds - self.clock.passed()

    def _after(self, share: float) -> float:
        """The seconds that are left after a part of the time that is; less than none without a time limit."""
        return self._time_left() * (1 - share) if np.isfinite(self._time_left()) else -np.inf

    def _only(self, seconds: float) -> bool:
        """Whether no more than so many seconds are left."""
        return self._time_left() <= seconds

    def _out_of_time(self) -> bool:
        if self._time_left() <= 0:
            self.timed_out = True
        return self.timed_out

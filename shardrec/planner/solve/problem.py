"""The assignment problem as plain data: tables, their options, and the load that an option puts on the ranks.

::

    Problem ── tables ──► Option "column_wise ×4"          of each table exactly one option is chosen
                            everywhere: Item                common load: routing, assembling, copies
                            gangs: Gang × 4                 what has to be placed
                                     items: (Item,)         one item, or items that are placed together
                                     places: ((0,), (1,))   a place is one rank for each of them

Nothing here knows about embeddings: a load is any additive cost of a rank, a memory any additive byte count per tier.
So the options may come from shardrec's cost model or from another planner's.

The objective is the load of the most loaded rank; in each memory tier every rank must stay within the capacity.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf

from shardrec.errors import ConfigError

Place = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Item:
    """What one rank has to do and to hold.

    Args:
        load: time (any unit, the same throughout a problem).
        memory: bytes per memory tier.
    """

    load: float = 0.0
    memory: tuple[float, ...] = (0.0,)


@dataclass(frozen=True, kw_only=True)
class Gang:
    """Items that are placed together.

    Args:
        items: at least one.
        places: where the gang may go. Each place gives each item a rank.
        count: number of equal gangs, each placed separately.
    """

    items: tuple[Item, ...]
    places: tuple[Place, ...]
    count: int = 1


@dataclass(frozen=True, kw_only=True)
class Option:
    """One way to cut a table.

    Args:
        label: for people.
        everywhere: what the option puts on every rank.
        gangs: what it puts on some.
    """

    label: str
    everywhere: Item
    gangs: tuple[Gang, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Problem:
    """An assignment problem.

    Args:
        ranks: number of ranks.
        capacity: bytes per rank, per memory tier (``inf``: no limit).
        tables: the options per table, by name. Tables with equal options are planned as one group.
    """

    ranks: int
    capacity: tuple[float, ...]
    tables: Mapping[str, tuple[Option, ...]]


@dataclass(frozen=True, kw_only=True)
class SolveLimits:
    """How hard to try.

    Args:
        gap: stop when the plan is proven to be within this fraction of the best.
        effort: proposals of the search, and branches of HiGHS, in proportion. 40 takes less than a second where the gap
            closes, and some seconds on hundreds of tables where it does not.
        seconds: CPU-time budget of the thread. Stop then with the best so far. A run that ends earlier is a function of
            the problem alone.
    """

    gap: float = 5e-3
    effort: int = 40
    seconds: float = inf

    def __post_init__(self) -> None:
        if not self.gap >= 0 or self.effort < 1 or not self.seconds > 0:
            raise ConfigError(
                f"limits need a gap of at least 0, an effort of at least 1 and some seconds, got {self.gap}, "
                f"{self.effort} and {self.seconds}"
            )


FIRST_PLAN = SolveLimits(gap=inf, effort=4)
"""Any plan that fits will do."""


@dataclass(frozen=True, kw_only=True)
class Solution:
    """An assignment and its costs and bounds.

    Args:
        choice: number of the chosen option, by table.
        places: per table, the place of each gang: gangs in order, ``count`` places for each.
        loads: load per rank.
        memory: per rank, bytes in each tier.
        bound: no assignment of these options has a lower cost.
        timed_out: the clock ended the search.
        exhausted: the effort ended the search, before the gap was closed.
    """

    choice: Mapping[str, int]
    places: Mapping[str, tuple[Place, ...]]
    loads: tuple[float, ...]
    memory: tuple[tuple[float, ...], ...]
    bound: float
    timed_out: bool = False
    exhausted: bool = False

    @property
    def cost(self) -> float:
        """Load of the most loaded rank."""
        return max(self.loads)

    @property
    def gap(self) -> float:
        """How far the cost may be above the best, as a fraction of the bound."""
        if self.cost <= self.bound:
            return 0.0
        return (self.cost - self.bound) / self.bound if self.bound > 0 else inf

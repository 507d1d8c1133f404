"""What was measured: rounds of a case, ratios, and geometric means over cases."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import exp, log
from statistics import median
from typing import Any

from benchmarks.harness.timing.case import Case
from benchmarks.harness.timing.floor import Floor, RankBytes

__all__ = ["BASE", "CaseResult", "Group", "Spread", "geometric_mean", "groups_of", "turn_of"]

BASE = "shardrec"
"""The side that the others are compared with."""


@dataclass(frozen=True, kw_only=True)
class Spread:
    """A median over rounds, with the least and the most of them."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Of at least one value."""
        return cls(median=median(values), low=min(values), high=max(values))

    def to_json(self) -> dict[str, float]:
        """Three numbers."""
        return {"median": self.median, "low": self.low, "high": self.high}


def turn_of(measured: Mapping[str, Any]) -> dict[str, float]:
    """One side's turn in one round, from what its ranks measured.

    Returns:
        ``ms``, the median step; ``mean_ms``; ``low_ms`` and ``high_ms``, the fastest and the slowest step; ``steps``;
        ``faults`` and ``peak_bytes`` as measured.
    """
    times = measured["step_ms"]
    return {
        "ms": median(times),
        "mean_ms": sum(times) / len(times),
        "low_ms": min(times),
        "high_ms": max(times),
        "steps": len(times),
        "faults": measured["faults"],
        "peak_bytes": measured["peak_bytes"],
    }


@dataclass(kw_only=True)
class CaseResult:
    """All the rounds of a case.

    Args:
        case: what was timed.
        rounds: per round, the turn of each side.
        error: why there are no figures, in words.
        other_rule: TorchRec's optimizer is another one on tables of this plan, so that weights differ after a step.
        bytes: that each rank has to move.
        floor: the least time of a step, if rows moved as fast as a copy. None before it is known.
        gather_floor: the same with the rates of random rows.
        shares_memory: shardrec's ranks exchange through memory that they share.
    """

    case: Case
    rounds: list[dict[str, dict[str, float]]] = field(default_factory=list)
    error: str | None = None
    other_rule: bool = False
    bytes: Sequence[RankBytes] = ()
    floor: Floor | None = None
    gather_floor: Floor | None = None
    shares_memory: bool = True

    @property
    def is_measured(self) -> bool:
        """Whether there are figures that count."""
        return self.error is None and bool(self.rounds)

    def step(self, side: str) -> Spread | None:
        """Milliseconds of a side's step over the rounds."""
        if not self.is_measured or side not in self.rounds[0]:
            return None
        return Spread.of([turns[side]["ms"] for turns in self.rounds])

    def ratio(self, side: str) -> Spread | None:
        """The side's time over shardrec's, round by round."""
        if not self.is_measured or side not in self.rounds[0]:
            return None
        return Spread.of([turns[side]["ms"] / turns[BASE]["ms"] for turns in self.rounds])

    @property
    def least_ms(self) -> float:
        """The floor of the way that shardrec's ranks exchange in this case; 0 where none is known."""
        return self._least(self.floor)

    @property
    def gather_ms(self) -> float:
        """:attr:`least_ms` with the rates of random rows."""
        return self._least(self.gather_floor)

    def over_floor(self, side: str = BASE) -> float | None:
        """The side's step over :attr:`least_ms`. None where that is not known."""
        return self._over(side, self.least_ms)

    def over_gather_floor(self, side: str = BASE) -> float | None:
        """The side's step over :attr:`gather_ms`. None where that is not known."""
        return self._over(side, self.gather_ms)

    def _least(self, floor: Floor | None) -> float:
        if floor is None:
            return 0.0
        return floor.through_memory if self.shares_memory else floor.over_links

    def _over(self, side: str, least: float) -> float | None:
        step = self.step(side)
        return step.median / least if step is not None and least else None

    def to_json(self) -> dict[str, Any]:
        """JSON-compatible data. ``case``, ``rounds`` and ``error`` are what a run is resumed from."""
        sides = [side for side in self.case.turns if self.step(side) is not None]
        return {
            "key": self.case.key,
            "case": self.case.to_json(),
            "error": self.error,
            "other_rule": self.other_rule,
            "step_ms": {side: found.to_json() for side in sides if (found := self.step(side))},
            "ratio_to_shardrec": {
                side: r.to_json() for side in sides if side not in (BASE, "dense") and (r := self.ratio(side))
            },
            "floor_ms": None if self.floor is None else vars(self.floor),
            "gather_floor_ms": None if self.gather_floor is None else vars(self.gather_floor),
            "step_over_floor": {side: self.over_floor(side) for side in sides if side != "dense"},
            "step_over_gather_floor": {side: self.over_gather_floor(side) for side in sides if side != "dense"},
            "bytes_per_rank": [vars(rank) for rank in self.bytes],
            "rounds": self.rounds,
        }


@dataclass(frozen=True, kw_only=True)
class Group:
    """Cases that are summed up together.

    Args:
        name: for people.
        side: that is compared with shardrec.
        mean: geometric mean of the cases' ratios (each the median of its rounds).
        least: the smallest of them.
        where: the case that has it.
        cases: how many.
    """

    name: str
    side: str
    mean: float
    least: float
    where: str
    cases: int


def geometric_mean(values: Iterable[float]) -> float:
    """Of at least one positive number."""
    logs = [log(value) for value in values]
    return exp(sum(logs) / len(logs))


def groups_of(results: Iterable[CaseResult]) -> list[Group]:
    """A group for each mode and surroundings, and within it for each layout and workload that is not all of it."""
    members: dict[tuple[str, str], list[tuple[float, str]]] = {}
    whole: dict[tuple[str, str], str] = {}
    for result in results:
        for side in result.case.sides:
            ratio = None if side == BASE else result.ratio(side)
            if ratio is None:
                continue
            case = result.case
            name = case.group or ", ".join([case.mode, *case.surroundings])
            parts = [] if case.group else [case.layout, case.workload, f"{case.workload} {case.layout}"]
            for one in (name, *(f"{name}: {part}" for part in parts)):
                members.setdefault((one, side), []).append((ratio.median, case.key))
                whole[one, side] = name
    found = []
    for (name, side), ratios in members.items():
        total = members[whole[name, side], side]
        if name != whole[name, side] and (len(ratios) == len(total) or len(ratios) < 2):
            continue
        least, where = min(ratios)
        mean = geometric_mean(ratio for ratio, _ in ratios)
        found.append(Group(name=name, side=side, mean=mean, least=least, where=where, cases=len(ratios)))
    return sorted(found, key=lambda group: (whole[group.name, group.side], group.name))

"""What is known of a plan, as data: costs, bound, the load of each rank, and why each table is cut as it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import inf
from typing import Any

__all__ = ["PlanReport", "TableReport"]


@dataclass(frozen=True, kw_only=True)
class TableReport:
    """Why a table is where it is.

    Args:
        name: of the table.
        cut: chosen cut, with the numbers of its parts.
        ms: time that it costs all ranks together.
        bytes: memory that it takes on all ranks together.
        next_cut: the best other cut; empty if there is none.
        reason: why that lost.
    """

    name: str
    cut: str
    ms: float
    bytes: float
    next_cut: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class PlanReport:
    """A plan's costs.

    Args:
        batch_size: samples per rank that it was made for.
        profile: name of the coefficients.
        source: where those are from.
        cost_ms: time of the slowest rank, without ``overhead_ms``.
        bound_ms: no plan is faster, by the same cost model and cuts.
        overhead_ms: time of a step that no plan changes.
        timed_out: the clock ended the search.
        capacity: bytes that a rank may use, of ranks that differ the one with most; inf without a limit.
        components: names of the parts of a rank's time.
        times: per rank, ms of each component.
        uses: names of the parts of a rank's memory.
        memory: per rank, bytes of each use.
        tables: one each.
    """

    batch_size: int
    profile: str
    source: str
    cost_ms: float
    bound_ms: float
    overhead_ms: float
    timed_out: bool
    capacity: float
    components: tuple[str, ...]
    times: tuple[tuple[float, ...], ...]
    uses: tuple[str, ...]
    memory: tuple[tuple[float, ...], ...]
    tables: tuple[TableReport, ...]

    @property
    def gap(self) -> float:
        """How far the cost may be above the best, as a fraction of the bound."""
        if self.cost_ms <= self.bound_ms:
            return 0.0
        return self.cost_ms / self.bound_ms - 1 if self.bound_ms > 0 else inf

    @property
    def rank_ms(self) -> tuple[float, ...]:
        """Time of each rank."""
        return tuple(map(sum, self.times))

    @property
    def rank_bytes(self) -> tuple[float, ...]:
        """Memory of each rank."""
        return tuple(map(sum, self.memory))

    def to_json(self) -> dict[str, Any]:
        """JSON-compatible data; no limit is null."""
        return {**asdict(self), "capacity": None if self.capacity == inf else self.capacity}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> PlanReport:
        """The report that :meth:`to_json` gave."""
        values = dict(data)
        values["capacity"] = inf if data["capacity"] is None else data["capacity"]
        values["tables"] = tuple(TableReport(**each) for each in data["tables"])
        for name in ("times", "memory"):
            values[name] = tuple(map(tuple, data[name]))
        for name in ("components", "uses"):
            values[name] = tuple(data[name])
        return cls(**values)

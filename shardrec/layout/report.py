"""The report of a plan, as data: costs, bound, the load per rank, and the reason for each table's cut."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import inf
from typing import Any


@dataclass(frozen=True, kw_only=True)
class TableReport:
    """The cut of a table, and why it was chosen.

    Args:
        name: of the table.
        cut: the chosen cut, with the number of its parts.
        ms: time that it costs all ranks together.
        bytes: memory that it takes on all ranks together.
        next_cut: the best other cut. Empty for none.
        reason: why that cut was not chosen.
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
        batch_size: samples per rank for which it was made.
        profile: name of the coefficients.
        source: origin of the coefficients.
        cost_ms: time of the slowest rank, without ``overhead_ms``.
        bound_ms: lower bound on ``cost_ms`` of every plan, by the same cost model and cuts.
        overhead_ms: time of a step that does not depend on the plan.
        timed_out: whether the time limit ended the search.
        exhausted: whether the limit on the search's effort ended it before the gap was closed.
        capacity: bytes that a rank may use (the largest, if ranks differ). Inf without a limit.
        components: names of the parts of a rank's time.
        times: per rank, ms of each component.
        uses: names of the parts of a rank's memory.
        memory: per rank, bytes of each use.
        host_bytes: per rank, bytes of tables on CUDA that are in the host's memory. Empty in older reports.
        tables: one report per table.
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
    exhausted: bool = False
    host_bytes: tuple[float, ...] = ()

    @property
    def gap(self) -> float:
        """The most that the cost may be above the best plan's, as a fraction of the bound."""
        if self.cost_ms <= self.bound_ms:
            return 0.0
        return self.cost_ms / self.bound_ms - 1 if self.bound_ms > 0 else inf

    @property
    def rank_ms(self) -> tuple[float, ...]:
        """Time per rank."""
        return tuple(map(sum, self.times))

    @property
    def rank_bytes(self) -> tuple[float, ...]:
        """Memory per rank."""
        return tuple(map(sum, self.memory))

    def to_json(self) -> dict[str, object]:
        """JSON-compatible data. Infinity is null."""
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
        values["host_bytes"] = tuple(data.get("host_bytes", ()))
        return cls(**values)

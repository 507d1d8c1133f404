"""The numbers behind a plan's pictures."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shardrec.layout.plan import ShardingPlan

__all__ = ["COLOURS", "Chart", "charts"]

# Okabe and Ito's colours, which the colour-blind can tell apart.
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00")


@dataclass(frozen=True, kw_only=True)
class Chart:
    """Stacked bars, one per rank.

    Args:
        title: of the chart.
        unit: of the values.
        names: of the parts of a bar.
        bars: per rank, one value for each part.
        lines: (name, value) of horizontal lines.
    """

    title: str
    unit: str
    names: tuple[str, ...]
    bars: tuple[tuple[float, ...], ...]
    lines: tuple[tuple[str, float], ...] = ()

    @property
    def top(self) -> float:
        """Highest bar or line."""
        return max([*(sum(bar) for bar in self.bars), *(value for _, value in self.lines)], default=0.0) or 1.0


def charts(plan: ShardingPlan) -> list[Chart]:
    """The charts of a plan: time and memory; of one that the planner did not make, the weights alone."""
    gib = 2.0**30
    report = plan.report
    if report is None:
        weights = tuple((plan.local_numel(rank) * 4 / gib,) for rank in range(plan.world_size))
        return [Chart(title="Weights of each rank (fp32)", unit="GiB", names=("weights",), bars=weights)]
    memory = tuple(tuple(size / gib for size in sizes) for sizes in report.memory)
    # A limit far above the bars would flatten them.
    near = report.capacity < inf and report.capacity <= 4 * max(report.rank_bytes)
    return [
        Chart(
            title="Time of each rank in a step",
            unit="ms",
            names=report.components,
            bars=report.times,
            lines=(("proven bound", report.bound_ms),),
        ),
        Chart(
            title="Memory of each rank",
            unit="GiB",
            names=report.uses,
            bars=memory,
            lines=(("limit", report.capacity / gib),) if near else (),
        ),
    ]

"""A plan as a picture (matplotlib)."""

from __future__ import annotations

from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING

from shardrec.planner.report.content import COLOURS, Chart, content

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from shardrec.layout.plan import ShardingPlan

__all__ = ["to_png"]


def to_png(plan: ShardingPlan, path: str | Path) -> None:
    """Draw the load and, if it is known, the memory per rank, one chart below the other, as PNG.

    Args:
        plan: any plan.
        path: of the file.
    """
    # The object interface: no window, no global state, no change of the caller's backend.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    shown = content(plan)
    width = min(16.0, max(7.0, 3.5 + 0.16 * plan.world_size))
    figure = Figure(figsize=(width, 3.4 * len(shown.charts) + 0.9), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle("\n".join([shown.title, *wrap(shown.facts[0], 80)]), fontsize=10)
    for number, chart in enumerate(shown.charts):
        _bars(figure.add_subplot(len(shown.charts), 1, number + 1), chart)
    figure.savefig(path, format="png", dpi=120)


def _bars(axes: Axes, chart: Chart) -> None:
    from matplotlib.ticker import MaxNLocator

    ranks = range(len(chart.bars))
    below = [0.0] * len(chart.bars)
    for part, name in enumerate(chart.names):
        values = [bar[part] for bar in chart.bars]
        if any(values):
            colour = COLOURS[part % len(COLOURS)]
            axes.bar(ranks, values, bottom=below, width=0.8, color=colour, label=name, linewidth=0)
        below = [base + value for base, value in zip(below, values, strict=True)]
    for name, value in chart.lines:
        axes.axhline(value, color="black", linewidth=1, linestyle="--", label=name)
    axes.set_title(chart.title, fontsize=10, loc="left")
    axes.set_xlabel("rank")
    axes.set_ylabel(chart.unit)
    axes.set_xlim(-0.6, len(chart.bars) - 0.4)
    axes.set_ylim(0, chart.top * 1.05)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize=8)

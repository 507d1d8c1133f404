"""A plan as a picture (matplotlib)."""

from __future__ import annotations

import io
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING

from shardrec.planner.report.content import Chart, Content, content

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from shardrec.layout.plan import ShardingPlan

# Okabe and Ito's colours, which the colour-blind can tell apart.
_COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00")


def to_png(plan: ShardingPlan, path: str | Path) -> None:
    """Draw the load and, if it is known, the memory per rank, one chart below the other, as PNG.

    Args:
        plan: any plan.
        path: of the file.
    """
    shown = content(plan)
    Path(path).write_bytes(picture(shown, heading="\n".join([shown.title, *wrap(shown.facts[0], 80)])))


def picture(shown: Content, heading: str = "") -> bytes:
    """The charts of a plan's report as a PNG file."""
    # The object interface: no window, no global state, no change of the caller's backend.
    from matplotlib.figure import Figure

    width = min(16.0, max(7.0, 3.5 + 0.16 * len(shown.charts[0].bars)))
    figure = Figure(figsize=(width, 3.4 * len(shown.charts) + 0.9 * bool(heading)), layout="constrained")
    figure.suptitle(heading, fontsize=10)
    for number, chart in enumerate(shown.charts):
        _bars(figure.add_subplot(len(shown.charts), 1, number + 1), chart)
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=120)
    return file.getvalue()


def _bars(axes: Axes, chart: Chart) -> None:
    from matplotlib.ticker import MaxNLocator

    ranks = range(len(chart.bars))
    below = [0.0] * len(chart.bars)
    for part, name in enumerate(chart.names):
        values = [bar[part] for bar in chart.bars]
        if any(values):
            colour = _COLOURS[part % len(_COLOURS)]
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

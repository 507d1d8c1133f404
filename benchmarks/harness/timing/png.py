"""A timing report as a picture (matplotlib): ratios, and steps over the floor. Growth as lines."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.harness.timing.record import BASE, CaseResult
from benchmarks.harness.timing.report import TimingReport

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["draw"]

_COLOURS = {"shardrec": "tab:blue", "torchrec": "tab:orange", "torch": "tab:green", "kernels": "tab:gray"}
_GROWTH = {"ranks": "ranks", "tables": "tables", "samples": "samples of a rank"}


def draw(report: TimingReport, path: Path) -> None:
    """Write the picture of a report that has at least one case with figures."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    measured = [result for result in report.results if result.is_measured]
    curves = {name: group for name in _GROWTH if len(group := [one for one in measured if one.case.group == name]) > 1}
    bars = [result for result in measured if result.case.group not in curves]
    panels = bool(bars) + len(curves)
    height = (0.28 * len(bars) + 2.2) * bool(bars) + 3.6 * len(curves)
    figure = Figure(figsize=(12, height), layout="constrained")
    FigureCanvasAgg(figure)
    ratios = [0.28 * len(bars) + 2.2] * bool(bars) + [3.6] * len(curves)
    rows = figure.subfigures(panels, 1, height_ratios=ratios, squeeze=False)[:, 0]
    if bars:
        left, right = rows[0].subplots(1, 2, sharey=True, width_ratios=(3, 2))
        _ratio_bars(left, bars)
        _floor_bars(right, bars)
    for place, (name, group) in zip(rows[bool(bars) :], curves.items(), strict=True):
        _curve(place.subplots(1, 1), name, group)
    figure.savefig(path, format="png", dpi=110)


def _ratio_bars(axes: Axes, results: Sequence[CaseResult]) -> None:
    """Time of each other side over shardrec's. Longer is better for shardrec."""
    sides = list(dict.fromkeys(side for result in results for side in result.case.sides if side != BASE))
    width = 0.8 / max(len(sides), 1)
    for number, side in enumerate(sides):
        found = [(place, r) for place, result in enumerate(results) if (r := result.ratio(side)) is not None]
        middles = [place - 0.4 + width * (number + 0.5) for place, _ in found]
        values = [ratio.median for _, ratio in found]
        errors = [[r.median - r.low for _, r in found], [r.high - r.median for _, r in found]]
        axes.barh(middles, values, height=width * 0.9, xerr=errors, color=_COLOURS[side], label=side, ecolor="black")
    axes.axvline(1.0, color="black", linewidth=1)
    axes.set_yticks(range(len(results)), [_label(result) for result in results], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(left=0)
    axes.set_title(f"time over {BASE}'s, median and range of the rounds", fontsize=10, loc="left")
    if sides:
        axes.legend(fontsize=8, frameon=False)
    axes.spines[["top", "right"]].set_visible(False)


def _floor_bars(axes: Axes, results: Sequence[CaseResult]) -> None:
    values = [result.over_floor() or 0.0 for result in results]
    axes.barh(range(len(results)), values, height=0.7, color=_COLOURS[BASE])
    axes.axvline(1.0, color="black", linewidth=1)
    axes.set_title(f"{BASE}'s step over the floor", fontsize=10, loc="left")
    axes.spines[["top", "right"]].set_visible(False)


def _curve(axes: Axes, name: str, results: Sequence[CaseResult]) -> None:
    for side in dict.fromkeys(side for result in results for side in result.case.sides):
        points = [(_size(name, result), step) for result in results if (step := result.step(side)) is not None]
        axes.plot(
            [size for size, _ in points],
            [step.median for _, step in points],
            marker="o",
            color=_COLOURS[side],
            label=side,
        )
    floors = [(_size(name, result), result.least_ms) for result in results]
    axes.plot(*zip(*floors, strict=True), color="black", linestyle="--", label="floor")
    axes.set(xscale="log", yscale="log", xlabel=_GROWTH[name], ylabel="ms of a step")
    axes.set_xticks([size for size, _ in floors], [f"{size:g}" for size, _ in floors])
    axes.minorticks_off()
    axes.set_title(f"growth with {_GROWTH[name]}, beginning with {_label(results[0])}", fontsize=10, loc="left")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)


def _size(name: str, result: CaseResult) -> int:
    case = result.case
    return {"ranks": case.ranks, "tables": len(case.tables), "samples": case.batch_size}[name]


def _label(result: CaseResult) -> str:
    case = result.case
    parts = [case.workload, case.layout, str(case.batch_size), case.mode]
    parts += [f"{case.ranks} rank{'s' * (case.ranks > 1)}"] * (case.ranks != 2)
    parts += [case.ids] * (case.ids != "uniform") + [case.optimizer] * (case.optimizer != "rowwise_adagrad")
    return " ".join([*parts, *case.surroundings])

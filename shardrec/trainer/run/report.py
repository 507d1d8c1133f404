"""What a run came to, as records, as a table, as ``metrics.json`` and as ``curve.png``."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Column, Table

import shardrec
from shardrec.trainer.data import ClickMetrics
from shardrec.trainer.run.option_groups import FEED
from shardrec.trainer.run.task_metrics import TaskMetrics

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_HEADLINES = ("/auc", "/r2", "/accuracy")
_SHOWN = ("/loss", "/logloss", "/normalized_entropy", "/gauc", "/mse", "/mae", *_HEADLINES)
_PACKAGES = ("torch", "fbgemm-gpu-cpu", "fbgemm-gpu", "torchrec", "numpy")


@dataclass(frozen=True, kw_only=True)
class CurvePoint:
    """The state of training at one point.

    Attributes:
        samples: rows trained on so far, over all ranks.
        seconds: training time so far, without evaluations.
        train_loss: rank 0's mean logloss since the point before, in nats per row. None where no step was made since.
        auc: held-out area under the ROC curve. None of several tasks, as the next two, and of rows with one label.
        logloss: held-out, in nats per row.
        normalized_entropy: held-out. None of rows with one label.
        rows: held-out rows behind them.
        gauc: held-out area under the ROC curve inside the groups. None without groups.
        ndcg: held-out normalized discounted cumulative gain of the groups' first ``top_k`` rows. None without groups.
        grad_norms: mean norm of the steps' gradients since the point before, of the ``dense`` part and of the
            ``tables``, before they were clipped. Empty without ``clip``.
        ids: per table with dynamic ids, by its plan name: the counts of :meth:`shardrec.ShardedModel.id_stats`,
            since the run began.
        tasks: held-out metrics of several tasks, as :attr:`TaskMetrics.values`. Empty of a single label.
        progressive: whether the metrics are of rows of a feed, scored before they were trained on, instead of held-out
            ones.
    """

    samples: int
    seconds: float
    train_loss: float | None
    auc: float | None = None
    logloss: float | None = None
    normalized_entropy: float | None = None
    rows: int
    gauc: float | None = None
    ndcg: float | None = None
    grad_norms: Mapping[str, float] = field(default_factory=dict)
    ids: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    tasks: Mapping[str, float | int | None] = field(default_factory=dict)
    progressive: bool = False

    def value(self, name: str) -> float | None:
        """A held-out metric, of a single label or of tasks."""
        return self.tasks[name] if name in self.tasks else getattr(self, name)


@dataclass(frozen=True, kw_only=True)
class RunReport:
    """A finished run.

    Attributes:
        config: the effective options.
        environment: versions, cores and ranks.
        source: the data, in words.
        curve: points in order. The last one is before the final evaluation.
        final: metrics of the trained model on the test files, or else on the held-out rows.
        optimum: the best metrics that any model can have on the same rows. None if unknown.
        samples: rows trained on, over all ranks.
        steps: optimizer steps.
        final_step: the step of the weights behind ``final``. With ``checkpoint="best"``, the best point's step.
        seconds: time of the steps, without evaluations.
        skipped: rows that were left out, by reason.
    """

    config: Mapping[str, object]
    environment: Mapping[str, object]
    source: str
    curve: Sequence[CurvePoint]
    final: ClickMetrics | TaskMetrics
    optimum: ClickMetrics | None
    samples: int
    steps: int
    final_step: int
    seconds: float
    skipped: Mapping[str, int]

    @property
    def final_rows(self) -> str:
        """Which rows ``final`` is of."""
        if self.config["test"]:
            return "test rows"
        return "last rows, scored before they were trained on" if self._of_feed else "held-out rows"

    @property
    def curve_rows(self) -> str:
        """Which rows the curve is of."""
        return "before training" if self._of_feed else "held out"

    @property
    def _of_feed(self) -> bool:
        return str(self.config["data"]).startswith(FEED)

    @property
    def samples_per_second(self) -> float:
        """Throughput of the steps, over all ranks."""
        return self.samples / max(self.seconds, 1e-9)

    @property
    def gap(self) -> float | None:
        """How much AUC is missing to the optimum, if there is one, and both labels among the rows."""
        if self.optimum is None or isinstance(self.final, TaskMetrics) or math.isnan(self.final.auc):
            return None
        return self.optimum.auc - self.final.auc


def shown_metric(value: float | None) -> str:
    """A metric as text."""
    return "undefined" if value is None or math.isnan(value) else f"{value:.4f}"


def held_out_values(metrics: ClickMetrics | TaskMetrics) -> dict[str, Any]:
    """The fields of a :class:`CurvePoint` that metrics have."""
    if isinstance(metrics, TaskMetrics):
        return {"tasks": metrics.values}
    mapping, ranking = metrics.to_mapping(), metrics.ranking
    values = {name: mapping[name] for name in ("auc", "logloss", "normalized_entropy")}
    return values if ranking is None else values | {"gauc": ranking.gauc, "ndcg": ranking.ndcg}


def task_values(values: Mapping[str, float | int | None], *, all_of_them: bool = True) -> dict[str, str]:
    """The metrics of tasks as text for people, or the loss and the first metric per task."""
    ends = _SHOWN if all_of_them else ("/loss", *_HEADLINES)
    chosen = [name for name in values if f"/{name}".endswith(ends)]
    return {name: shown_metric(values[name]) for name in chosen}


def environment(*, world_size: int, threads: int) -> dict[str, object]:
    """Versions of the libraries, and the machine's and the run's size."""
    versions = {"shardrec": shardrec.__version__}
    for package in _PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return {
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}",
        "cores": len(os.sched_getaffinity(0)),
        "ranks": world_size,
        "threads_per_rank": threads,
        "packages": versions,
    }


def metrics_table(report: RunReport) -> Table:
    """The final metrics beside the best possible ones and the gap between them.

    Logits that rank are not log odds. Without cross entropy of rows, metrics of probabilities are undefined.
    """
    final, optimum = report.final, report.optimum
    table = Table(report.final_rows, Column("model", justify="right"))
    if isinstance(final, TaskMetrics):
        for row in task_values(final.values).items():
            table.add_row(*row)
        return table
    for heading in ("best possible", "gap") if optimum is not None else ():
        table.add_column(heading, justify="right")
    shown = {"AUC": "auc"}
    if report.config["loss"] == "bce" or final.ranking is None:
        shown |= {"normalized entropy": "normalized_entropy", "logloss": "logloss"}
    for label, name in shown.items():
        value, best = (getattr(metrics, name, None) for metrics in (final, optimum))
        cells = [value] if best is None else [value, best, abs(best - value)]
        table.add_row(label, *map(shown_metric, cells))
    ranking = final.ranking
    if ranking is not None:
        table.add_row("GAUC", shown_metric(ranking.gauc))
        for label, value in (("NDCG", ranking.ndcg), ("recall", ranking.recall), ("hit rate", ranking.hit_rate)):
            table.add_row(f"{label}@{ranking.k}", f"{value:.4f}")
    return table


def summary_line(report: RunReport) -> str:
    """The run in one line, its optimum too where there is one."""
    final = report.final
    if isinstance(final, TaskMetrics):
        return ", ".join(f"{name} {text}" for name, text in task_values(final.values, all_of_them=False).items())
    if final.ranking is not None and final.ranking.gauc is not None:
        ranking = final.ranking
        return f"GAUC {ranking.gauc:.4f}, NDCG@{ranking.k} {ranking.ndcg:.4f}, AUC {shown_metric(final.auc)}"
    if report.optimum is None:
        shown = {"AUC": final.auc, "normalized entropy": final.normalized_entropy, "logloss": final.logloss}
    else:
        shown = {"AUC": final.auc, "best possible": report.optimum.auc, "gap": report.optimum.auc - final.auc}
    return ", ".join(f"{name} {shown_metric(value)}" for name, value in shown.items())


def write_metrics(report: RunReport, path: Path) -> None:
    """Write the whole report as JSON."""
    content = {
        "config": dict(report.config),
        "environment": dict(report.environment),
        "source": report.source,
        "skipped_rows": dict(report.skipped),
        "training": {
            "samples": report.samples,
            "steps": report.steps,
            "final_step": report.final_step,
            "seconds": report.seconds,
            "samples_per_second": report.samples_per_second,
        },
        "final": report.final.to_mapping(),
        "optimum": None if report.optimum is None else report.optimum.to_mapping(),
        "auc_gap": report.gap,
        "curve": [dataclasses.asdict(point) for point in report.curve],
    }
    path.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def write_curve(report: RunReport, path: Path) -> None:
    """Draw loss and held-out AUC against the rows trained on, with the optimum where there is one.

    Beside another loss than cross entropy stands no held-out logloss, and for rows in groups there is GAUC.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    samples = [point.samples for point in report.curve]
    trained = [(point.samples, point.train_loss) for point in report.curve if point.train_loss is not None]
    left.plot(*zip(*trained, strict=True), color="tab:gray", marker=".", label="training")
    if isinstance(report.final, TaskMetrics):
        _held_out(left, report, samples, "loss")
        left.set(title="Loss")
    elif report.config["loss"] == "bce":
        _held_out(left, report, samples, "logloss")
        left.set(title="Logloss", ylabel="nats per row")
    else:
        left.set(title=f"{report.config['loss']} loss")
    if isinstance(report.final, TaskMetrics):
        for name in filter(lambda name: name.endswith(_HEADLINES), report.final.values):
            right.plot(samples, [point.value(name) or math.nan for point in report.curve], marker="o", label=name)
        right.set(title="Held-out metrics")
    elif report.config["loss"] == "bce" or report.final.ranking is None:
        _held_out(right, report, samples, "auc")
        right.set(title=f"AUC, {report.curve_rows}", ylabel="AUC")
    else:
        right.plot(samples, [point.gauc for point in report.curve], color="tab:blue", marker="o", label="held out")
        right.set(title="Held-out GAUC", ylabel="GAUC")
    for axes in (left, right):
        axes.set_xlabel("samples")
        axes.set_xlim(left=0)
        axes.grid(alpha=0.3)
        axes.legend()
        axes.ticklabel_format(axis="y", useOffset=False)
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))  # 1500000 as 1.5M
    figure.suptitle(f"{report.final_rows}: {summary_line(report)}")
    figure.savefig(path, dpi=120)


def _held_out(axes: Axes, report: RunReport, samples: Sequence[int], name: str) -> None:
    values = [point.value(name) or math.nan for point in report.curve]
    axes.plot(samples, values, color="tab:blue", marker="o", markersize=4, label=report.curve_rows)
    if report.optimum is not None:
        best = getattr(report.optimum, name)
        axes.axhline(best, color="tab:green", linestyle="--", label=f"best possible {best:.4f}")

"""Shows a run's progress: a bar on a terminal, lines in a log, and nothing on ranks other than 0."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, closing, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, Task, TextColumn
from rich.text import Text

from shardrec.trainer.console import console
from shardrec.trainer.data import ClickMetrics
from shardrec.trainer.run.config import TrainConfig
from shardrec.trainer.run.report import CurvePoint, RunReport, metrics_table, shown_metric, summary_line, task_values
from shardrec.trainer.run.task_metrics import TaskMetrics

if TYPE_CHECKING:
    from shardrec import ShardingPlan
    from shardrec.launch import RankInfo

_LOG_PERIOD_S = 5.0
_OVERFITS = 0.99
"""Part of the last point's logloss. A run with a curve below this should have ended there."""


class Display:
    """Shows the progress of the training loop. This one, of all ranks but the first, nothing."""

    def advance(self, samples: int, seconds: float, loss: float, waits: float) -> None:
        """Show that ``samples`` rows, over all ranks, took ``seconds``.

        Args:
            samples: rows so far.
            seconds: time so far.
            loss: a recent mean, in nats per row.
            waits: share of the time since the last call that this rank has waited for data.
        """

    def evaluated(self, point: CurvePoint) -> None:
        """Show held-out metrics."""

    def keep(self, name: str, value: float, samples: int) -> None:
        """Keep a figure, after ``samples`` rows over all ranks."""

    def close(self) -> None:
        """The loop is over, or broken."""


class LogDisplay(Display):
    """Plain lines, at most one in five seconds but always one for held-out metrics; for files and CI logs."""

    def __init__(self, console: Console, total: int | None) -> None:
        self._console = console
        self._total = total
        self._next = time.monotonic() + _LOG_PERIOD_S

    def advance(self, samples: int, seconds: float, loss: float, waits: float) -> None:
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + _LOG_PERIOD_S
        of = f" of {self._total:,}" if self._total else ""
        pace = _pace(samples, seconds, self._total)
        self._line(f"{samples:>11,}{of} samples  loss {loss:.4f}  {pace}  waits for data {waits:.0%}")

    def evaluated(self, point: CurvePoint) -> None:
        self._line(_held_out(point))

    def _line(self, text: str) -> None:
        self._console.print(text, soft_wrap=True, highlight=False, markup=False)
        self._console.file.flush()


class TerminalDisplay(Display):
    """A progress bar that is redrawn in place. Held-out metrics scroll above it."""

    def __init__(self, console: Console, total: int | None) -> None:
        self._is_wide = console.width > 110
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("training" * self._is_wide),
            BarColumn(bar_width=40 if self._is_wide else 8),
            _Samples(),
            TextColumn("{task.fields[pace]}"),
            console=console,
            transient=True,
        )
        self._total = total
        self._task = self._progress.add_task("training", total=total, pace="")
        self._progress.start()

    def advance(self, samples: int, seconds: float, loss: float, waits: float) -> None:
        pace = f"loss {loss:.4f}  {_pace(samples, seconds, self._total)}"
        pace += f"  waits for data {waits:.0%}" * self._is_wide
        self._progress.update(self._task, completed=samples, pace=pace)

    def evaluated(self, point: CurvePoint) -> None:
        self._progress.console.print(_held_out(point), highlight=False)

    def close(self) -> None:
        self._progress.stop()


class _Samples(ProgressColumn):
    """Rows so far, of how many."""

    def render(self, task: Task) -> Text:
        total = f"/{int(task.total):,}" if task.total else ""
        return Text(f"{int(task.completed):,}{total}")


class Announcer:
    """Rank 0's output on stdout: the plan, the run, its progress and its results."""

    def __init__(self, *, speaks: bool = True) -> None:
        self._console = console(lossy=True) if speaks else Console(quiet=True)

    def say(self, text: str) -> None:
        """Lines of text."""
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)
        self._console.file.flush()

    def plan(self, plan: ShardingPlan) -> None:
        """The plan as a table."""
        from shardrec.planner import explain  # for the rank that prints

        self._console.print(explain(plan, reasons=False))

    def run(self, config: TrainConfig, rank_info: RankInfo, batch_size: int) -> None:
        """What is about to be trained, and on what."""
        size, threads = rank_info.world_size, rank_info.threads
        ranks = f"{size} rank{'s' * (size > 1)} with {threads} thread{'s' * (threads > 1)}"
        each = " each" * (size > 1)
        batches = f"{config.learning.accumulate} batches of " * (config.learning.accumulate > 1)
        self.say(f"training {config.model.name} on {ranks}{each}, {batches}{batch_size:,} rows a step on each rank")
        if config.ranks.compile != "off":
            self.say("torch.compile compiles in the first steps, and for evaluation: minutes without a line here")

    def display(self, total: int | None, around: Callable[[Display], Display]) -> AbstractContextManager[Display]:
        """A display for the training loop of ``total`` rows, inside of another, closed in the end."""
        out = self._console
        if out.quiet:
            return nullcontext(Display())
        return closing(around(TerminalDisplay(out, total) if out.is_terminal else LogDisplay(out, total)))

    def results(self, report: RunReport, folder: Path) -> None:
        """The final metrics and, in the last line, the gap to the best possible."""
        final, rows = report.final, f"{report.final.rows:,}"
        if report.config["ranking"] != "rows" and isinstance(final, ClickMetrics):
            self.say(f"{rows} clicked {report.final_rows}, each item ranked among {1 / final.click_rate:,.0f}")
        else:
            clicked = "" if isinstance(final, TaskMetrics) else f", {final.click_rate:.1%} clicked"
            self.say(f"{rows} {report.final_rows}{clicked}")
        self._console.print(metrics_table(report))
        for reason, count in report.skipped.items():
            self.say(f"left out {count:,} row{'s' * (count > 1)}: {reason}")
        self.say(
            f"{report.samples:,} samples in {duration(report.seconds)}, {report.samples_per_second:,.0f} samples/s; "
            f"results in {folder}"
        )
        if isinstance(final, ClickMetrics) and report.config["loss"] == "bce":
            self._advise(report, final)
        self.say(summary_line(report))

    def _advise(self, report: RunReport, final: ClickMetrics) -> None:
        """What is said of a run that has learned nothing, or overfits."""
        if final.normalized_entropy > 1:
            self.say(
                f"normalized entropy {final.normalized_entropy:.4f} is above 1: always predicting the click "
                "rate would be better. Train on more rows, or lower --embedding-lr and --lr"
            )
        best = min(report.curve, key=lambda point: point.logloss or 0.0, default=None)
        if (
            best is not None
            and best.normalized_entropy is not None
            and not best.progressive
            and (best.logloss or 0.0) < (report.curve[-1].logloss or 0.0) * _OVERFITS
        ):
            self.say(
                f"the held-out normalized entropy was {best.normalized_entropy:.4f} after {best.samples:,} samples and "
                f"{report.curve[-1].normalized_entropy:.4f} at the end: the model overfits{_advice(report)}"
            )


def _advice(report: RunReport) -> str:
    """Options that help a run that overfits, and that it was not given."""
    config = report.config
    advice = ["--patience, to end sooner"] if config["patience"] is None else []
    advice += ["fewer --epochs"] if config["epochs"] != 1 and config["patience"] is None else []
    kept = f". The final metrics are from step {report.final_step:,}"
    if config["checkpoint"] != "best":
        kept, advice = "", ["--checkpoint best, for the weights of the best point", *advice]
    decay = config["embedding_weight_decay"]
    assert isinstance(decay, float), "an option of a number"
    advice = advice or [f"--embedding-weight-decay {max(1e-5, 10 * decay):g}"]
    return f"{kept}. Give {'; or '.join(advice)}"


def _pace(samples: int, seconds: float, total: int | None) -> str:
    rate = samples / max(seconds, 1e-9)
    left = f"  {duration((total - samples) / rate)} left" if total and samples else ""
    return f"{rate:,.0f} samples/s{left}"


def _held_out(point: CurvePoint) -> str:
    ids = [_ids(table, counts) for table, counts in point.ids.items()]
    if point.tasks:
        values = "  ".join(f"{name} {text}" for name, text in task_values(point.tasks).items())
        return "\n".join([f"{point.samples:>11,} samples  held out: {values}", *ids])
    rows = "before training" if point.progressive else "held out"
    shown = {"AUC": point.auc, "logloss": point.logloss, "NE": point.normalized_entropy}
    if point.gauc is not None and point.ndcg is not None:
        shown = {"AUC": point.auc, "logloss": point.logloss, "GAUC": point.gauc, "NDCG": point.ndcg}
    metrics = "  ".join(f"{name} {shown_metric(value)}" for name, value in shown.items())
    return "\n".join([f"{point.samples:>11,} samples  {rows}: {metrics}", *ids])


def _ids(table: str, counts: Mapping[str, int]) -> str:
    lookups = max(counts["lookups"], 1)
    return (
        f"{'':>11} ids of {table}: {counts['hits'] / lookups:.1%} hits, {counts['fallbacks'] / lookups:.1%} fallbacks, "
        f"{counts['inserts']:,} inserts, {counts['evictions']:,} evictions, {counts['no_room']:,} without room, "
        f"{counts['used'] / counts['rows']:.1%} full"
    )


def duration(seconds: float) -> str:
    """``75.2`` as ``1:15``."""
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"

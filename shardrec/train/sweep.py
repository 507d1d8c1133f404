"""A sweep: runs over a grid of options and some seeds, compared on held-out rows; the best is then tested, once.

::

    DIR/lr=0.01,model_args.dropout=0.3/seed0/     a run's folder, as shardrec train writes it
                                                  test.json: metrics of the test files, of the best options only
    DIR/sweep.json, sweep.png                     all of them together

A finished run is one that has metrics. The same call goes on where it ended: finished runs are read, a run with a
checkpoint goes on from it.
"""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias
from urllib.parse import quote

from shardrec.data import load_spec
from shardrec.errors import ConfigError, ShardrecError
from shardrec.files import parse_yaml, read_json
from shardrec.launch.run import launched_rank
from shardrec.train.config import FILE, METRICS, TrainConfig
from shardrec.train.launch import train
from shardrec.train.runs import RunFolder

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["Setting", "Sweep", "mean_and_deviation", "parse_grid", "run_sweep", "sweep_table"]

_ARGUMENT = "model_args."
_OWN = {"seed": "--seeds", "out": "--out", "monitor": "--monitor", "test": "the file of options"}
_TEST = "test.json"

Grid: TypeAlias = Mapping[str, Sequence[Any]]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The runs with some values of the grid's options.

    Attributes:
        values: by option.
        scores: the monitored metric of each seed's run, on held-out rows; empty if a run has failed.
        fault: what the failed run said.
    """

    values: Mapping[str, Any]
    scores: Sequence[float]
    fault: str = ""

    @property
    def mean(self) -> float:
        """Of the scores; nan without any."""
        return statistics.fmean(self.scores) if self.scores else math.nan


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """A finished sweep.

    Attributes:
        metric: name of the monitored metric.
        settings: in the grid's order.
        best: the one with the best mean, the first of several.
        test: metrics of the test files by name, a value of each seed's run with the best setting; empty without files.
    """

    metric: str
    settings: Sequence[Setting]
    best: Setting
    test: Mapping[str, Sequence[float]]


def parse_grid(texts: Sequence[str]) -> dict[str, list[Any]]:
    """``["lr=0.1,0.01", "model_args.hidden=[64],[128, 64]"]`` as the values of each option, which are YAML.

    Raises:
        ConfigError: for another form, an option twice, a value twice, or an option that the sweep gives itself.
    """
    grid: dict[str, list[Any]] = {}
    for text in texts:
        name, _, listed = text.partition("=")
        name = name.strip() if name.startswith(_ARGUMENT) else name.strip().replace("-", "_")
        values = parse_yaml(f"[{listed}]", f"the values of grid (--grid) {name}")[0]
        if not name or not values:
            raise ConfigError(f"grid (--grid) is {text!r}: give OPTION=VALUE,VALUE, such as lr=0.1,0.01")
        if name in _OWN:
            raise ConfigError(f"grid (--grid) is {text!r}: a sweep takes {name} from {_OWN[name]}")
        if name in grid or any(value in values[:place] for place, value in enumerate(values)):
            raise ConfigError(f"grid (--grid) is {text!r}: give each option once, and each of its values")
        grid[name] = values
    return grid


def run_sweep(config: TrainConfig, grid: Grid, *, seeds: int, out: Path, debug: bool = False) -> Sweep:
    """Make the runs that are missing, then test the best setting's.

    Args:
        config: what the runs have in common; their ``monitor``, which is needed, is compared. Its test files are read
            for the best setting only.
        grid: values of options, or of ``model_args.NAME``.
        seeds: runs of each setting, with seeds from ``config.seed`` on.
        out: the sweep's folder.
        debug: keep tracebacks.

    Raises:
        ConfigError: for options that do not go together, a folder with runs of other options, under torchrun, or
            without a checkpoint to test.
        ShardrecError: if all settings have failed.
    """
    if launched_rank() is not None:
        raise ConfigError(
            "a sweep starts the ranks of its runs itself (nproc in the file of options): leave out torchrun"
        )
    if config.monitor is None:
        raise ConfigError("no metric to compare the runs by: give monitor (--monitor), such as auc or ndcg")
    if config.test is not None and config.checkpoint == "none":
        raise ConfigError("checkpoint is 'none', and the best setting is tested with its weights: give last or best")
    metric = {"ne": "normalized_entropy", "ndcg": f"ndcg@{config.top_k}"}.get(config.monitor, config.monitor)
    combinations = [dict(zip(grid, values, strict=True)) for values in product(*grid.values())]
    runs = [_runs(config, values, seeds, out) for values in combinations]
    for run in (run for of_setting in runs for run in of_setting):
        _check_folder(run)  # all of them before the first run
    settings: list[Setting] = []
    failure: ShardrecError | None = None
    for number, (values, of_setting) in enumerate(zip(combinations, runs, strict=True)):
        scores: list[float] = []
        fault = ""
        try:
            for place, run in enumerate(of_setting, 1 + number * seeds):
                scores.append(_score(run, metric, f"run {place} of {len(runs) * seeds}", debug))
        except ShardrecError as error:
            failure, fault, scores = error, str(error), []
            print(f"shardrec: {run.out} failed: {fault}", file=sys.stderr, flush=True)
        settings.append(Setting(values=values, scores=tuple(scores), fault=fault))
    if failure is not None and all(setting.fault for setting in settings):
        raise failure
    sign = -1 if metric in ("logloss", "normalized_entropy") else 1
    best = max(range(len(runs)), key=lambda place: (not settings[place].fault, sign * settings[place].mean))
    tests = [] if config.test is None else [_tested(Path(str(run.out)), config.test) for run in runs[best]]
    names = [name for name, value in (tests or [{}])[0].items() if isinstance(value, float)]
    test = {name: [float(result[name]) for result in tests] for name in names}
    sweep = Sweep(metric=metric, settings=settings, best=settings[best], test=test)
    _write(sweep, out)
    return sweep


def _runs(config: TrainConfig, values: Mapping[str, Any], seeds: int, out: Path) -> list[TrainConfig]:
    """A run for each seed, with some values of the grid."""
    arguments = {name.removeprefix(_ARGUMENT): value for name, value in values.items() if name.startswith(_ARGUMENT)}
    options = {name: value for name, value in values.items() if not name.startswith(_ARGUMENT)}
    run = config.changed(**options, model_args={**config.model_args, **arguments}, test=None)
    rows = run.global_batch_size or run.batch_size * run.nproc
    folder = out / (quote(_name(values), safe="=,.[]:+- ") or "runs")
    return [
        run.changed(global_batch_size=rows, seed=seed, out=str(folder / f"seed{seed}"))
        for seed in range(config.seed, config.seed + seeds)
    ]


def _check_folder(run: TrainConfig) -> None:
    """Raise a ConfigError if the run's folder holds one with other options or features."""
    if not Path(str(run.out), FILE).is_file():
        return
    started = RunFolder(Path(str(run.out))).config
    run.check_resumes({**started.to_mapping(), "features": run.features})
    if run.features and started.features and load_spec(Path(run.features)) != load_spec(Path(started.features)):
        raise ConfigError(
            f"features is {run.features!r}, which says something else than {started.features}, with which the run was "
            "started: give that one, or another folder (--out)"
        )


def _score(run: TrainConfig, metric: str, title: str, debug: bool) -> float:
    """The metric of a run, which is made unless it is finished."""
    folder = Path(str(run.out))
    if not (folder / METRICS).is_file():
        print(f"\n{title}: {folder}", flush=True)
        train(run, resume=(folder / FILE).is_file(), debug=debug)
    final = read_json(folder / METRICS)["final"]
    if not isinstance(final.get(metric), float):
        raise ConfigError(f"monitor is {run.monitor!r}, and the held-out rows have none: they have {', '.join(final)}")
    return float(final[metric])


def _tested(folder: Path, files: str) -> dict[str, Any]:
    """Metrics of the test files, computed once."""
    path = folder / _TEST
    if not path.is_file():
        metrics, _ = RunFolder(folder).evaluate(files)
        path.write_text(json.dumps(metrics.to_mapping(), indent=1) + "\n", encoding="utf-8")
    result: dict[str, Any] = read_json(path)
    return result


def _name(values: Mapping[str, Any]) -> str:
    """``lr=0.01,model_args.dropout=0.3``."""
    return ",".join(f"{option}={value}" for option, value in values.items())


def mean_and_deviation(scores: Sequence[float]) -> str:
    """``0.7466 ± 0.0013``: the mean and, of several, the standard deviation of a sample."""
    deviation = f" ± {statistics.stdev(scores):.4f}" if len(scores) > 1 else ""
    return f"{statistics.fmean(scores):.4f}{deviation}"


def sweep_table(sweep: Sweep) -> Table:
    """The settings, the best one marked, and the test metrics of that."""
    from rich.table import Table

    varied = [name for name in sweep.best.values if len({str(one.values[name]) for one in sweep.settings}) > 1]
    table = Table()
    for heading in (*varied, f"held-out {sweep.metric}", ""):
        table.add_column(heading)
    for setting in sweep.settings:
        shown = setting.fault.splitlines()[0] if setting.fault else mean_and_deviation(setting.scores)
        table.add_row(*(str(setting.values[name]) for name in varied), shown, "best" * (setting is sweep.best))
    for name, scores in sweep.test.items():
        table.add_row(*[""] * len(varied), mean_and_deviation(scores), f"test {name} of the best")
    return table


def _write(sweep: Sweep, out: Path) -> None:
    """``sweep.json`` and ``sweep.png``."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    content = {**dataclasses.asdict(sweep), "mean": sweep.best.mean}
    (out / "sweep.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    ranked = sorted((one for one in sweep.settings if one.scores), key=lambda one: one.mean)
    figure = Figure(figsize=(8, 1.5 + 0.3 * len(ranked)), layout="constrained")
    canvas, axes = FigureCanvasAgg(figure), figure.subplots()
    for place, setting in enumerate(ranked):
        color = "tab:green" if setting is sweep.best else "tab:blue"
        deviation = statistics.stdev(setting.scores) if len(setting.scores) > 1 else 0.0
        axes.plot(setting.scores, [place] * len(setting.scores), ".", color="tab:gray", markersize=4)
        axes.errorbar(setting.mean, place, xerr=deviation, fmt="o", color=color, capsize=3)
    axes.set_yticks(range(len(ranked)), [_name(setting.values).replace(_ARGUMENT, "") for setting in ranked])
    axes.set(
        xlabel=f"held-out {sweep.metric}",
        title=f"best {_name(sweep.best.values)}: {mean_and_deviation(sweep.best.scores)}",
    )
    axes.grid(alpha=0.3)
    axes.ticklabel_format(axis="x", useOffset=False)
    canvas.print_figure(out / "sweep.png", dpi=120)

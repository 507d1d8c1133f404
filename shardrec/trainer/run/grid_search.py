"""A sweep: runs over a grid of options and some seeds, compared on held-out rows. The best is tested when asked for.

::

    DIR/lr=0.01,model_args.dropout=0.3/seed0/     a run's folder, as shardrec train writes it
                                                  test.json: metrics of the test files, of the best options only
    DIR/sweep.json, sweep.png                     all of them together

The same call continues where it ended: runs that have metrics are read, and a run with a checkpoint continues from it.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from shardrec import ConfigError, ShardrecError
from shardrec.files import read_json
from shardrec.launch import launched_rank
from shardrec.trainer.data.spec import read_spec
from shardrec.trainer.run.config import FILE, METRICS, TrainConfig
from shardrec.trainer.run.launch import train
from shardrec.trainer.run.runs import RunFolder
from shardrec.trainer.yaml_files import parse_yaml

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["Sweep", "mean_and_deviation", "parse_grid", "run_sweep", "sweep_table"]

_ARGUMENT = "model_args."
_OWN = {"seed": "--seeds", "out": "--out", "monitor": "--monitor", "test": "the file of options"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sweep:
    """A finished sweep.

    Attributes:
        metric: what the settings were compared by, on held-out rows.
        scores: per setting, by its name, the metric of each seed's run. Settings that have failed are left out.
        best: name of the setting with the best mean.
        test: metrics of the test files, of each seed's run with the best setting. Empty without files or ``final``.
    """

    metric: str
    scores: Mapping[str, Sequence[float]]
    best: str
    test: Mapping[str, Sequence[float]]


def parse_grid(texts: Sequence[str]) -> dict[str, list[object]]:
    """``["lr=0.1,0.01", "model_args.hidden=[64],[128, 64]"]`` as the values per option, which are YAML.

    Raises:
        ConfigError: for another form, an option twice, a value twice, or an option that the sweep gives itself.
    """
    grid: dict[str, list[object]] = {}
    for text in texts:
        name, _, listed = text.partition("=")
        name = name.strip() if name.startswith(_ARGUMENT) else name.strip().replace("-", "_")
        values = parse_yaml(f"[{listed}]", f"the values of grid (--grid) {name}")[0]
        if not name or not isinstance(values, list) or not values:
            raise ConfigError(f"grid (--grid) is {text!r}: give OPTION=VALUE,VALUE, such as lr=0.1,0.01")
        if name in _OWN:
            raise ConfigError(f"grid (--grid) is {text!r}: a sweep takes {name} from {_OWN[name]}")
        if name in grid or any(value in values[:place] for place, value in enumerate(values)):
            raise ConfigError(f"grid (--grid) is {text!r}: give each option once, and each of its values")
        grid[name] = values
    return grid


def run_sweep(
    config: TrainConfig,
    grid: Mapping[str, Sequence[object]],
    *,
    seeds: int,
    out: Path,
    final: bool = False,
    debug: bool = False,
) -> Sweep:
    """Make the runs that are missing, and write the results.

    Args:
        config: what the runs have in common. They are compared by its ``monitor``, which is needed. Its test files are
            read for the best setting only, with ``final``.
        grid: values of options, or of ``model_args.NAME``.
        seeds: runs per setting, with seeds from ``config.learning.seed`` on.
        out: the sweep's folder.
        final: test the best setting's runs; without, no metric of the test files is computed.
        debug: keep tracebacks.

    Raises:
        ConfigError: without a monitor, or a checkpoint to test; if a folder has a run of other options. Under torchrun.
        ShardrecError: of the last run, if all settings have failed.
    """
    if launched_rank() is not None:
        raise ConfigError(
            "a sweep starts the ranks of its runs itself (nproc in the file of options): leave torchrun out"
        )
    if config.feed is not None:
        raise ConfigError(
            f"data is {config.data.files!r}, and a sweep compares runs by the same held-out rows, which a feed lacks: "
            "give its files, without 'feed:', and monitor (--monitor)"
        )
    features, test_files, monitor = config.data.features, config.data.test, config.learning.monitor
    labels = features is not None and bool(read_spec(Path(features)).labels)
    if labels and monitor is not None:
        raise ConfigError("runs of several labels are compared by their held-out loss: leave monitor (--monitor) out")
    if monitor is None and not labels:
        raise ConfigError("no metric to compare the runs by: give monitor (--monitor), such as auc or ndcg")
    if test_files is not None and config.output.checkpoint == "none":
        raise ConfigError("checkpoint is 'none', and the best setting is tested with its weights: give last or best")
    full_names = {"ne": "normalized_entropy", "ndcg": f"ndcg@{config.output.top_k}"}
    metric = "loss" if monitor is None else full_names.get(monitor, monitor)
    settings = [dict(zip(grid, values, strict=True)) for values in product(*grid.values())]
    runs = {_name(values): _runs(config, values, seeds, out) for values in settings}
    for run in (run for of_setting in runs.values() for run in of_setting):
        _check_folder(run)  # all of them before the first run
    scores: dict[str, list[float]] = {}
    for number, (name, of_setting) in enumerate(runs.items()):
        try:
            scores[name] = [
                _score(run, metric, f"run {place} of {len(runs) * seeds}", debug)
                for place, run in enumerate(of_setting, 1 + number * seeds)
            ]
        except ShardrecError as error:
            if number + 1 == len(runs) and not any(scores.values()):
                raise
            print(f"shardrec: {name} failed: {error}", file=sys.stderr, flush=True)
            scores[name] = []
    sign = -1 if metric in ("logloss", "normalized_entropy", "loss") else 1
    best = max((name for name in scores if scores[name]), key=lambda name: sign * fmean(scores[name]))
    tests = [_tested(Path(str(run.output.out)), test_files) for run in runs[best]] if test_files and final else []
    of_rows = ("click_rate", "auc_stderr")  # not of the model
    names = [name for name, value in (tests or [{}])[0].items() if isinstance(value, float) and name not in of_rows]
    test = {name: [float(metrics[name]) for metrics in tests] for name in names}
    sweep = Sweep(metric=metric, scores=scores, best=best, test=test)
    (out / "sweep.json").write_text(json.dumps(dataclasses.asdict(sweep), indent=1) + "\n", encoding="utf-8")
    _draw(sweep, out / "sweep.png")
    return sweep


def _name(values: Mapping[str, object]) -> str:
    return ",".join(f"{option}={value}" for option, value in values.items()) or "runs"


def _runs(config: TrainConfig, values: Mapping[str, object], seeds: int, out: Path) -> list[TrainConfig]:
    """A run for each seed, with some values of the grid."""
    arguments = {name.removeprefix(_ARGUMENT): value for name, value in values.items() if name.startswith(_ARGUMENT)}
    options = {name: value for name, value in values.items() if not name.startswith(_ARGUMENT)}
    run = config.changed(**options, model_args={**config.model.args, **arguments}, test=None)
    run = run.changed(global_batch_size=run.learning.global_batch_size or run.learning.batch_size * run.ranks.nproc)
    folder = out / quote(_name(values), safe="=,.[]:+- ")
    first = config.learning.seed
    return [run.changed(seed=seed, out=f"{folder}/seed{seed}") for seed in range(first, first + seeds)]


def _check_folder(run: TrainConfig) -> None:
    """Raise a ConfigError if the run's folder holds one with other options or features."""
    if not Path(str(run.output.out), FILE).is_file():
        return
    started = RunFolder(Path(str(run.output.out))).config
    features, before = run.data.features, started.data.features
    run.check_resumes({**started.to_mapping(), "features": features})
    if features and before and read_spec(Path(features)) != read_spec(Path(before)):
        raise ConfigError(f"features is {features!r}, which says something else than {before}: give --out")


def _score(run: TrainConfig, metric: str, title: str, debug: bool) -> float:
    """The metric of a run, which is made unless it is finished."""
    folder = Path(str(run.output.out))
    if not (folder / METRICS).is_file():
        print(f"\n{title}: {folder}", flush=True)
        train(run, resume=(folder / FILE).is_file(), debug=debug)
    score = read_json(folder / METRICS)["final"].get(metric)
    if score is None:
        raise ConfigError(
            f"monitor is {run.learning.monitor!r}, and the held-out rows of {folder} lack {metric}: give another"
        )
    return float(score)


def _tested(folder: Path, files: str) -> dict[str, Any]:
    """Metrics of the test files, computed once for each name of them."""
    path = folder / "test.json"
    result = read_json(path) if path.is_file() else {}
    if result.get("files") != files:
        metrics, _ = RunFolder(folder).evaluate(files)
        result = {"files": files, "metrics": metrics.to_mapping()}
        path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    tested: dict[str, Any] = result["metrics"]
    return tested


def mean_and_deviation(scores: Sequence[float]) -> str:
    """``0.7466 ± 0.0013``: the mean and, of several, the standard deviation of a sample."""
    return f"{fmean(scores):.4f}" + (f" ± {stdev(scores):.4f}" if len(scores) > 1 else "")


def sweep_table(sweep: Sweep) -> Table:
    """The settings, the best one marked, and its test metrics."""
    from rich.table import Table

    table = Table("setting", f"held-out {sweep.metric}", "")
    for name, scores in sweep.scores.items():
        table.add_row(name, mean_and_deviation(scores) if scores else "failed", "best" * (name == sweep.best))
    for name, scores in sweep.test.items():
        table.add_row("", mean_and_deviation(scores), f"test {name}")
    return table


def _draw(sweep: Sweep, path: Path) -> None:
    """Each setting's runs, their mean and deviation, the best setting on top."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    names = sorted((name for name in sweep.scores if sweep.scores[name]), key=lambda name: fmean(sweep.scores[name]))
    names = names if names[-1] == sweep.best else names[::-1]
    figure = Figure(figsize=(8, 1.5 + 0.3 * len(names)), layout="constrained")
    canvas, axes = FigureCanvasAgg(figure), figure.subplots()
    for place, scores in enumerate(sweep.scores[name] for name in names):
        axes.plot(scores, [place] * len(scores), ".", color="tab:gray")
        axes.errorbar(fmean(scores), place, xerr=stdev(scores) if len(scores) > 1 else 0, fmt="o", capsize=3)
    axes.set_yticks(range(len(names)), [name.replace(_ARGUMENT, "") for name in names])
    axes.set(xlabel=f"held-out {sweep.metric}", ylim=(-0.5, len(names) - 0.5))
    axes.set_title(f"best: {sweep.best}, {mean_and_deviation(sweep.scores[sweep.best])}")
    axes.grid(alpha=0.3)
    axes.ticklabel_format(axis="x", useOffset=False)
    canvas.print_figure(path, dpi=120)

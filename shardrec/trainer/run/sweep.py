"""A sweep: runs with values of some options and some seeds, compared on held-out rows. The best is tested when asked.

::

    DIR/lr=0.01,model_args.dropout=0.3/seed0/     a run's folder, as shardrec train writes it
                                                  test.json: metrics of the test files, of the best options only
                                       seed0.log  the run's output
    DIR/lr=0.01,...,epochs=2/seed0/               a short run of the same setting, by which it was stopped or kept
    DIR/sweep.json, sweep.png                     all of them together

Optuna draws the settings from a seed, and decides by their scores which ones are stopped. So the same call continues
where it ended, without a record of the search: finished runs are read, and a run with a checkpoint continues from it.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias
from urllib.parse import quote

from shardrec import ConfigError, ShardrecError
from shardrec.files import read_json
from shardrec.launch import check_extra, launched_rank
from shardrec.trainer.data.spec import read_spec
from shardrec.trainer.run.config import FILE, METRICS, TrainConfig
from shardrec.trainer.run.launch import train
from shardrec.trainer.run.runs import RunFolder
from shardrec.trainer.yaml_files import parse_yaml

if TYPE_CHECKING:
    from optuna import Trial
    from rich.table import Table

_ARGUMENT = "model_args."
_OWN = {"seed": "--seeds", "out": "--out", "monitor": "--monitor", "test": "the file of options"}
_LOWER_IS_BETTER = ("logloss", "normalized_entropy", "loss")
_REDUCTION = 3
"""Successive halving continues with one of this number of settings, for this number of times the epochs."""
_LONGEST_NAME = 200


class Range(NamedTuple):
    """Numbers between two, whole ones if both are, drawn by logarithm if ``high`` is ten times ``low`` or more."""

    low: float
    high: float

    def suggested(self, trial: Trial, name: str) -> float:
        """A number, drawn by Optuna; of fractions, one with three digits."""
        log = 0 < 10 * self.low <= self.high
        if isinstance(self.low, int) and isinstance(self.high, int):
            return trial.suggest_int(name, self.low, self.high, log=log)
        return float(f"{trial.suggest_float(name, self.low, self.high, log=log):.3g}")


Space: TypeAlias = Mapping[str, Sequence[object] | Range]
"""The values per option, by ``OPTION``, or by ``MODEL:OPTION`` for settings with that model alone."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sweep:
    """A finished sweep.

    Attributes:
        metric: what the settings were compared by, on held-out rows.
        scores: per setting, by its name, the metric of each seed's run. Empty where the setting has failed.
        stopped: the same of the settings that successive halving stopped, in the last epoch that they have had.
        best: name of the setting with the best mean.
        test: metrics of the test files, of each seed's run with the best setting. Empty without files or ``final``.
    """

    metric: str
    scores: Mapping[str, Sequence[float]]
    stopped: Mapping[str, Sequence[float]]
    best: str
    test: Mapping[str, Sequence[float]]


def parse_space(grids: Sequence[str], ranges: Sequence[str] = ()) -> dict[str, Sequence[object] | Range]:
    """The values per option that the flags of ``shardrec sweep`` name.

    Args:
        grids: such as ``"lr=0.1,0.01"`` or ``"dcn:model_args.hidden=[64],[128, 64]"``. The values are YAML.
        ranges: such as ``"lr=1e-4:1e-1"``.

    Raises:
        ConfigError: for another form, an option twice, a value twice, or an option that the sweep gives itself.
    """
    space: dict[str, Sequence[object] | Range] = {}
    for flag, text in [*(("grid", text) for text in grids), *(("range", text) for text in ranges)]:
        name, _, listed = text.partition("=")
        model, colon, option = name.strip().rpartition(":")
        option = option if option.startswith(_ARGUMENT) else option.replace("-", "_")
        values = _numbers(listed) if flag == "range" else parse_yaml(f"[{listed}]", f"the values of --grid {name}")[0]
        if not option or not values or not isinstance(values, (list, Range)):
            form = (
                "OPTION=LOW:HIGH, such as lr=1e-4:1e-1"
                if flag == "range"
                else "OPTION=VALUE,VALUE, such as lr=0.1,0.01"
            )
            raise ConfigError(f"{flag} (--{flag}) is {text!r}: give {form}")
        if option in _OWN:
            raise ConfigError(f"{flag} (--{flag}) is {text!r}: a sweep takes {option} from {_OWN[option]}")
        name = f"{model}{colon}{option}"
        if name in space or any(value in values[:place] for place, value in enumerate(values)):
            raise ConfigError(f"{flag} (--{flag}) is {text!r}: give each option once, and each of its values")
        space[name] = values
    return space


def _numbers(text: str) -> Range | None:
    ends = text.split(":")
    try:
        low, high = (int(end) if end.strip().lstrip("+-").isdecimal() else float(end) for end in ends)
    except ValueError:
        return None
    return Range(low, high) if -math.inf < low < high < math.inf else None


def run_sweep(
    config: TrainConfig,
    space: Space,
    *,
    seeds: int,
    out: Path,
    trials: int | None = None,
    halving: bool = False,
    final: bool = False,
    debug: bool = False,
) -> Sweep:
    """Make the runs that are missing, and write the results.

    Args:
        config: what the runs have in common. They are compared by its ``monitor``, which is needed. Its test files are
            read for the best setting only, with ``final``.
        space: values of options, or of ``model_args.NAME``.
        seeds: runs per setting, with seeds from ``config.learning.seed`` on.
        out: the sweep's folder.
        trials: settings to draw at random. None for all combinations.
        halving: train each setting for a ninth of the epochs first, then those among the best third of the settings so
            far for a third of the epochs, and then for all. Each is a new run, with its own decay of learning rates.
        final: test the best setting's runs; without, no metric of the test files is computed.
        debug: keep tracebacks.

    Raises:
        ConfigError: without a monitor, or a checkpoint to test; for a value that an option cannot have; if a folder has
            a run of other options. Under torchrun.
        VersionError: without Optuna.
        ShardrecError: of the last run, if all settings have failed.
    """
    check_extra("sweep")
    metric = _metric(config)
    _check_space(config, space, trials, halving, out)
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    scores: dict[str, list[float]] = {}
    stopped: dict[str, list[float]] = {}
    runs: dict[str, list[TrainConfig]] = {}
    failures: list[ShardrecError] = []
    epochs = sorted({-(-config.epochs // _REDUCTION**power) for power in range(3 if halving else 1)})

    def tried(trial: Trial) -> float:
        """The mean score of the setting that the trial draws; NaN if a run fails."""
        values = _drawn(trial, space, config.model.name)
        for rung, of_rung in enumerate(epochs):
            ends = of_rung == config.epochs
            name = _name(values if ends else {**values, "epochs": of_rung})
            runs[name] = _runs(_shorter(config, of_rung), values, seeds, _folder(out, name))
            for run in runs[name]:
                _check_folder(run)
            of_setting = scores if ends else stopped
            of_setting[name] = []
            try:
                of_setting[name] = [
                    _score(run, metric, f"{name}, seed {run.learning.seed}", debug) for run in runs[name]
                ]
            except ShardrecError as error:
                failures.append(error)
                print(f"shardrec: {name} failed: {error}", file=sys.stderr, flush=True)
                return math.nan
            if not ends:
                trial.report(fmean(stopped[name]), _REDUCTION**rung)
                if trial.should_prune():
                    print(f"{name}: stopped", flush=True)
                    raise optuna.TrialPruned
                del stopped[name]
        return fmean(scores[name])

    sign = -1 if metric in _LOWER_IS_BETTER else 1
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        is_random = any(isinstance(values, Range) for values in space.values())
        sampler = optuna.samplers.RandomSampler if is_random else optuna.samplers.BruteForceSampler
        study = optuna.create_study(
            sampler=sampler(seed=config.learning.seed),
            pruner=optuna.pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=_REDUCTION),
            direction="minimize" if sign < 0 else "maximize",
        )
        study.optimize(tried, n_trials=trials)
    if not any(scores.values()):
        raise failures[-1]
    best = max((name for name in scores if scores[name]), key=lambda name: sign * fmean(scores[name]))
    test_files = config.data.test
    tests = [_tested(Path(str(run.output.out)), test_files) for run in runs[best]] if test_files and final else []
    of_rows = ("click_rate", "auc_stderr")  # not of the model
    names = [name for name, value in (tests or [{}])[0].items() if isinstance(value, float) and name not in of_rows]
    test = {name: [float(metrics[name]) for metrics in tests] for name in names}
    sweep = Sweep(metric=metric, scores=scores, stopped=stopped, best=best, test=test)
    (out / "sweep.json").write_text(json.dumps(dataclasses.asdict(sweep), indent=1) + "\n", encoding="utf-8")
    _draw(sweep, out / "sweep.png")
    return sweep


def _metric(config: TrainConfig) -> str:
    """What the runs are compared by."""
    if launched_rank() is not None:
        raise ConfigError(
            "a sweep starts the ranks of its runs itself (nproc in the file of options): leave torchrun out"
        )
    if config.feed is not None:
        raise ConfigError(
            f"data is {config.data.files!r}, and a sweep compares runs by the same held-out rows, which a feed lacks: "
            "give its files, without 'feed:', and monitor (--monitor)"
        )
    features, monitor = config.data.features, config.learning.monitor
    labels = features is not None and bool(read_spec(Path(features)).labels)
    if labels and monitor is not None:
        raise ConfigError("runs of several labels are compared by their held-out loss: leave monitor (--monitor) out")
    if monitor is None and not labels:
        raise ConfigError("no metric to compare the runs by: give monitor (--monitor), such as auc or ndcg")
    if config.data.test is not None and config.output.checkpoint == "none":
        raise ConfigError("checkpoint is 'none', and the best setting is tested with its weights: give last or best")
    full_names = {"ne": "normalized_entropy", "ndcg": f"ndcg@{config.output.top_k}"}
    return "loss" if monitor is None else full_names.get(monitor, monitor)


def _check_space(config: TrainConfig, space: Space, trials: int | None, halving: bool, out: Path) -> None:
    """Raise a ConfigError for an option or a value that no run can have, before the first run."""
    ranged = [name for name, values in space.items() if isinstance(values, Range)]
    if ranged and trials is None:
        raise ConfigError(f"range (--range) has {ranged[0]}, of which there is no last value: give trials (--trials)")
    if halving and (config.epochs < 2 or any(name.rpartition(":")[2] == "epochs" for name in space)):
        raise ConfigError(
            f"halving (--halving) gives settings some of the epochs first, and epochs is {config.epochs}: give 2 or "
            "more in the file of options, and no values of it"
        )
    models = space.get("model", [config.model.name])
    for name, values in space.items():
        model, _, option = name.rpartition(":")
        if model and model not in models:
            raise ConfigError(
                f"{name} is for model {model!r}, which the sweep does not try: add it to --grid model=..."
            )
        for value in values:
            _runs(config, {**({"model": model} if model else {}), option: value}, 1, out)


def _drawn(trial: Trial, space: Space, model: str) -> dict[str, object]:
    """A setting. The model's own values of an option replace those of all models."""
    drawn: dict[str, object] = {}
    for option in dict.fromkeys(["model", *(name.rpartition(":")[2] for name in space)]):
        of_model = f"{drawn.get('model', model)}:{option}"
        name = of_model if of_model in space else option
        values = space.get(name, ())
        if isinstance(values, Range):
            drawn[option] = values.suggested(trial, name)
        elif values:
            drawn[option] = values[trial.suggest_categorical(name, range(len(values)))]
    return drawn


def _shorter(config: TrainConfig, epochs: int) -> TrainConfig:
    """With fewer epochs, and points of the curve as far from each other."""
    return config.changed(epochs=epochs, evaluations=-(-config.output.evaluations * epochs // config.epochs))


def _name(values: Mapping[str, object]) -> str:
    return ",".join(f"{option}={value}" for option, value in values.items()) or "runs"


def _folder(out: Path, name: str) -> Path:
    quoted = quote(name, safe="=,.[]:+- ")
    return out / (
        quoted if len(quoted) <= _LONGEST_NAME else f"{quoted[:_LONGEST_NAME]}~{sha256(name.encode()).hexdigest()[:8]}"
    )


def _runs(config: TrainConfig, values: Mapping[str, object], seeds: int, folder: Path) -> list[TrainConfig]:
    """A run for each seed, with some values of options."""
    arguments = {name.removeprefix(_ARGUMENT): value for name, value in values.items() if name.startswith(_ARGUMENT)}
    options = {name: value for name, value in values.items() if not name.startswith(_ARGUMENT)}
    run = config.changed(**options, model_args={**config.model.args, **arguments}, test=None)
    run = run.changed(global_batch_size=run.learning.global_batch_size or run.learning.batch_size * run.ranks.nproc)
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
    """The metric of a run, which is made unless it is finished, in a line."""
    folder = Path(str(run.output.out))
    is_new = not (folder / METRICS).is_file()
    if is_new:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _output_to(folder.with_suffix(".log")):
            train(run, resume=(folder / FILE).is_file(), debug=debug)
    results = read_json(folder / METRICS)
    score = results["final"].get(metric)
    if score is None:
        raise ConfigError(
            f"monitor is {run.learning.monitor!r}, and the held-out rows of {folder} lack {metric}: give another"
        )
    seconds = f"{results['training']['seconds']:.0f} s" if is_new else "as before"
    print(f"{title}: held-out {metric} {score:.4f}, {seconds}", flush=True)
    return float(score)


@contextmanager
def _output_to(path: Path) -> Iterator[None]:
    """What this process, and the ranks that it starts, write to stdout and stderr goes to the end of a file."""
    streams = (sys.stdout, sys.stderr)
    for stream in streams:
        stream.flush()
    kept = [os.dup(number) for number in (1, 2)]
    try:
        with path.open("ab") as file:
            for number in (1, 2):
                os.dup2(file.fileno(), number)
        yield
    finally:
        for stream, number, copy in zip(streams, (1, 2), kept, strict=True):
            stream.flush()
            os.dup2(copy, number)
            os.close(copy)


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
    for name, scores in sweep.stopped.items():
        table.add_row(name, mean_and_deviation(scores) if scores else "failed", "stopped")
    for name, scores in sweep.test.items():
        table.add_row("", mean_and_deviation(scores), f"test {name}")
    return table


def _draw(sweep: Sweep, path: Path) -> None:
    """Each setting's runs, their mean and deviation, the best setting on top."""
    from matplotlib.figure import Figure

    names = sorted((name for name in sweep.scores if sweep.scores[name]), key=lambda name: fmean(sweep.scores[name]))
    names = names if names[-1] == sweep.best else names[::-1]
    figure = Figure(figsize=(8, 1.5 + 0.3 * len(names)), layout="constrained")
    axes = figure.subplots()
    for place, scores in enumerate(sweep.scores[name] for name in names):
        axes.plot(scores, [place] * len(scores), ".", color="tab:gray")
        axes.errorbar(fmean(scores), place, xerr=stdev(scores) if len(scores) > 1 else 0, fmt="o", capsize=3)
    axes.set_yticks(range(len(names)), [name.replace(_ARGUMENT, "") for name in names])
    axes.set(xlabel=f"held-out {sweep.metric}", ylim=(-0.5, len(names) - 0.5))
    axes.set_title(f"best: {sweep.best}, {mean_and_deviation(sweep.scores[sweep.best])}")
    axes.grid(alpha=0.3)
    axes.ticklabel_format(axis="x", useOffset=False)
    figure.savefig(path, dpi=120)

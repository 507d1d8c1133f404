"""``shardrec sweep``: each run once, also after an interruption; the test files read for the best setting only."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

from shardrec.errors import ConfigError
from shardrec.trainer.run import TrainConfig, sweep
from shardrec.trainer.run.runs import RunFolder
from shardrec.trainer.run.sweep import Range, mean_and_deviation, parse_space, run_sweep
from tests.trainer.cli.command import Run


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a few rows of training, validation and test, and their features."""
    folder, draws = tmp_path_factory.mktemp("rows"), Random(0)
    for name, count in {"train": 300, "valid": 200, "test": 200}.items():
        lines = []
        for _ in range(count):
            user, price = draws.randrange(20), draws.random()
            lines.append(f"{int(draws.random() < (user % 5 + price) / 6)},{user},{price}\n")
        (folder / f"{name}.csv").write_text("".join(["label,user,price\n", *lines]), encoding="utf-8")
    spec = "features:\n  - {name: user, kind: id, rows: 30}\n  - {name: price, kind: dense}\n"
    (folder / "features.yaml").write_text(spec, encoding="utf-8")
    return folder


@pytest.fixture
def options(rows: Path, tmp_path: Path) -> Path:
    """A file of options for those rows."""
    path = tmp_path / "run.yaml"
    files = f"data: {rows}/train.csv\nvalid: {rows}/valid.csv\nfeatures: {rows}/features.yaml\n"
    small = "embedding_dim: 4\nbatch_size: 64\nevaluations: 1\nmodel: dnn\n"
    path.write_text(f"{files}test: {rows}/test.csv\n{small}", encoding="utf-8")
    return path


class Counted:
    """Stands for :func:`shardrec.trainer.run.train`; can be stopped before a run."""

    def __init__(self, stopped_at: int | None = None) -> None:
        self.folders: list[str] = []
        self.stopped_at = stopped_at

    def __call__(self, config: TrainConfig, **settings: Any) -> None:
        from shardrec.trainer.run import train

        if len(self.folders) == self.stopped_at:
            raise KeyboardInterrupt
        self.folders.append("/".join(Path(str(config.output.out)).parts[-2:]))
        train(config, **settings)


def final_of(folder: Path, metric: str) -> float:
    metrics = json.loads((folder / "metrics.json").read_text(encoding="utf-8"))
    assert metrics["config"]["test"] is None, "a run of a sweep knows the test files"
    return float(metrics["final"][metric])


def test_each_run_is_made_once(
    run: Run, options: Path, rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    grid = ("--grid", "lr=0.001,0.1", "--grid", "model_args.hidden=[4, 4]")
    command = ("sweep", str(options), *grid, "--seeds", "2", "--monitor", "ne", "--out", str(out))
    first, rest = Counted(stopped_at=3), Counted()
    monkeypatch.setattr(sweep, "train", first)
    code, _, errors = run(*command)
    assert code == 130
    assert "the same command" in errors
    monkeypatch.setattr(sweep, "train", rest)
    code, shown, errors = run(*command)
    assert (code, errors) == (0, "")
    assert "not tested without --final" in shown
    assert not [*out.rglob("test.json")]
    command = (*command, "--final")
    code, shown, errors = run(*command)
    assert (code, errors) == (0, "")
    settings = [f"lr={lr},model_args.hidden=[4, 4]" for lr in (0.001, 0.1)]
    made = first.folders + rest.folders
    assert {*made} == {f"{setting}/seed{seed}" for setting in settings for seed in (0, 1)}
    assert len(re.findall(r"seed [01]: held-out normalized_entropy \d\.\d{4}, as before$", shown, re.M)) == len(made)
    scores = [
        [final_of(out / setting / f"seed{seed}", "normalized_entropy") for seed in (0, 1)] for setting in settings
    ]
    best = min((0, 1), key=lambda place: statistics.fmean(scores[place]))
    results = json.loads((out / "sweep.json").read_text(encoding="utf-8"))
    assert results["scores"] == dict(zip(settings, scores, strict=True))
    assert results["stopped"] == {}
    assert results["best"] == settings[best]
    assert [*out.rglob("test.json")] == [*(out / settings[best]).rglob("test.json")]
    tested = [
        RunFolder(out / settings[best] / f"seed{seed}").evaluate(str(rows / "test.csv"))[0].auc for seed in (0, 1)
    ]
    assert results["test"]["auc"] == tested
    assert mean_and_deviation(tested) in shown
    assert mean_and_deviation(scores[best]) in re.sub(r"[^\S ]+", " ", shown)
    assert (out / "sweep.png").read_bytes().startswith(b"\x89PNG")

    def again(*_: Any) -> None:
        raise AssertionError("the test files are read again")

    monkeypatch.setattr(RunFolder, "evaluate", again)
    code, once_more, _ = run(*command)
    assert (code, once_more[-200:]) == (0, shown[-200:])
    assert len(made) == 4


def test_a_setting_that_fails_is_left_out(run: Run, options: Path, tmp_path: Path) -> None:
    command = ("sweep", str(options), "--seeds", "1", "--monitor", "auc", "--out", str(tmp_path / "out"))
    code, shown, errors = run(*command, "--grid", "model_args.hidden=[8],[-8]")
    assert code == 0
    assert "hidden is [-8]" in errors
    assert re.search(r"\[8\].*best", shown)
    code, _, errors = run(*command, "--grid", "model_args.hidden=[-8],[-4]")
    assert code == 1
    assert re.search(r"error: .*hidden is \[-[48]\]", errors.splitlines()[-1])


def test_a_sweep_without_test_files_says_so(run: Run, options: Path, tmp_path: Path) -> None:
    options.write_text(re.sub("test: .*\n", "", options.read_text(encoding="utf-8")), encoding="utf-8")
    flags = ("--grid", "lr=0.01", "--seeds", "1", "--monitor", "auc", "--out", str(tmp_path / "out"))
    code, shown, _ = run("sweep", str(options), *flags)
    assert code == 0
    assert "names no test files" in shown


def test_a_feed_has_no_rows_to_compare_by(run: Run, options: Path, tmp_path: Path) -> None:
    options.write_text(f"data: feed:{tmp_path}\nfeed_idle: 0\n", encoding="utf-8")
    code, _, said = run("sweep", str(options), "--grid", "lr=0.1", "--monitor", "auc", "--out", str(tmp_path / "out"))
    assert code != 0
    assert "a sweep compares runs by the same held-out rows, which a feed lacks: give its files" in said


@pytest.mark.parametrize(
    ("texts", "words"),
    [
        (["lr"], "give OPTION=VALUE,VALUE"),
        (["lr="], "give OPTION=VALUE,VALUE"),
        (["=1"], "give OPTION=VALUE,VALUE"),
        (["lr=0.1,0.1"], "each of its values"),
        (["lr=0.1", "lr=0.2"], "each option once"),
        (["seed=1,2"], "a sweep takes seed from --seeds"),
        (["lr=[1"], "--grid"),
    ],
)
def test_grids_that_cannot_be(texts: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        parse_space(texts)


def test_grid_values_are_yaml() -> None:
    grid = parse_space(["embedding-lr=0.1,1e-2", "model_args.hidden=[64],[128, 64]", "model=dnn"])
    assert grid == {"embedding_lr": [0.1, "1e-2"], "model_args.hidden": [[64], [128, 64]], "model": ["dnn"]}


@pytest.mark.parametrize("text", ["lr=1", "lr=1:2:3", "lr=2:1", "lr=a:b", "lr=0:inf", "lr=0.1,0.2"])
def test_ranges_that_cannot_be(text: str) -> None:
    with pytest.raises(ConfigError, match="give OPTION=LOW:HIGH"):
        parse_space([], [text])


def test_ranges_are_of_numbers() -> None:
    space = parse_space(["model=dcn,own.layers:Net"], ["lr=1e-4:1", "own.layers:Net:model_args.depth=1:4"])
    assert space["lr"] == Range(1e-4, 1.0)
    assert space["own.layers:Net:model_args.depth"] == Range(1, 4)
    assert isinstance(space["own.layers:Net:model_args.depth"][0], int)


@pytest.fixture
def scored(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[[Callable[[TrainConfig], float]], list[TrainConfig]]:
    """Lets a function stand for the runs, without a drawing. Returns the list of the runs that were made."""
    monkeypatch.setattr(sweep, "_draw", lambda result, path: None)

    def stand(score: Callable[[TrainConfig], float]) -> list[TrainConfig]:
        made: list[TrainConfig] = []

        def run(config: TrainConfig, **settings: Any) -> None:
            made.append(config)
            folder = Path(str(config.output.out))
            folder.mkdir(parents=True)
            (folder / "config.yaml").write_text(config.to_yaml(), encoding="utf-8")
            metrics = {"final": {"auc": score(config)}, "training": {"seconds": 1.0}}
            (folder / "metrics.json").write_text(json.dumps(metrics), encoding="utf-8")

        monkeypatch.setattr(sweep, "train", run)
        return made

    return stand


Stand = Callable[[Callable[[TrainConfig], float]], list[TrainConfig]]


def test_a_model_has_settings_of_its_own(scored: Stand, tmp_path: Path) -> None:
    made = scored(lambda run: run.learning.lr)
    space = parse_space(["model=dcn,dnn,dlrm", "lr=0.1,0.2", "dnn:lr=0.3", "dnn:model_args.hidden=[4],[8]"])
    run_sweep(TrainConfig(monitor="auc"), space, seeds=1, out=tmp_path)
    of_dnn = {("dnn", 0.3, (4,)), ("dnn", 0.3, (8,))}
    others = {(model, lr, None) for model in ("dcn", "dlrm") for lr in (0.1, 0.2)}
    tried = [(run.model.name, run.learning.lr, run.model.args.get("hidden")) for run in made]
    assert sorted(map(str, tried)) == sorted(
        str((*each[:2], list(each[2]) if each[2] else None)) for each in of_dnn | others
    )


def test_random_settings_continue_where_they_ended(scored: Stand, tmp_path: Path) -> None:
    made = scored(lambda run: run.learning.lr)
    space = parse_space(["batch_size=32,64"], ["lr=1e-4:1e-1", "model_args.depth=1:4"])
    config = TrainConfig(monitor="auc", model="own:Net")
    run_sweep(config, space, seeds=1, out=tmp_path, trials=3)
    first = [run.output.out for run in made]
    assert len(set(first)) == 3
    assert all(1e-4 <= run.learning.lr <= 1e-1 and run.model.args["depth"] in (1, 2, 3, 4) for run in made)
    result = run_sweep(config, space, seeds=1, out=tmp_path, trials=8)
    assert [run.output.out for run in made][:3] == first
    assert len(made) == len(result.scores) == 8
    assert result.scores[result.best] == [max(run.learning.lr for run in made)]
    with pytest.raises(ConfigError, match=r"give trials \(--trials\)"):
        run_sweep(config, space, seeds=1, out=tmp_path)


def test_halving_trains_the_best_for_all_epochs(scored: Stand, tmp_path: Path) -> None:
    made = scored(lambda run: run.learning.lr * (1 + run.epochs / 100))
    config = TrainConfig(monitor="auc", epochs=18, evaluations=18)
    rates = [rate / 100 for rate in range(1, 13)]
    result = run_sweep(config, {"lr": rates}, seeds=1, out=tmp_path, halving=True)
    runs = {epochs: [run.learning.lr for run in made if run.epochs == epochs] for epochs in (2, 6, 18)}
    assert sorted(runs[2]) == rates
    assert {*runs[18]} < {*runs[6]} < {*rates}
    assert len(made) * 18 / 2 > sum(run.epochs for run in made)  # less than half of the epochs of a whole sweep
    assert max(rates) in runs[18]
    assert result.best == f"lr={max(rates)}"
    assert len(result.scores) + len(result.stopped) == len(rates)
    assert all(run.output.evaluations == run.epochs for run in made)
    count = len(made)
    assert run_sweep(config, {"lr": rates}, seeds=1, out=tmp_path, halving=True) == result
    assert len(made) == count
    with pytest.raises(ConfigError, match="epochs is 1"):
        run_sweep(config.changed(epochs=1), {"lr": rates}, seeds=1, out=tmp_path, halving=True)


def test_sweeps_that_cannot_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ready = TrainConfig(monitor="auc", samples=64)
    for config, grid, words in (
        (TrainConfig(), {"lr": [0.1]}, "no metric to compare"),
        (ready.changed(data="rows.csv", test="test.csv", checkpoint="none"), {"lr": [0.1]}, "give last or best"),
        (ready, {"lr": [0.1, -1]}, "lr (--lr) is -1"),
        (ready, {"rate": [0.1]}, "rate (--rate) is not an option"),
        (ready, {"dnn:lr": [0.1]}, "for model 'dnn', which the sweep does not try"),
    ):
        with pytest.raises(ConfigError, match=re.escape(words)):
            run_sweep(config, grid, seeds=1, out=tmp_path)
    folder = tmp_path / "lr=0.1" / "seed0"
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(ready.changed(batch_size=7).to_yaml(), encoding="utf-8")
    with pytest.raises(ConfigError, match="batch_size"):
        run_sweep(ready, {"lr": [0.1]}, seeds=1, out=tmp_path)
    spec = tmp_path / "features.yaml"
    spec.write_text("features: [{name: user, kind: id, rows: 9}]\n", encoding="utf-8")
    of_files = ready.changed(data="rows.csv", features=str(spec))
    (folder / "config.yaml").write_text(of_files.changed(global_batch_size=2048, lr=0.1).to_yaml(), encoding="utf-8")
    (folder / "features.yaml").write_text("features: [{name: user, kind: id, rows: 8}]\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="says something else"):
        run_sweep(of_files, {"lr": [0.1]}, seeds=1, out=tmp_path)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="torchrun"):
        run_sweep(ready, {"lr": [0.1]}, seeds=1, out=tmp_path)

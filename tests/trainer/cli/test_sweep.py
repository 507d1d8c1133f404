"""``shardrec sweep``: each run once, also after an interruption; the test files read for the best setting only."""

from __future__ import annotations

import json
import re
import statistics
from pathlib import Path
from typing import Any

import pytest

from shardrec.errors import ConfigError
from shardrec.trainer.data import write_criteo_tsv
from shardrec.trainer.run import TrainConfig
from shardrec.trainer.run import grid_search as sweep
from shardrec.trainer.run.grid_search import mean_and_deviation, parse_grid, run_sweep
from shardrec.trainer.run.runs import RunFolder
from tests.trainer.cli.command import Run


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a few rows of training, validation and test."""
    folder = tmp_path_factory.mktemp("rows")
    for seed, (name, count) in enumerate({"train": 300, "valid": 200, "test": 200}.items()):
        write_criteo_tsv(folder / f"{name}.tsv", count, seed=seed)
    return folder


@pytest.fixture
def options(rows: Path, tmp_path: Path) -> Path:
    """A file of options for those rows."""
    path = tmp_path / "run.yaml"
    files = "".join(f"{key}: {rows}/{name}.tsv\n" for key, name in (("data", "train"), ("valid", "valid")))
    small = "max_embeddings: 50\nembedding_dim: 4\nbatch_size: 64\nevaluations: 1\nmodel: dnn\n"
    path.write_text(f"{files}test: {rows}/test.tsv\n{small}", encoding="utf-8")
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
    assert first.folders + rest.folders == [f"{setting}/seed{seed}" for setting in settings for seed in (0, 1)]
    scores = [
        [final_of(out / setting / f"seed{seed}", "normalized_entropy") for seed in (0, 1)] for setting in settings
    ]
    best = min((0, 1), key=lambda place: statistics.fmean(scores[place]))
    results = json.loads((out / "sweep.json").read_text(encoding="utf-8"))
    assert results["scores"] == dict(zip(settings, scores, strict=True))
    assert results["best"] == settings[best]
    assert [*out.rglob("test.json")] == [*(out / settings[best]).rglob("test.json")]
    tested = [
        RunFolder(out / settings[best] / f"seed{seed}").evaluate(str(rows / "test.tsv"))[0].auc for seed in (0, 1)
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
    assert len(first.folders + rest.folders) == 4


def test_a_setting_that_fails_is_left_out(run: Run, options: Path, tmp_path: Path) -> None:
    command = ("sweep", str(options), "--seeds", "1", "--monitor", "auc", "--out", str(tmp_path / "out"))
    code, shown, errors = run(*command, "--grid", "model_args.hidden=[8],[-8]")
    assert code == 0
    assert "hidden is [-8]" in errors
    assert re.search(r"\[8\].*best", shown)
    code, _, errors = run(*command, "--grid", "model_args.hidden=[-8],[-4]")
    assert code == 1
    assert "hidden is [-4]" in errors.splitlines()[-1]


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
        parse_grid(texts)


def test_grid_values_are_yaml() -> None:
    grid = parse_grid(["embedding-lr=0.1,1e-2", "model_args.hidden=[64],[128, 64]", "model=dnn"])
    assert grid == {"embedding_lr": [0.1, "1e-2"], "model_args.hidden": [[64], [128, 64]], "model": ["dnn"]}


def test_sweeps_that_cannot_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ready = TrainConfig(monitor="auc", samples=64)
    for config, grid, words in (
        (TrainConfig(), {"lr": [0.1]}, "no metric to compare"),
        (ready.changed(data="rows.csv", test="test.csv", checkpoint="none"), {"lr": [0.1]}, "give last or best"),
        (ready, {"lr": [0.1, -1]}, "lr (--lr) is -1"),
        (ready, {"rate": [0.1]}, "rate (--rate) is not an option"),
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

"""The planted clicks: their parts, their optimum, and the example's own options on few of them."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from werkzeug.test import Client

from examples.planted_ctr import make
from shardrec.trainer.cli import main
from shardrec.trainer.run import load_config
from shardrec.trainer.run.runs import RunFolder


def test_rows_are_drawn_in_parts_with_the_optimum_of_each(tmp_path: Path) -> None:
    optimum = make.write(tmp_path, 3000, seed=0)
    assert json.loads((tmp_path / "optimum.json").read_text()) == optimum
    assert make.write(tmp_path, 3000, seed=1) != optimum
    parts = {part: [*csv.reader((tmp_path / f"{part}.csv").open())] for part in make._PARTS}
    assert [len(rows) - 1 for rows in parts.values()] == [2100, 600, 300]
    assert parts["train"][0] == ["click", *make.FIELDS]
    values, log_odds, clicks = make.drawn(100_000, seed=0)
    assert {name: len({*column}) for name, column in values.items()} == make.FIELDS
    assert np.isclose(log_odds.std(), make._DEVIATION)
    # Clicks follow the odds: per tenth of the rows their share is the mean probability.
    for rows in np.array_split(np.argsort(log_odds), 10):
        expected = (1 / (1 + np.exp(-log_odds[rows]))).mean()
        assert abs(clicks[rows].mean() - expected) < 5 * np.sqrt(expected * (1 - expected) / len(rows)) + 1e-3


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Callable[..., str]:
    monkeypatch.setattr("shardrec.trainer.run.session.write_curve", lambda report, path: path.touch())

    def run_main(*arguments: str) -> str:
        monkeypatch.setattr("sys.argv", ["shardrec", *arguments])
        with pytest.raises(SystemExit, match="0"):
            main()
        return capfd.readouterr().out

    return run_main


def test_a_proposed_spec_with_the_example_s_options(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, run: Callable[..., str]
) -> None:
    """From the proposed spec on, with the example's options on few rows: better than a coin, below the optimum."""
    config = Path(make.__file__).with_name("run.yaml")
    options = load_config(config)
    monkeypatch.chdir(tmp_path)
    folder = Path(options.data.files).parent
    optimum = make.write(folder, 12_000, seed=0)
    Path(str(options.data.features)).write_text(run("inspect", options.data.files, "--suggest"), encoding="utf-8")
    run("train", str(config), "--epochs", "3", "--global-batch-size", "512", "--threads", "1")
    auc = json.loads(Path(str(options.output.out), "metrics.json").read_text(encoding="utf-8"))["final"]["auc"]
    assert 0.75 < auc < optimum["test"]


def test_from_a_raw_file_to_a_served_model_by_proposals_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, run: Callable[..., str]
) -> None:
    """README's commands, on few rows: inspect, train, predict; serve answers with what predict has written."""
    monkeypatch.chdir(tmp_path)
    optimum = make.write(Path("data"), 12_000, seed=0)
    wrote = run("inspect", "data/train.csv", "--suggest", "--out", "proposed")
    assert "shardrec train proposed/run.yaml" in wrote
    options = load_config("proposed/run.yaml")
    assert (options.data.valid, options.data.test) == ("data/valid.csv", "data/test.csv")
    run("train", "proposed/run.yaml", "--epochs", "5", "--global-batch-size", "256", "--out", "run", "--threads", "1")
    auc = json.loads(Path("run/metrics.json").read_text(encoding="utf-8"))["final"]["auc"]
    assert 0.75 < auc < optimum["test"]
    run("predict", "run", "--data", "data/test.csv", "--out", "scores")
    scores = pq.read_table("scores/part-00000.parquet")["score"].to_pylist()
    with Path("data/test.csv").open() as file:
        rows = [{name: value for name, value in row.items() if name != "click"} for row in csv.DictReader(file)]
    assert len(scores) == len(rows)
    answer = Client(RunFolder(Path("run")).endpoint()).post("/predict", json={"rows": rows[:20]}).get_json()
    np.testing.assert_allclose(answer["probabilities"], scores[:20], rtol=1e-4)
    monkeypatch.setattr("sys.argv", ["shardrec", "inspect", "data/train.csv", "--suggest", "--out", "proposed"])
    with pytest.raises(SystemExit, match="1"):  # what is there may have been changed by hand
        main()

"""``shardrec bench`` from the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

import shardrec
from benchmarks.harness import BenchConfig
from benchmarks.harness.timing import TimingConfig
from shardrec.errors import ConfigError, PlanError
from shardrec.trainer.cli import app
from shardrec.trainer.run.options import flag
from tests.trainer.cli.command import shell

ROOT = Path(__file__).parents[3]
SMALL = ("--tables", "3x40x8", "--batch-size", "16", "--steps", "1", "--threads", "1")


def test_help_names_every_option() -> None:
    shown = CliRunner().invoke(app, ["bench", "--help"], env={"COLUMNS": "200"})
    assert shown.exit_code == 0
    for name in (*BenchConfig.model_fields, *TimingConfig.model_fields):
        assert f"{flag(name)} " in shown.output, name
    assert "(default: 26x20000x64)" in shown.output


def test_the_harness_is_in_a_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shardrec, "__file__", str(tmp_path / "site-packages" / "shardrec" / "__init__.py"))
    shown = CliRunner().invoke(app, ["bench", "--quick"])
    assert isinstance(shown.exception, ConfigError)
    assert f"{tmp_path / 'site-packages'} is not one: clone the repository" in str(shown.exception)


def test_options_of_the_other_half() -> None:
    shown = CliRunner().invoke(app, ["bench", "--cut", "row_wise", "--tables", "small"])
    assert isinstance(shown.exception, ConfigError)
    assert "--cut is given and it is about counting bytes: give --bytes, too" in str(shown.exception)
    assert "--tables is given" in str(shown.exception)
    shown = CliRunner().invoke(app, ["bench", "--bytes", "--layout", "row_wise"])
    assert isinstance(shown.exception, ConfigError)
    assert "--layout is given and --bytes does not time anything" in str(shown.exception)


def test_a_list_where_bytes_take_one_value() -> None:
    shown = CliRunner().invoke(app, ["bench", "--bytes", "--ids", "uniform", "--ids", "zipf"])
    assert isinstance(shown.exception, ConfigError)
    assert str(shown.exception) == "ids (--ids) is 'uniform,zipf': give one of uniform, zipf"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_timings(tmp_path: Path) -> None:
    small = ("--workload", "3x40x8", "--batch", "8,16", "--mode", "train", "--layout", "row_wise", "--rounds", "1")
    done = shell("bench", *small, "--steps", "3", "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "round 1: 3x40x8/row_wise/16/train" in done.stderr
    assert "Geometric means over cases" in done.stdout
    assert "Cases without figures" not in done.stdout
    again = shell("bench", *small, "--out", str(tmp_path), "--resume", "--json")
    assert (again.returncode, again.stderr) == (0, "")
    assert [case["error"] for case in json.loads(again.stdout)["cases"]] == [None, None]
    assert (tmp_path / "timings.png").exists()
    failed = shell("bench", *small, "--optimizer", "adam", "--out", str(tmp_path), "--json")
    assert failed.returncode == 1
    assert [bool(case["error"]) for case in json.loads(failed.stdout)["cases"]] == [True, True], "Adam is for CUDA"


def test_a_wrong_option() -> None:
    shown = CliRunner().invoke(app, ["bench", "--bytes", "--steps", "0"])
    assert isinstance(shown.exception, ConfigError)
    assert str(shown.exception) == "steps (--steps) is 0: it should be greater than or equal to 1"


def test_a_faulty_plan_is_told_before_ranks_are_started(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text("{}", encoding="utf-8")
    shown = CliRunner().invoke(app, ["bench", "--bytes", *SMALL, "--plan", str(path)])
    assert isinstance(shown.exception, PlanError)
    assert str(path) in str(shown.exception)


def test_one_rank_in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    shown = CliRunner().invoke(app, ["bench", "--bytes", *SMALL, "--nproc", "1", "--cut", "mixed"])
    assert shown.exit_code == 0, shown.output
    assert "Bytes sent in a step by 1 rank together" in shown.output
    shown = CliRunner().invoke(app, ["bench", "--bytes", *SMALL, "--nproc", "1", "--json"])
    assert json.loads(shown.output)["bytes_per_step"]["payload"]["measured"]["pairs"] == [[0.0]]


@pytest.mark.slow
def test_two_new_ranks() -> None:
    done = shell("bench", "--bytes", *SMALL, "--cut", "row_wise", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout)
    assert found["exact"] is True
    assert found["environment"]["ranks"] == 2
    assert found["bytes_per_step"]["output"]["measured"]["pairs"] == [[0, 16 * 24 * 4], [16 * 24 * 4, 0]]

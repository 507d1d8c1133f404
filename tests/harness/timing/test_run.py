"""A run of the harness: rounds, turns, reports, going on, and cases that go wrong."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from benchmarks.harness.timing import TimingConfig, time_steps
from benchmarks.harness.timing import run as run_module
from benchmarks.harness.timing.case import Case
from benchmarks.harness.timing.processes import MeasurementError
from benchmarks.harness.timing.report import TimingReport
from tests.harness.timing.blocks import small_blocks
from tests.ranks import ranks

TINY: dict[str, Any] = {"workload": ("2x30x8",), "batch": (4,), "steps": 3, "rounds": 2}


RATES = {"memory": 1e9, "gather": 5e8, "scatter": 4e8, "link": 1e8, "latency": 1e-4}


class Canned:
    """Measures nothing: shardrec takes 2 ms, another side 6, and the outputs are as told."""

    read_files = False

    def __init__(self) -> None:
        self.turns: list[tuple[str, str]] = []
        self.output = {"torchrec": 1.0}
        self.fails = ""

    def run(self, task: str, options: Mapping[str, Any], *, ranks: int, malloc: str) -> Any:
        if task.endswith(":probe"):
            self.turns.append(("", "probe"))
            return RATES
        case, side = Case.from_json(options["case"]), options["side"]
        self.turns.append((case.key, side))
        if side == self.fails:
            raise MeasurementError("ValueError: no such thing")
        milliseconds = 2.0 if side == "shardrec" else 6.0
        output = {"f_t0": (self.output.get(side, 1.0), 1.0), "f_t1": (1.0, 1.0)}
        digests = {"first": {"f_t0": (1.0, 1.0)}, "trained": output} if case.trains else {"first": output}
        return {
            "step_ms": [milliseconds] * 3,
            "faults": 5.0,
            "peak_bytes": 100,
            "digests": [digests] * ranks,
        }


def run(canned: Canned, out: Path, *, resume: bool = False, **options: Any) -> TimingReport:
    config = TimingConfig(**{**TINY, "out": str(out), **options})
    return run_module._Run(config, canned, lambda line: None, resume=resume).all_rounds()


def test_the_sides_take_turns(tmp_path: Path) -> None:
    canned = Canned()
    run(canned, tmp_path, layout=("row_wise",), mode=("train",), rounds=3)
    sides = [side for _, side in canned.turns]
    assert sides == ["probe", "shardrec", "torchrec", "probe", "torchrec", "shardrec", "probe", "shardrec", "torchrec"]


def test_what_is_written(tmp_path: Path) -> None:
    report = run(Canned(), tmp_path, mode=("train", "dlrm"), layout=("table_wise", "mixed"))
    found = json.loads((tmp_path / "timings.json").read_text(encoding="utf-8"))
    assert found == json.loads(json.dumps(report.to_json()))
    assert found["machine"] == {"default, 2 ranks": [RATES] * 2}
    assert {"cpu", "cores", "packages", "malloc", "load_at_start", "load_at_end", "threads_per_rank"} <= set(
        found["environment"]
    )
    assert found["environment"]["processes"] == "Canned"
    plain, mixed, whole, _ = found["cases"]
    assert plain["step_ms"]["shardrec"] == {"median": 2.0, "low": 2.0, "high": 2.0}
    assert plain["ratio_to_shardrec"] == {"torchrec": {"median": 3.0, "low": 3.0, "high": 3.0}}
    assert plain["step_over_floor"]["shardrec"] == pytest.approx(2.0 / plain["floor_ms"]["through_memory"])
    assert plain["step_over_gather_floor"]["shardrec"] < plain["step_over_floor"]["shardrec"]
    assert (plain["error"], plain["other_rule"], mixed["other_rule"]) == (None, False, False)
    assert len(plain["rounds"]) == 2
    # A whole model's dense part has a turn of its own, and its time is part of the floor.
    assert set(whole["rounds"][0]) == {"shardrec", "torchrec", "dense"}
    assert whole["floor_ms"]["through_memory"] == pytest.approx(6.0 + plain["floor_ms"]["through_memory"])
    assert set(whole["ratio_to_shardrec"]) == {"torchrec"}
    means = {group["name"]: group["mean"] for group in found["geometric_means"]}
    assert means["train"] == pytest.approx(3.0)
    assert (tmp_path / "timings.png").read_bytes().startswith(b"\x89PNG")


def test_outputs_that_differ_have_no_figures(tmp_path: Path) -> None:
    canned = Canned()
    canned.output["torchrec"] = 0.5
    report = run(canned, tmp_path, workload=("3x30x8",), layout=("row_wise", "mixed"), mode=("train",))
    row_wise, mixed = report.results
    assert "the outputs of torchrec are not shardrec's after two steps, on rank 0, for f_t0" in str(row_wise.error)
    assert row_wise.ratio("torchrec") is None
    assert len([turn for turn in canned.turns if turn[0] == row_wise.case.key]) == 2, "no second round"
    # Where tables are cut by columns, TorchRec's rowwise Adagrad is another: what it trains is not compared.
    assert mixed.error is None
    assert [result.case.key for result in report.failed] == [row_wise.case.key]
    assert json.loads((tmp_path / "timings.json").read_text(encoding="utf-8"))["cases"][0]["ratio_to_shardrec"] == {}


def test_a_side_that_fails_ends_its_case_only(tmp_path: Path) -> None:
    canned = Canned()
    canned.fails = "torch"
    report = run(canned, tmp_path, mode=("train", "forward"), layout=("row_wise",), side=("shardrec", "torch"))
    assert [result.error for result in report.results] == ["ValueError: no such thing"] * 2
    assert not (tmp_path / "timings.png").exists()


class TestGoingOn:
    def test_rounds_that_are_there_are_not_measured_again(self, tmp_path: Path) -> None:
        run(Canned(), tmp_path, mode=("train",), layout=("row_wise",), rounds=1)
        canned = Canned()
        report = run(canned, tmp_path, resume=True, mode=("train",), layout=("row_wise", "table_wise"), rounds=2)
        assert [len(result.rounds) for result in report.results] == [2, 2]
        keys = [key for key, side in canned.turns if side == "shardrec"]
        assert keys == [report.results[1].case.key, report.results[0].case.key, report.results[1].case.key]
        again = Canned()
        resumed = run(again, tmp_path, resume=True, mode=("train",), layout=("row_wise", "table_wise"), rounds=2)
        assert again.turns == []
        before, after = report.to_json(), resumed.to_json()
        for one, other in zip(before["cases"], after["cases"], strict=True):
            assert one == other, "floor and all"

    def test_when_the_time_is_over(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        clock = iter(range(0, 10_000, 40))
        monkeypatch.setattr(run_module.time, "monotonic", lambda: next(clock))
        canned = Canned()
        report = run(canned, tmp_path, mode=("train",), minutes=1.0)
        assert [len(result.rounds) for result in report.results] == [1, 0]
        assert report.to_json()["cases"][1]["step_ms"] == {}


@pytest.mark.slow
def test_on_a_launchers_ranks(tmp_path: Path) -> None:
    """In the processes that are there: what CUDA takes, and torchrun."""

    def on_rank() -> dict[str, Any] | None:
        options = {**TINY, "out": str(tmp_path), "rounds": 1, "mode": ("train",), "layout": ("row_wise",)}
        options["malloc"] = ("default", "keep")
        with small_blocks():
            report = time_steps(TimingConfig(**options))
        assert dist.is_initialized(), "the group stays"
        return None if report is None else report.to_json()

    found, other = ranks(2, on_rank)
    assert other is None
    assert found is not None
    assert found["environment"]["processes"] == "KeptProcesses"
    timed, not_timed = found["cases"]
    assert timed["error"] is None
    assert timed["step_ms"]["torchrec"]["median"] > 0
    assert "malloc 'keep' needs processes of its own" in not_timed["error"]
    assert (tmp_path / "timings.json").exists()

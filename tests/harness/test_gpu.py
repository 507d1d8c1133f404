"""benchmarks/gpu: all of it that does not need the device."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import main as gpu
from benchmarks.gpu import programs

TINY = ["--device", "cpu", "--max-rows", "50", "--batch", "16", "--steps", "3"]


def run_programs(folder: Path, *parts: str) -> dict[str, Any]:
    programs.main([*TINY, "--out", str(folder / "programs.json"), "--parts", *parts])
    found: dict[str, Any] = json.loads((folder / "programs.json").read_text())
    assert not [name for name, one in found.items() if "error" in one], found
    return found


def test_a_step_the_dense_part_and_a_profile(tmp_path: Path) -> None:
    found = run_programs(tmp_path, "eager", "cuda_graph", "profile")
    assert found["eager"]["ms"] > 0
    assert found["cuda_graph"]["kernels_ms"] > 0
    assert len(found["profile"]["microseconds"]) == 10
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]


@pytest.mark.slow
def test_compiled_steps(tmp_path: Path) -> None:
    found = run_programs(tmp_path, "boundary", "traced")
    assert found["traced"]["graphs"] == 1
    assert not found["traced"]["breaks"]
    assert found["boundary"]["graphs"] > 1


def test_parts_are_kept_as_they_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left = tmp_path / "programs.json"
    commands = {
        "doctor": (["-c", "print('fine')"], 1.0),
        "tests": (["-c", "print('half'); raise SystemExit(3)"], 1.0),
        "programs": (["-c", f"open({str(left)!r}, 'w').write('{{\"eager\": 7}}'); import time; time.sleep(60)"], 0.05),
    }
    monkeypatch.setattr(gpu, "_commands", lambda options: commands)
    names = ["--parts", "doctor", "tests", "programs", "--out", str(tmp_path)]
    assert gpu.main(names) == 1
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert {name: one["ended"] for name, one in found.items()} == {
        "doctor": "",
        "tests": "ended with 3",
        "programs": "was stopped after 0.05 minutes",
    }
    assert found["programs"]["left"] == {"eager": 7}, "what was there when the time was over"
    shown = (tmp_path / "gpu.md").read_text()
    assert "fine" in shown
    assert "- eager: 7" in shown
    assert "Not whole: tests ended with 3; programs was stopped after 0.05 minutes." in shown
    commands["doctor"] = (["-c", "raise SystemExit(9)"], 1.0)
    commands["tests"] = commands["programs"] = (["-c", "print('whole now')"], 1.0)
    assert gpu.main([*names, "--resume"]) == 0, "what was whole is not run again"
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert "fine" in found["doctor"]["printed"]
    assert found["programs"]["left"] == {"eager": 7}


@pytest.mark.slow
def test_the_whole_command(tmp_path: Path) -> None:
    options = ["--device", "cpu", "--max-rows", "50", "--batch", "4096", "--rounds", "1", "--minutes", "3"]
    assert gpu.main([*options, "--parts", "doctor", "timings", "programs", "--out", str(tmp_path)]) == 0
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert found["timings"]["left"]["cases"]
    assert set(found["programs"]["left"]) == set(programs.PARTS)

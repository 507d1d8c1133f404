"""Counts of Python calls and operators, and the benchmark of them."""

from __future__ import annotations

import gc
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks.harness.host_work import HostWork, count_calls, count_operators, count_steps, largest
from benchmarks.host.main import Measured, measure, show_counts, show_times
from shardrec.launch.ranks import RankInfo
from tests.ranks import ranks


def module(path: Path, text: str) -> ModuleType:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def test_calls_files_and_moves(tmp_path: Path) -> None:
    inner = module(tmp_path / "own" / "inner.py", "def f(): return len([])")
    outer = module(tmp_path / "own" / "outer.py", "def g(f): f(); f(); return h(f)\ndef h(f): return f()")
    other = module(tmp_path / "other" / "other.py", "def k(g, f): g(f)")
    work = count_calls(lambda: other.k(outer.g, inner.f), [f"{tmp_path}/own/"])
    assert work.counts == {"calls": 6, "own": 5, "files": 2, "moves": 3, "operators": 0}
    assert {Path(path).name: count for path, count in work.by_file.items()} == {
        "inner.py": 3,
        "outer.py": 2,
        "other.py": 1,
    }
    assert count_calls(lambda: None, ["/own/"]).counts == dict.fromkeys(work.counts, 0)


def test_profilers_and_collections_are_as_before() -> None:
    def profile(*event: object) -> None:
        pass

    collects: list[bool] = []
    sys.setprofile(profile)
    try:
        count_calls(lambda: collects.append(gc.isenabled()), [])
        assert sys.getprofile() is profile
    finally:
        sys.setprofile(None)
    assert collects == [False] and gc.isenabled()


def test_operators() -> None:
    work = count_operators(lambda: torch.ones(3).add(1).add(2))
    assert work.by_operator == {"aten.add.Tensor": 2, "aten.ones.default": 1}
    assert work.counts["operators"] == 3


def test_steps() -> None:
    weight = torch.ones(3, requires_grad=True)

    def forward(batch: float) -> torch.Tensor:
        return sum([weight * batch] * int(batch), torch.zeros(3))

    there, back = count_steps(forward, [4.0, 3.0, 2.0, 5.0], torch.ones(3), [__file__])
    assert (there.calls, there.own, there.by_operator) == (
        1,
        1,
        {"aten.add.Tensor": 3, "aten.mul.Tensor": 1, "aten.zeros.default": 1},
    )
    assert (back.own, back.operators > 0) == (0, True)
    without, _ = count_steps(forward, [2.0], torch.ones(3), [__file__], operators=False)
    assert without.operators == 0


def test_the_most_of_several_ranks() -> None:
    works = [HostWork(calls=3, own=1, by_file={"a": 1}), HostWork(calls=2, own=2, operators=1, by_operator={"f": 1})]
    assert largest(works) == HostWork(calls=3, own=2, operators=1, by_file={"a": 1}, by_operator={"f": 1})


def test_the_benchmark_on_two_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    def measured(options: dict[str, Any]) -> Measured:
        place = RankInfo(rank=dist.get_rank(), world_size=2, device=torch.device("cpu"), threads=1)
        return measure(options, place)

    first, second = ranks(2, measured, {"batch_size": 2, "workload": "4x10x16", "rounds": 2, "steps": 1})
    assert first == second
    show_counts({2: first})
    show_times({(2, 2): first})
    lines = capsys.readouterr().out.splitlines()
    sides = ["shardrec", "torchrec"]
    assert [line.split(" | ")[:3] for line in lines[2:6]] == [
        ["| 2", part, side] for part in ("forward", "backward") for side in sides
    ]
    assert [line.split(" | ")[:3] for line in lines[8:]] == [["| 2", "2", part] for part in ("forward", "step")]
    assert 0 < first.work["shardrec"][0].own < first.work["shardrec"][0].calls

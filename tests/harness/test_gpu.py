"""benchmarks/gpu: all of it that does not need the device."""

from __future__ import annotations

import gzip
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu import edges, pack, programs
from benchmarks.gpu import main as gpu
from benchmarks.harness.timing import TimingConfig
from tests.cuda_double import cuda_double, cuda_is_there

README = Path(gpu.__file__).with_name("README.md")
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
    assert json.loads(gzip.decompress((tmp_path / "trace.json.gz").read_bytes()))["traceEvents"]


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
        "programs": (
            ["-S", "-c", f"open({str(left)!r}, 'w').write('{{\"eager\": 7}}'); import time; time.sleep(60)"],
            0.02,
        ),
    }
    monkeypatch.setattr(gpu, "commands", lambda options: commands)
    names = ["--parts", "doctor", "tests", "programs", "--out", str(tmp_path)]
    assert gpu.main(names) == 1
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert {name: one["ended"] for name, one in found.items()} == {
        "doctor": "",
        "tests": "ended with 3",
        "programs": "was stopped after 0.02 minutes",
    }
    assert found["programs"]["left"] == {"eager": 7}, "what was there when the time was over"
    shown = (tmp_path / "gpu.md").read_text()
    assert "fine" in shown
    assert "- eager: 7" in shown
    assert "Not whole: tests ended with 3; programs was stopped after 0.02 minutes." in shown
    commands["doctor"] = (["-c", "raise SystemExit(9)"], 1.0)
    commands["tests"] = commands["programs"] = (["-c", "print('whole now')"], 1.0)
    assert gpu.main([*names, "--resume"]) == 0, "what was whole is not run again"
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert "fine" in found["doctor"]["printed"]
    assert found["programs"]["left"] == {"eager": 7}


def test_what_a_part_prints_is_in_its_file_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a call that is ended from outside has left it."""
    waits_for_its_line = (
        "import pathlib, time; print('first')\n"
        f"while 'first' not in pathlib.Path({str(tmp_path / 'doctor.txt')!r}).read_text(): time.sleep(0.01)\n"
        "print('seen')"
    )
    monkeypatch.setattr(gpu, "commands", lambda options: {"doctor": (["-c", waits_for_its_line], 1.0)})
    assert gpu.main(["--parts", "doctor", "--out", str(tmp_path)]) == 0
    assert (tmp_path / "doctor.txt").read_text() == "first\nseen\n"


def test_no_part_is_begun_when_the_minutes_are_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands = {"doctor": (["-c", "print('begun')"], 1.0), "tests": (["-c", "print('begun')"], 1.0)}
    monkeypatch.setattr(gpu, "commands", lambda options: commands)
    options = ["--parts", "doctor", "tests", "--out", str(tmp_path)]
    assert gpu.main([*options, "--minutes", "0.01"]) == 1
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert {name: one["ended"] for name, one in found.items()} == {"doctor": "was not begun", "tests": "was not begun"}
    assert gpu.main([*options, "--minutes", "5", "--resume"]) == 0


def test_tests_that_have_passed_are_left_out(tmp_path: Path) -> None:
    """Also if one's name begins as another's."""
    (tmp_path / "test_it.py").write_text(
        "import pytest\n@pytest.mark.parametrize('one', ['a b'])\ndef test_x(one): pass\n"
        "def test_xy(): pass\ndef test_xyz(): pass\n"
    )
    (tmp_path / "tests.txt").write_text(
        "[gw0] [ 33%] PASSED test_it.py::test_x[a b] \n[gw1] [ 66%] FAILED test_it.py::test_xyz\n"
        "[gw1] [ 99%] PASSED test_it.py::test_xy\n"
    )
    environment = {**os.environ, "SHARDREC_PASSED": str(gpu._passed(tmp_path)), "PYTHONPATH": str(gpu._ROOT)}
    environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    command = [sys.executable, "-m", "pytest", "-v", "-p", "benchmarks.gpu.unpassed", "-p", "no:cacheprovider"]
    given = {"cwd": tmp_path, "env": environment, "text": True, "stdout": subprocess.PIPE}
    printed = subprocess.run([*command, "--rootdir", str(tmp_path), "test_it.py"], check=True, **given).stdout  # type: ignore[call-overload]
    assert "1 passed" in printed
    assert "test_xyz PASSED" in printed


def test_the_five_calls_of_the_readme_parse_and_their_parts_are_there(tmp_path: Path) -> None:
    lines = re.findall(r"`python3 -m benchmarks.gpu.main (--call[^`]*)`", README.read_text(encoding="utf-8"))
    parsed = [gpu.new_parser().parse_args(line.split()) for line in lines]
    assert [options.call for options in parsed] == list(gpu.CALLS)
    short = re.findall(r"`(--device cpu [^`]*--rounds 1)`", README.read_text(encoding="utf-8"))
    (options,) = [gpu.new_parser().parse_args([*lines[0].split(), *text.split()]) for text in short]
    options.out = tmp_path
    commands = gpu.commands(options)
    assert [part for call in gpu.CALLS.values() for part in call] == list(commands)
    for part, ((flag, module, *arguments), _) in commands.items():
        assert flag == "-m"
        assert f"| `{part}` |" in README.read_text(encoding="utf-8")
        if module.startswith("benchmarks."):
            importlib.import_module(module).new_parser().parse_args(arguments)
        elif module == "pytest":
            tests = [Path(one.partition("::")[0]) for one in arguments if one.startswith("tests/")]
            assert tests and all((gpu._ROOT / path).exists() for path in tests)
        else:
            flags = {f"--{name.replace('_', '-')}" for name in TimingConfig.model_fields} | {"--resume"}
            assert {one for one in arguments if one.startswith("--")} <= flags


def test_wheels_are_those_of_the_requirements() -> None:
    """Of the set for the torch that README.md names."""
    folder = gpu._ROOT / "requirements"
    lines = [line for name in ("base", "dev", "set-2.11") for line in (folder / f"{name}.txt").read_text().splitlines()]
    wheels = README.with_name("wheels.txt").read_text().splitlines()[1:]
    assert len(wheels) > 30
    assert set(wheels) <= set(lines)


def test_libraries_are_unpacked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheels, parts = tmp_path / "wheels", tmp_path / "parts"
    wheels.mkdir()
    with zipfile.ZipFile(wheels / "one-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("one/__init__.py", "print('a library')")
    assert pack.main([str(wheels), "--out", str(parts)]) == 0
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(gpu, "commands", lambda options: {"doctor": (["-c", "import one"], 1.0)})
    options = ["--parts", "doctor", "--out", str(tmp_path / "out"), "--libraries", str(parts)]
    assert gpu.main(options) == 0
    assert (tmp_path / "out" / "doctor.txt").read_text() == "a library\n"
    (tmp_path / "shardrec-libraries" / "one" / "__init__.py").write_text("print('kept')")
    assert gpu.main(options) == 0
    assert (tmp_path / "out" / "doctor.txt").read_text() == "kept\n"
    with pytest.raises(SystemExit, match=r"has no libraries.tar.xz.000"):
        gpu.main([*options, "--libraries", str(wheels)])


@pytest.mark.parametrize(
    ("kind", "layout"), [("bags", "row_blocks"), ("distinct", "row_blocks"), ("in order", "table_wise")]
)
def test_edges_on_the_double(kind: str, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And that differences are told."""
    with cuda_is_there(), cuda_double() as double, double.may_wait():
        assert edges.compare(kind, layout, "cuda:0") == []
    monkeypatch.setattr(edges, "_values", lambda output, values=edges._values: values(output) + torch.rand(()))
    assert "rows of one id" in edges.compare(kind, "table_wise", "cpu")


def test_torch_s_notice_is_no_wait() -> None:
    assert programs.is_wait("called a synchronizing CUDA operation (Triggered internally at CUDAFunctions.cpp:182.)")
    notice = "Synchronization debug mode is a prototype feature and does not yet detect all synchronizing operations"
    assert not programs.is_wait(notice)


def test_no_part_needs_a_solver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("highspy", "numba", "scipy"):
        monkeypatch.setitem(sys.modules, name, None)
    run_programs(tmp_path, "eager")


@pytest.mark.slow
def test_the_whole_command(tmp_path: Path) -> None:
    options = ["--device", "cpu", "--max-rows", "50", "--batch", "4096", "--rounds", "1", "--steps", "8"]
    assert gpu.main([*options, "--parts", "doctor", "timings", "programs", "--out", str(tmp_path)]) == 0
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert found["timings"]["left"]["cases"]
    assert set(found["programs"]["left"]) == set(programs.PARTS)

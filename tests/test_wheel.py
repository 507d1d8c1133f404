"""What is built of the C++ operators: compiled, taken as they are, or told about."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from shardrec.native import library_path

ROOT = Path(__file__).parents[1]


def build(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs setup.py as ``make wheel`` does."""
    return subprocess.run(
        [sys.executable, "-W", "ignore", "setup.py", "-q", *arguments],
        cwd=ROOT,
        env=os.environ | {"SHARDREC_OPERATORS": "required"} | environment,
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_missing_compiler_is_one_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process, which has imported torch."""
    arguments = ["build_ext", "--force", "--build-lib", str(tmp_path), "--build-temp", str(tmp_path)]
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("SHARDREC_OPERATORS", "required")
    monkeypatch.setenv("CXX", "/nowhere/c++")
    monkeypatch.setattr(sys, "argv", ["setup.py", "-q", *arguments])
    words = "the C\\+\\+ operators need a C\\+\\+ compiler, and /nowhere/c\\+\\+ is none on PATH: install one[^\n]*$"
    with pytest.raises(SystemExit, match=words):
        runpy.run_path("setup.py", run_name="__main__")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_wheel_has_the_operators_that_are_compiled_and_the_package_alone(tmp_path: Path) -> None:
    library = library_path()
    sources = [
        ROOT / "setup.py",
        *(path for path in (ROOT / "shardrec/native").iterdir() if path.suffix in (".cpp", ".h")),
    ]
    if library is None or library.stat().st_mtime <= max(path.stat().st_mtime for path in sources):
        pytest.skip("the operators are not compiled here, or older than their sources")
    folders = ("--build-lib", str(tmp_path / "lib"), "--build-temp", str(tmp_path / "temp"))
    wheel = ("bdist_wheel", "--bdist-dir", str(tmp_path / "bdist"), "--dist-dir", str(tmp_path / "dist"))
    done = build("egg_info", "--egg-base", str(tmp_path), "build", *folders, *wheel, CXX="/nowhere/c++")
    assert done.returncode == 0, done.stderr
    with zipfile.ZipFile(next((tmp_path / "dist").glob("*.whl"))) as file:
        names = file.namelist()
        assert file.read(f"shardrec/native/{library.name}") == library.read_bytes()
    assert "shardrec/py.typed" in names
    assert {name.partition("/")[0] for name in names if ".dist-info/" not in name} == {"shardrec"}

"""Which library is loaded."""

from __future__ import annotations

import subprocess
import sys
import venv
import warnings
import zipfile
from pathlib import Path

import pytest

import shardrec
from shardrec import native
from shardrec.errors import ConfigError


def test_a_folder_of_libraries(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """That ``SHARDREC_NATIVE`` names; one without them is an error, not a silent way to do without."""
    monkeypatch.delenv("SHARDREC_NATIVE", raising=False)
    usual = native.library_path()
    monkeypatch.setenv("SHARDREC_NATIVE", str(tmp_path))
    for look in (native.library_path, native.has_operators.__wrapped__):
        with pytest.raises(ConfigError, match=r"SHARDREC_NATIVE=.*there is no .*build_ext --build-lib"):
            look()
    if usual is None:
        pytest.skip("the C++ operators were not compiled when shardrec was installed (no C++ compiler?)")
    there = tmp_path / "shardrec" / "native" / usual.name
    there.parent.mkdir(parents=True)
    there.symlink_to(usual)
    assert native.library_path() == there


def test_an_install_without_operators_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, with what to do; and not where somebody has turned them off."""
    monkeypatch.setattr(native, "library_path", lambda: None)
    monkeypatch.delenv("SHARDREC_NATIVE", raising=False)
    with pytest.warns(RuntimeWarning, match=r"without C\+\+ operators .*`pip install --no-build-isolation \.`"):
        assert not native.has_operators.__wrapped__()
    monkeypatch.setenv("SHARDREC_NATIVE", "0")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not native.has_operators.__wrapped__()


@pytest.mark.slow
def test_mypy_finds_an_editable_install_of_these_settings(tmp_path: Path) -> None:
    """Type checkers follow a path; the import hook of other editable installs they do not see."""
    root = Path(shardrec.__file__).parents[1]
    text = (root / "setup.cfg").read_text(encoding="utf-8").split("[editable_wheel]")[1]
    sources, environment = tmp_path / "sources", tmp_path / "environment"
    (sources / "tiny").mkdir(parents=True)
    (sources / "setup.cfg").write_text(
        "[metadata]\nname = tiny\nversion = 1\n[options]\npackages = tiny\n[options.package_data]\ntiny = py.typed\n"
        f"[editable_wheel]{text.split('[')[0]}",
        encoding="utf-8",
    )
    (sources / "tiny" / "__init__.py").write_text("answer: int = 42\n", encoding="utf-8")
    (sources / "tiny" / "py.typed").touch()
    assert (root / "shardrec" / "py.typed").is_file()
    code = "from setuptools import build_meta; build_meta.build_editable('.')"
    subprocess.run([sys.executable, "-c", code], cwd=sources, check=True, capture_output=True)
    venv.create(environment, symlinks=True)
    (packages,) = environment.glob("lib/python*/site-packages")
    with zipfile.ZipFile(next(sources.glob("*.whl"))) as wheel:
        wheel.extractall(packages)
    program = tmp_path / "program.py"
    program.write_text("import tiny\nanswer: str = tiny.answer\n", encoding="utf-8")
    flags = ("--strict", "--cache-dir", str(tmp_path / "cache"), "--python-executable", str(environment / "bin/python"))
    command = [sys.executable, "-m", "mypy", *flags, str(program)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert '"int", variable has type "str"' in done.stdout, done.stdout + done.stderr
    assert "Found 1 error" in done.stdout

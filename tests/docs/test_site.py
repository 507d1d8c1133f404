"""The site: every page is in its navigation, it builds without a warning, and every public name is in its index."""

from __future__ import annotations

import importlib
import runpy
import subprocess
import sys
from importlib import util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = [path.stem for path in sorted((ROOT / "docs/api").glob("*.rst"))]


def navigation() -> dict[str, list[str]]:
    sys.path.insert(0, str(ROOT / "docs/site"))
    try:
        return runpy.run_path(str(ROOT / "docs/site/conf.py"))["NAVIGATION"]
    finally:
        sys.path.remove(str(ROOT / "docs/site"))


def test_every_page_is_in_the_navigation() -> None:
    named = [page for pages in navigation().values() for page in pages]
    assert len(named) == len(set(named))
    pages = {f"docs/{path.stem}" for path in (ROOT / "docs").glob("*.md")} | {"CHANGELOG", "CONTRIBUTING"}
    pages |= {f"docs/api/{path.stem}" for path in (ROOT / "docs/api").glob("*.rst")}
    assert set(named) == pages


@pytest.mark.slow
@pytest.mark.skipif(util.find_spec("furo") is None, reason="Sphinx is not installed: make docs-site does so")
def test_it_builds_without_a_warning(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-c", "docs/site", ".", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "Tutorial" in (tmp_path / "README.html").read_text(encoding="utf-8")
    assert "README.html" in (tmp_path / "index.html").read_text(encoding="utf-8")
    for package in PACKAGES:
        module = importlib.import_module(package)
        text = (tmp_path / f"docs/api/{package}.html").read_text(encoding="utf-8")
        missing = [name for name in module.__all__ if f".{name}" not in text and f'"{name}"' not in text]
        assert missing == [], package

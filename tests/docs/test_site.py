"""The site: every page is in its navigation, and it builds without a warning where Sphinx is installed."""

from __future__ import annotations

import runpy
import subprocess
import sys
from importlib import util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_every_page_is_in_the_navigation() -> None:
    named = [page for pages in runpy.run_path(str(ROOT / "docs/site/conf.py"))["NAVIGATION"].values() for page in pages]
    assert len(named) == len(set(named))
    pages = {f"docs/{path.stem}" for path in (ROOT / "docs").glob("*.md")} | {"CHANGELOG", "CONTRIBUTING"}
    assert set(named) == pages


@pytest.mark.slow
@pytest.mark.skipif(util.find_spec("furo") is None, reason="Sphinx is not installed: make docs-site does so")
def test_it_builds_without_a_warning(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-c", "docs/site", ".", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "Tutorial" in (tmp_path / "README.html").read_text(encoding="utf-8")

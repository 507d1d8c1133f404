"""The notebook is that of the page, and runs from top to bottom."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"


def test_the_notebook_is_that_of_the_page() -> None:
    written = runpy.run_path(str(DOCS / "make_notebook.py"))["notebook"]()
    assert (DOCS / "tutorial.ipynb").read_text(encoding="utf-8") == written, "run `make docs`"


@pytest.mark.slow
def test_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    cells = json.loads((DOCS / "tutorial.ipynb").read_text(encoding="utf-8"))["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert len(code) >= 6
    names: dict[str, object] = {"__name__": "__main__"}
    for number, text in enumerate(code):
        exec(compile(text, f"tutorial.ipynb, cell {number}", "exec"), names)
    assert "samples/s" in capfd.readouterr().out

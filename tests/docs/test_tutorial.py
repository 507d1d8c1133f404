"""The notebook is that of the page, runs from top to bottom, and prints what the page shows."""

from __future__ import annotations

import io
import json
import re
import runpy
from contextlib import redirect_stdout
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"


def test_the_notebook_is_that_of_the_page() -> None:
    written = runpy.run_path(str(DOCS / "make_notebook.py"))["notebook"]()
    assert (DOCS / "tutorial.ipynb").read_text(encoding="utf-8") == written, "run `make docs`"


def test_charts_are_of_the_recorded_figures() -> None:
    names = runpy.run_path(str(DOCS / "make_chart.py"))
    assert (DOCS / "speed.svg").read_text(encoding="utf-8") == names["chart"](), "run `make docs`"
    assert (DOCS / "tutorial.svg").read_text(encoding="utf-8") == names["curve"](), "run `make docs`"


@pytest.mark.slow
def test_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    cells = json.loads((DOCS / "tutorial.ipynb").read_text(encoding="utf-8"))["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert len(code) >= 6
    names: dict[str, object] = {"__name__": "__main__"}
    shown = 0
    for number, cell in enumerate(code):
        printed = io.StringIO()
        with redirect_stdout(printed):
            exec(compile("".join(cell["source"]), f"tutorial.ipynb, cell {number}", "exec"), names)
        for output in cell["outputs"]:
            compare(printed.getvalue(), "".join(output["text"]))
            shown += 1
    assert shown >= 3


def compare(printed: str, shown: str) -> None:
    """Words are equal. Processors round sums in other orders, so metrics are about equal."""
    number = re.compile(r"\d[\d,]*(?:\.\d+)?")
    assert number.sub("0", printed) == number.sub("0", shown)
    values, expected = ([float(text.replace(",", "")) for text in number.findall(each)] for each in (printed, shown))
    assert values == pytest.approx(expected, abs=0.05)

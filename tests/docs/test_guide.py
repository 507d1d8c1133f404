"""The Python examples of a page run from top to bottom, and print what the page says they print."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"


def test_the_guide_runs(capsys: pytest.CaptureFixture[str]) -> None:
    page = (DOCS / "guide.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(blocks) >= 6
    exec(compile("\n".join(blocks), "docs/guide.md", "exec"), {"__name__": "guide"})
    printed = re.findall(r"```text\n(.*?)```", page, re.DOTALL)
    assert capsys.readouterr().out.strip() == printed[0].strip()

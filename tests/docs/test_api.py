"""docs/api.md is what docs/make_api.py writes."""

from __future__ import annotations

import runpy
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def test_the_api_page_is_up_to_date() -> None:
    written = runpy.run_path(str(DOCS / "make_api.py"))["page"]()
    assert (DOCS / "api.md").read_text(encoding="utf-8") == written, "run `make docs`"

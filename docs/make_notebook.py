"""Write docs/tutorial.ipynb from docs/tutorial.md: ``python docs/make_notebook.py``."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

PAGE = Path(__file__).with_name("tutorial.md")
NOTEBOOK = PAGE.with_suffix(".ipynb")


def cells(page: str) -> list[tuple[str, str]]:
    """The kind (``code`` or ``markdown``) and the text of each cell, in order."""
    parts = re.split(r"```python\n(.*?)```\n", page, flags=re.DOTALL)
    kinds = ("markdown", "code")
    return [(kinds[place % 2], text.strip("\n")) for place, text in enumerate(parts) if text.strip()]


def notebook() -> str:
    """The text of docs/tutorial.ipynb: the page's Python blocks as code cells, without outputs."""
    found: list[dict[str, Any]] = []
    for number, (kind, text) in enumerate(cells(PAGE.read_text(encoding="utf-8"))):
        cell: dict[str, Any] = {"cell_type": kind, "id": f"cell-{number}", "metadata": {}}
        if kind == "code":
            cell |= {"execution_count": None, "outputs": []}
        found.append(cell | {"source": text.splitlines(keepends=True)})
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    content = {
        "cells": found,
        "metadata": {"kernelspec": kernel, "language_info": {"name": "python"}},
        "nbformat": 4,
        "nbformat_minor": 5,
    }
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    NOTEBOOK.write_text(notebook(), encoding="utf-8")

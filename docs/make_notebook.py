"""Write docs/tutorial.ipynb from docs/tutorial.md: ``python -m docs.make_notebook``."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

PAGE = Path(__file__).with_name("tutorial.md")
NOTEBOOK = PAGE.with_suffix(".ipynb")


class Cell(NamedTuple):
    """A paragraph of the page, or a block of Python with the text that it prints."""

    kind: str
    text: str
    printed: str = ""


def cells(page: str) -> list[Cell]:
    """The cells in order. A block of text after a block of Python is what it prints."""
    parts = re.split(r"```python\n(.*?)```\n(?:\n```text\n(.*?)```\n)?", page, flags=re.DOTALL)
    texts = [Cell("markdown", text.strip("\n")) for text in parts[::3]]
    blocks = zip(parts[1::3], parts[2::3], strict=True)
    code = [Cell("code", text.strip("\n"), printed or "") for text, printed in blocks]
    ordered = [cell for pair in zip(texts, code, strict=False) for cell in pair] + texts[len(code) :]
    return [cell for cell in ordered if cell.text.strip()]


def notebook() -> str:
    """The text of docs/tutorial.ipynb: the page's Python blocks as code cells, with the outputs that the page shows."""
    written: list[dict[str, Any]] = []
    for number, (kind, text, printed) in enumerate(cells(PAGE.read_text(encoding="utf-8"))):
        cell: dict[str, Any] = {"cell_type": kind, "id": f"cell-{number}", "metadata": {}}
        if kind == "code":
            output = {"name": "stdout", "output_type": "stream", "text": printed.splitlines(keepends=True)}
            cell |= {"execution_count": None, "outputs": [output] if printed else []}
        written.append(cell | {"source": text.splitlines(keepends=True)})
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    content = {
        "cells": written,
        "metadata": {"kernelspec": kernel, "language_info": {"name": "python"}},
        "nbformat": 4,
        "nbformat_minor": 5,
    }
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    NOTEBOOK.write_text(notebook(), encoding="utf-8")

"""Every link between pages leads to a file, and to a heading in it. Every page that a text names is there."""

from __future__ import annotations

import re
import subprocess
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / name
    for name in subprocess.run(
        ["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    if (ROOT / name).is_file()
]


@cache
def anchors(page: Path) -> frozenset[str]:
    """The headings of a page, as GitHub and MyST write them in links."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return frozenset(re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"^```.*?^```|`[^`\n]*`", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith(("http:", "https:")):
            continue
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists(), target
        linked = linked / "README.md" if linked.is_dir() else linked
        if anchor:
            assert anchor in anchors(linked), f"{target}: {linked.name} has no such heading"


def test_pages_that_texts_name_are_there() -> None:
    command = ["git", "grep", "-ohE", r"docs/[a-z_]+\.md", "--", "*.py", "*.md", "*.yaml", "*.cpp", "Makefile"]
    named = set(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split())
    assert sorted(name for name in named if not (ROOT / name).is_file() and name != "docs/hot_rows.md") == []

"""A measured figure on a page names the file that it comes from, and README's figures are those of that file."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = ["README.md", *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md")))]
FIGURE = re.compile(
    r"\d ?(?:%|ms\b|µs\b|us\b|TFLOP)|\b\d+(?:\.\d+)? times\b|\bfactor of\b|[GT]B/s|seconds? of processor time"
)
SOURCE = re.compile(r"\b(?:benchmarks|tests)/[\w/-]+(?:\.\w+)?")
SETTINGS = {
    "docs/models.md": ["80% are for training"],
    "docs/planner.md": ["1, 3, 10 or 30% of the rows", "`min_gain` (5%)"],
    "docs/design.md": ["within 0.1% of each other", "less than 2% of a rank's load"],
}
"""Figures that are chosen and not measured, by page: a part of their sentence."""


def blocks(text: str) -> list[str]:
    """The paragraphs, items of lists and tables of a page, without code."""
    text = re.sub(r"^```.*?^```|^    .*$", "", text, flags=re.DOTALL | re.MULTILINE)
    return re.split(r"\n\s*\n|\n(?=\s*- )", text)


def unsourced(text: str, settings: list[str]) -> list[str]:
    """The blocks with a measured figure that name no file of benchmarks/ or tests/, and follow none that does."""
    found, before = [], ""
    for block in blocks(text):
        words = " ".join(block.split())
        for part in settings:
            words = words.replace(part, "")
        names = SOURCE.findall(before + words if words.startswith("|") else words)
        if FIGURE.search(words) and not any((ROOT / name).exists() for name in names):
            found.append(words)
        before = words
    return found


@pytest.mark.parametrize("page", PAGES)
def test_each_figure_names_its_file(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    assert unsourced(text, SETTINGS.get(page, [])) == [], "name the file in benchmarks/ or the test of the figure"
    for part in SETTINGS.get(page, []):
        assert part in " ".join(text.split()), f"{page} has no longer {part!r}"


def test_a_figure_without_a_file_is_found() -> None:
    assert unsourced("A step takes 3 ms.", []) == ["A step takes 3 ms."]
    assert unsourced("A step takes 3 ms ([train](../benchmarks/train)).\n\nIt is 20% faster.", []) == [
        "It is 20% faster."
    ]
    assert unsourced("A step takes 3 ms ([train](../benchmarks/no_such_folder)).", []) != []
    assert unsourced("By [train](../benchmarks/train):\n\n| batch | ms |\n|---|---|\n| 1 | 3 ms |", []) == []


def test_readme_has_the_recorded_ratios() -> None:
    chart = runpy.run_path(str(ROOT / "docs" / "make_chart.py"))
    train, gpu = chart["CPU"].read_text(encoding="utf-8"), chart["GPU"]
    core = train.partition("\n### core\n")[2].partition("\n### full\n")[0]
    rows = re.findall(r"^\| (train|dlrm) (.*?) \| 2 \| [\d,]+ \|(?:[^|]*\|){2} ([\d.]+) \(", core, re.MULTILINE)
    alone = [float(ratio) for mode, case, ratio in rows if mode == "train" and "malloc" not in case]
    keeping = [float(ratio) for mode, case, ratio in rows if mode == "train" and "malloc keep" in case]
    whole = {case: ratio for mode, case, ratio in rows if mode == "dlrm"}
    assert (len(alone), len(keeping), len(whole)) == (8, 3, 2)
    small, large, dlrm = (
        chart["ratio"](chart["Case"]("", gpu, row, 3))
        for row in ("training | 4,096", "training | 65,536", "DLRM | 16,384")
    )
    shown = [chart["ratio"](case) for case in chart["CASES"] if case.label.startswith("CPU, tables")]
    assert (min(shown), max(shown)) == (min(alone), max(alone)), "the chart has the ends of README's range"
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    for sentence in (
        f"CPU, tables: {min(alone):.2f} to {max(alone):.2f} times",
        f"on both sides: {min(keeping):.2f} to {max(keeping):.2f} times",
        f"whole DLRM: {whole['criteo row_wise']} times as fast row-wise, {whole['criteo table_wise']} times table-wise",
        f"H200, tables: {large:.2f} times as fast at batch 65,536, {small:.2f} times at 4,096.**",
        f"H200, whole DLRM: {dlrm:.2f} times at batch 16,384",
    ):
        assert sentence in readme

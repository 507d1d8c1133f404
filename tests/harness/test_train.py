"""The page of benchmarks/train: a section for each preset, replaced by itself."""

from __future__ import annotations

from benchmarks.train.main import BEGIN, END, README, written


def test_sections_of_other_presets_stay() -> None:
    page = f"# Page\n\n{BEGIN}\n\n### full\n\nold full\n\n### growth\n\nold growth\n\n{END}\n\nafter\n"
    once = written(page, "\n### core\n\nnew core\n")
    assert [line for line in once.splitlines() if line] == [
        *("# Page", BEGIN, "### core", "new core", "### full", "old full", "### growth", "old growth", END, "after")
    ]
    again = written(once, "\n### full\n\nnew full\n\n### core\n\nnewer core")
    assert [line for line in again.splitlines() if line] == [
        *("# Page", BEGIN, "### core", "newer core", "### full", "new full", "### growth", "old growth", END, "after")
    ]


def test_the_page_keeps_its_figures() -> None:
    page = README.read_text(encoding="utf-8")
    for line in page.splitlines():
        assert line in written(page, "").splitlines()

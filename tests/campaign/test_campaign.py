"""A short campaign; ``make faults`` runs a long one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.campaign.main import histogram, main
from tests.campaign.results import leftovers


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_nothing_is_lost(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--kills", "4", "--seed", "3"]) == 0, capsys.readouterr().out
    assert "lost: nothing" in capsys.readouterr().out


def test_a_file_that_is_left_is_found(tmp_path: Path) -> None:
    (tmp_path / "tmp" / "shardrec-x").mkdir(parents=True)
    assert leftovers(tmp_path, set()) >= [str(tmp_path / "tmp" / "shardrec-x")]


def test_the_histogram_counts_each_strike_once() -> None:
    title, *rows = histogram(
        {("kill a rank", "save"): 2, ("kill all", "save"): 1, ("kill a rank", "results"): 4}
    ).split("\n")
    assert title.split() == ["start", "load", "step", "save", "results", "all"]
    assert rows[0].split() == ["0", "0", "0", "2", "4", "6", "kill", "a", "rank"]
    assert rows[-1].split() == ["0", "0", "0", "3", "4", "7", "all"]

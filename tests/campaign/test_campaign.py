"""A short campaign; ``make faults`` runs a long one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.campaign.main import main
from tests.campaign.results import leftovers


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_nothing_is_lost(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--kills", "4", "--seed", "3"]) == 0, capsys.readouterr().out
    assert "lost: nothing" in capsys.readouterr().out


def test_a_file_that_is_left_is_found(tmp_path: Path) -> None:
    (tmp_path / "tmp" / "shardrec-x").mkdir(parents=True)
    assert leftovers(tmp_path, set()) >= [str(tmp_path / "tmp" / "shardrec-x")]

"""How wide tables are printed where there is no terminal."""

from __future__ import annotations

import pytest

from shardrec.console import LOG_WIDTH, console


def test_a_pipe_has_the_width_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    assert (console().width, console(200, stderr=True).width) == (LOG_WIDTH, 200)


def test_columns_of_the_environment_count_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "90")
    assert console(200).width == 90

"""How wide tables are printed where there is no terminal."""

from __future__ import annotations

import io

import pytest

from shardrec.trainer.console import LOG_WIDTH, console, working


def test_a_pipe_has_the_width_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    assert (console().width, console(200, stderr=True).width) == (LOG_WIDTH, 200)


def test_columns_of_the_environment_count_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "90")
    assert console(200).width == 90


@pytest.mark.parametrize("terminal", [True, False])
def test_work_is_shown_on_a_terminal_alone(terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(stream, "isatty", lambda: terminal)
    monkeypatch.setattr("sys.stderr", stream)
    monkeypatch.setenv("TERM", "xterm")
    with working("evaluating [run]") as add_rows:
        add_rows(1000)
        add_rows(500)
    if terminal:
        assert "evaluating [run]  1,500 rows" in stream.getvalue()
    else:
        assert stream.getvalue() == ""

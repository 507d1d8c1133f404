"""The command line in this process."""

from __future__ import annotations

import sys

import pytest

from shardrec.trainer.cli import main
from tests.trainer.cli.command import Run


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    """Runs the command line in this process: (exit code, stdout, stderr)."""

    # A drawing, and half a million rows to say what is best possible, take longer than these trainings.
    monkeypatch.setattr("shardrec.trainer.run.session.write_curve", lambda report, path: path.touch())
    monkeypatch.setattr("shardrec.trainer.data.synthetic._EXPECTATION_ROWS", 1_000)

    def run_main(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["shardrec", *arguments])
        code = 0
        try:
            main()
        except SystemExit as ended:
            code = int(ended.code or 0)
        return code, *capfd.readouterr()

    return run_main

"""pytest's part of a recording: the number of the test that runs, its name and how long it takes."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import sitecustomize

_FOLDER = Path(os.environ["SHARDREC_RECORD"])
_count = 0


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """A test begins."""
    global _count
    _count += 1
    with (_FOLDER / "test").open("r+b") as file:
        file.write(_count.to_bytes(8, "little"))
    sys.settrace(sitecustomize.TRACE[0])


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """A phase of a test is over."""
    if report.when == "call":
        with (_FOLDER / "tests").open("a") as file:
            file.write(f"{_count} {report.duration:.3f} {report.outcome} {report.nodeid}\n")

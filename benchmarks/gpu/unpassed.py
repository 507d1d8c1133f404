"""A plugin of pytest's, for a run that goes on: leaves out the tests that the file ``SHARDREC_PASSED`` names."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

__all__ = ["pytest_collection_modifyitems"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    passed = set(Path(os.environ["SHARDREC_PASSED"]).read_text(encoding="utf-8").splitlines())
    items[:] = [item for item in items if item.nodeid not in passed]

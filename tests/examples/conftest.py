"""What tests of examples share."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True, scope="module")
def in_one_thread(one_core: None) -> None:
    """The examples' runs, without their option for it."""

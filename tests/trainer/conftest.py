"""What tests of runs share, from Python and from the command line."""

from __future__ import annotations

import pytest

from tests.trainer.run.broken_off import FEW_TABLES


@pytest.fixture
def few_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """What reads a run of `broken_off` on generated rows expects its tables."""
    monkeypatch.setattr("shardrec.trainer.data.schema.CRITEO_CARDINALITIES", FEW_TABLES)


@pytest.fixture(autouse=True, scope="module")
def in_one_thread(one_core: None) -> None:
    """Runs, without their option for it."""

"""The campaign against a run on a feed that publishes, and a server that follows it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.campaign.feed import Campaign


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_kills_lose_no_row_and_no_version(tmp_path: Path) -> None:
    campaign = Campaign(tmp_path, seed=1)
    campaign.run(100)
    assert campaign.lost == []
    assert campaign.blows.total() >= 100
    assert min(campaign.blows.values()) > 10

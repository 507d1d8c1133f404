"""The campaign against a run on a feed that publishes, and a server that follows it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.campaign.feed import Campaign


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("topic", [False, True])
def test_kills_lose_no_row_and_no_version(topic: bool, tmp_path: Path) -> None:
    if topic:
        pytest.importorskip("confluent_kafka", reason="shardrec is installed without its extra kafka")
    campaign = Campaign(tmp_path, seed=1, topic=topic)
    campaign.run(100)
    assert campaign.lost == []
    assert campaign.blows.total() >= 100
    assert min(campaign.blows.values()) > 10

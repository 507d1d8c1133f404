"""The campaign against a run on a feed that publishes, and a server that follows it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.campaign.feed import Campaign


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("topic", [False, True])
@pytest.mark.parametrize("kills", [10, 100])
def test_kills_lose_no_row_and_no_version(kills: int, topic: bool, tmp_path: Path) -> None:
    if topic:
        pytest.importorskip("confluent_kafka", reason="shardrec is installed without its extra kafka")
    campaign = Campaign(tmp_path, seed=1, topic=topic)
    campaign.run(kills)
    assert campaign.lost == []
    assert campaign.blows.total() >= kills
    assert kills < 100 or min(campaign.blows.values()) > 10

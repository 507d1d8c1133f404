"""The campaign against elastic replicas."""

from __future__ import annotations

import pytest

from tests.campaign.elastic import main


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_training_never_stops() -> None:
    undisturbed, disturbed = main(["--kills", "20", "--ranks", "2", "--sync-every", "3"])
    assert sum(disturbed["blows"].values()) == 20
    assert disturbed["alike"]
    assert abs(disturbed["loss"] - undisturbed["loss"]) < 0.01

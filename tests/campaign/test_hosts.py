"""The campaign against hosts of `shardrec train`, as one job and as replicas."""

from __future__ import annotations

import pytest

from tests.campaign.hosts import main


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("form", ["nnodes", "replicas"])
def test_hosts_come_and_go(form: str) -> None:
    figures = main(["--form", form, "--blows", "6"])
    assert figures["blows"].get("rank", 0) + figures["blows"].get("host", 0) == 6

"""The pipelined DLRM learns as the plain one does."""

from __future__ import annotations

import pytest

from examples.pipelined_dlrm.main import train
from tests.ranks import ranks


@pytest.mark.parametrize(
    ("n", "schedule"),
    [(2, "1f1b"), pytest.param(2, "gpipe", marks=pytest.mark.slow), pytest.param(4, "1f1b", marks=pytest.mark.slow)],
)
def test_losses_are_the_plain_model_s(n: int, schedule: str) -> None:
    for losses in ranks(n, train, steps=6, size=10, chunks=4, schedule=schedule):
        assert len(losses) == 6
        assert losses[-1] != losses[0]
        for plain, pipelined in losses:
            assert pipelined == pytest.approx(plain, rel=1e-5)

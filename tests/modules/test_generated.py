"""Thousands of generated batches through every executor, beside a reference in NumPy."""

from __future__ import annotations

import pytest

from tests.modules.generated import Kind, campaign
from tests.ranks import ranks

KINDS = [Kind(), Kind(policies=True), Kind(weighted=True, policies=True), Kind(sizes=True, policies=True)]
SCRIPTED = KINDS[1:3]


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_eager(kind: Kind) -> None:
    for counts in ranks(2, campaign, "eager", kind, 1, 50):
        assert counts.good > 20
        assert counts.bad > 5

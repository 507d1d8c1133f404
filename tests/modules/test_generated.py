"""Thousands of generated batches through every executor, beside a reference in NumPy."""

from __future__ import annotations

import pytest
import torch

from tests.modules.generated import Counts, Kind, campaign
from tests.ranks import ranks

PLAIN, MIXED = Kind(), Kind(policies=True)
WEIGHTED, SIZES = Kind(weighted=True, policies=True), Kind(sizes=True, policies=True)


def assert_seen(counts: Counts, batches: int) -> None:
    """Good ones and bad ones were among them."""
    assert counts.good + counts.bad == batches
    assert counts.bad > batches / 10
    assert counts.trained > batches / 4


def on_two_ranks(executor: str, kind: Kind, seed: int, batches: int) -> None:
    for counts in ranks(2, campaign, executor, kind, seed, batches, timeout=60 + batches):
        assert_seen(counts, batches)


@pytest.mark.parametrize("kind", [PLAIN, MIXED, WEIGHTED, SIZES], ids=str)
def test_eager(kind: Kind) -> None:
    assert_seen(campaign("eager", kind, 1, 60), 60)


def test_eager_on_two_ranks() -> None:
    on_two_ranks("eager", MIXED, 2, 60)


def test_scripted() -> None:
    assert_seen(campaign("scripted", MIXED, 3, 60), 60)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("executor", "kind", "batches"),
    [
        ("eager", PLAIN, 2000),
        ("eager", MIXED, 2500),
        ("eager", WEIGHTED, 2500),
        ("eager", SIZES, 2500),
        ("scripted", PLAIN, 2000),
        ("scripted", MIXED, 1000),
        ("scripted", WEIGHTED, 2500),
        ("traced", MIXED, 1000),
        ("traced", WEIGHTED, 1500),
    ],
    ids=str,
)
def test_thousands(executor: str, kind: Kind, batches: int) -> None:
    torch._dynamo.reset()
    assert_seen(campaign(executor, kind, 100, batches), batches)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("executor", "kind", "batches"),
    [("eager", MIXED, 1000), ("eager", SIZES, 500), ("scripted", MIXED, 500), ("traced", WEIGHTED, 500)],
    ids=str,
)
def test_thousands_on_two_ranks(executor: str, kind: Kind, batches: int) -> None:
    on_two_ranks(executor, kind, 200, batches)

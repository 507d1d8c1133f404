"""Thousands of generated batches through every executor, beside a reference in NumPy."""

from __future__ import annotations

import pytest
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from shardrec.exchange.batch import KEY_ORDERS
from shardrec.modules import ShardedEmbeddingBagCollection, ShardedEmbeddingCollection
from tests.modules.generated import Counts, Kind, campaign, make
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
    assert_seen(campaign("eager", kind, 1, 40), 40)


def test_eager_on_two_ranks() -> None:
    on_two_ranks("eager", MIXED, 2, 40)


def test_scripted() -> None:
    assert_seen(campaign("scripted", MIXED, 3, 40), 40)


def test_constants_are_kept_for_few_orders_of_keys() -> None:
    model, _ = make(MIXED, "eager")
    for number in range(3 * KEY_ORDERS):
        keys = ["a", "b", "c", f"unused {number}"]
        model(KeyedJaggedTensor(keys=keys, values=torch.tensor([1, 99, -1]), lengths=torch.tensor([1, 1, 1, 0])))
    caches = 0
    for one in model.modules():
        if isinstance(one, ShardedEmbeddingBagCollection | ShardedEmbeddingCollection):
            for owner in (one, one.input, one.input.cutter):
                for kept in vars(owner).values():
                    if hasattr(kept, "cache_info"):
                        caches += 1
                        assert 0 < kept.cache_info().currsize <= KEY_ORDERS
    assert caches == 8


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

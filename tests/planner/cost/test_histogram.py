"""Histograms of ids: shares add up, blocks by ids are equal work, even ids need none."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardrec.errors import ConfigError
from shardrec.planner.cost import Histogram, TableLoad


def power_law(rows: int, power: float, count: int, seed: int = 0) -> np.ndarray:
    """Ids in the order of how often they come."""
    weights = np.arange(1, rows + 1) ** -power
    return np.random.default_rng(seed).choice(rows, count, p=weights / weights.sum()).astype(np.int64)


@given(
    ids=st.lists(st.integers(-3, 63), min_size=100, max_size=400),
    squared=st.booleans(),
    blocks=st.integers(1, 20),
)
def test_shares_add_up_and_blocks_have_rows(ids: list[int], squared: bool, blocks: int) -> None:
    numbers = np.array(ids, dtype=np.int64)
    found = Histogram.of_ids(numbers**2 // 63 if squared else numbers, 64)
    if found is None:
        return
    edges = found.cut(blocks)
    assert len(edges) == blocks + 1
    assert (edges[0], edges[-1]) == (0, 64)
    assert all(a < b for a, b in pairwise(edges))
    assert sum(found.share(a, b) for a, b in pairwise(edges)) == pytest.approx(1.0)
    assert found.share(0, 64) == pytest.approx(1.0)


def test_a_power_law_is_cut_into_equal_work() -> None:
    ids = power_law(10_000, 0.8, 20_000)
    found = Histogram.of_ids(ids, 10_000)
    assert found is not None
    fresh = power_law(10_000, 0.8, 50_000, seed=1)
    for blocks in (2, 4, 8):
        by_ids = np.histogram(fresh, found.cut(blocks))[0] / len(fresh)
        even = np.histogram(fresh, np.arange(blocks + 1) * 10_000 // blocks)[0] / len(fresh)
        assert by_ids.max() < 1.15 / blocks
        assert even.max() > 1.5 / blocks
        assert [found.share(a, b) for a, b in pairwise(found.cut(blocks))] == pytest.approx(by_ids, abs=0.02)


def test_a_row_that_most_ids_hit_stands_alone() -> None:
    ids = np.concatenate([np.full(3000, 70), np.random.default_rng(0).integers(0, 100, 1000)]).astype(np.int64)
    found = Histogram.of_ids(ids, 100)
    assert found is not None
    assert found.share(70, 71) == pytest.approx(0.7525, abs=0.01)


def test_even_or_few_ids_need_none() -> None:
    even = np.random.default_rng(0).integers(0, 5000, 4000).astype(np.int64)
    assert Histogram.of_ids(even, 5000) is None
    assert Histogram.of_ids(np.zeros(40, dtype=np.int64), 5000) is None
    assert Histogram.of_ids(np.zeros(0, dtype=np.int64), 5000) is None
    assert Histogram.of_ids(np.zeros(4000, dtype=np.int64), 1) is None


def test_faults() -> None:
    with pytest.raises(ConfigError, match="ascending rows"):
        Histogram(rows=(0, 5, 5), below=(0.0, 0.5, 1.0))
    with pytest.raises(ConfigError, match="go up from 0"):
        Histogram(rows=(0, 5, 9), below=(0.0, 0.5, 0.9))
    with pytest.raises(ConfigError, match="of 10 rows ends at row 9"):
        TableLoad(num_embeddings=10, embedding_dim=4, histogram=Histogram(rows=(0, 9), below=(0.0, 1.0)))
    for pooling in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ConfigError, match=r"a sample a finite number of ids, not negative; got \("):
            TableLoad(num_embeddings=10, embedding_dim=4, poolings=(1.0, pooling))

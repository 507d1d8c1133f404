from __future__ import annotations

import dataclasses
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardrec.trainer.data import ClickBatch, ClickSchema
from shardrec.trainer.data.rows import ClickRows, join_rows

SCHEMA = ClickSchema(dense_names=("x",), sparse_names=("a", "b"), num_embeddings=(100, 100))
Bags = list[list[list[int]]]  # row, feature, ids

one_hot = st.lists(st.lists(st.lists(st.integers(0, 99), min_size=1, max_size=1), min_size=2, max_size=2), max_size=8)
multi_hot = st.lists(st.lists(st.lists(st.integers(0, 99), max_size=3), min_size=2, max_size=2), max_size=8)


def rows_of(bags: Bags, *, multi: bool) -> ClickRows:
    flat = [value for row in bags for feature in row for value in feature]
    lengths = np.array([[len(feature) for feature in row] for row in bags], np.int64).reshape(-1, 2)
    number = np.arange(len(bags), dtype=np.float32)
    return ClickRows(
        labels=number % 2, dense=number[:, None], ids=np.array(flat, np.int64), lengths=lengths if multi else None
    )


def bags_of(batch: ClickBatch) -> Bags:
    per_feature = [[bag.tolist() for bag in batch.sparse[name].to_dense()] for name in SCHEMA.sparse_names]
    return [list(row) for row in zip(*per_feature, strict=True)]


@given(bags=multi_hot, cut=st.tuples(st.integers(0, 8), st.integers(0, 8)))
def test_multi_hot_rows_become_feature_major(bags: Bags, cut: tuple[int, int]) -> None:
    start, stop = sorted(min(each, len(bags)) for each in cut)
    batch = join_rows([(rows_of(bags, multi=True), start, stop)]).to_batch(SCHEMA)
    assert bags_of(batch) == bags[start:stop]
    assert batch.dense[:, 0].tolist() == list(range(start, stop))


@given(bags=one_hot, cut=st.tuples(st.integers(0, 8), st.integers(0, 8)))
def test_one_hot_rows_equal_multi_hot_rows_of_one(bags: Bags, cut: tuple[int, int]) -> None:
    start, stop = sorted(min(each, len(bags)) for each in cut)
    for multi in (False, True):
        assert bags_of(join_rows([(rows_of(bags, multi=multi), start, stop)]).to_batch(SCHEMA)) == bags[start:stop]


@given(bags=multi_hot, keep=st.lists(st.booleans(), min_size=8, max_size=8))
def test_where(bags: Bags, keep: list[bool]) -> None:
    mask = np.array(keep[: len(bags)], dtype=np.bool_)
    kept = rows_of(bags, multi=True).where(mask).to_batch(SCHEMA)
    assert bags_of(kept) == [row for row, good in zip(bags, keep, strict=False) if good]
    assert kept.dense[:, 0].tolist() == np.flatnonzero(mask).tolist()


@given(bags=multi_hot, multi=st.booleans(), weighted=st.booleans(), rng=st.randoms(use_true_random=False))
def test_take(bags: Bags, multi: bool, weighted: bool, rng: Random) -> None:
    if not multi:
        bags = [[[*feature, 7][:1] for feature in row] for row in bags]
    rows = rows_of(bags, multi=multi)
    if multi and weighted:
        rows = dataclasses.replace(rows, weights=rows.ids.astype(np.float32) / 2)
    order = np.array([rng.randrange(len(bags)) for _ in range(5)] if bags else [], dtype=np.int64)
    batch = rows.take(order).to_batch(SCHEMA)
    assert bags_of(batch) == [bags[place] for place in order]
    if multi and weighted:
        assert batch.sparse.weights().tolist() == [value / 2 for value in batch.sparse.values().tolist()]


@given(left=one_hot, right=multi_hot)
def test_join_mixes_one_hot_and_multi_hot(left: Bags, right: Bags) -> None:
    joined = join_rows([(rows_of(left, multi=False), 0, len(left)), (rows_of(right, multi=True), 0, len(right))])
    assert bags_of(joined.to_batch(SCHEMA)) == left + right


def test_a_batch_shares_no_memory_with_its_rows() -> None:
    rows = rows_of([[[1], [2]]], multi=False)
    batch = rows.to_batch(SCHEMA)
    rows.ids[:], rows.dense[:], rows.labels[:] = 9, 9, 9
    assert batch.sparse.values().tolist() == [1, 2]
    assert (batch.dense.item(), batch.labels.item()) == (0, 0)


@pytest.mark.parametrize("multi", [False, True])
def test_where_nothing_is_kept(multi: bool) -> None:
    nothing = rows_of([[[1], [2]], [[3], [4]]], multi=multi).where(np.zeros(2, np.bool_))
    assert nothing.to_batch(SCHEMA).size == 0
    assert len(join_rows([(nothing, 0, 0)] * 2)) == 0

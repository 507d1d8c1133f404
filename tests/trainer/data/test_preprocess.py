from __future__ import annotations

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from shardrec.trainer.data import hash_categories, transform_dense

present = np.zeros(1, dtype=np.bool_)


@given(value=st.integers(-(10**6), 10**12))
def test_dense_is_the_log_of_a_shifted_count(value: int) -> None:
    result = float(transform_dense(np.array([float(value)]), present)[0])
    assert math.isclose(result, math.log(max(value, -1) + 3), rel_tol=1e-5)
    assert result > 0.5  # apart from 0, the missing value


def test_missing_is_zero_whatever_stands_there() -> None:
    missing = np.array([True, True, False])
    assert transform_dense(np.array([5.0, np.nan, -1.0]), missing).tolist() == [0.0, 0.0, np.float32(np.log(2))]
    sizes = np.array(7, dtype=np.uint64)
    assert hash_categories(np.array([5, 6, 6], np.uint64), missing, sizes).tolist() == [0, 0, 1]


@given(value=st.integers(0, 2**32 - 1), size=st.integers(2, 2**31 - 1))
def test_categories_are_folded_into_the_rows_after_the_first(value: int, size: int) -> None:
    folded = hash_categories(np.array([value], np.uint64), present, np.array([size], np.uint64))
    assert folded.tolist() == [value % (size - 1) + 1]
    assert 1 <= folded[0] < size

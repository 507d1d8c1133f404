from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardrec.errors import ConfigError
from shardrec.trainer.data.split import BatchRequest, held_out


@given(count=st.integers(0, 1000), world_size=st.integers(1, 50))
def test_shares_follow_each_other_and_differ_by_one_row_at_most(count: int, world_size: int) -> None:
    shares = [BatchRequest(rank=rank, world_size=world_size, batch_size=1).share(count) for rank in range(world_size)]
    assert shares[0][0] == 0
    assert shares[-1][1] == count
    assert all(left[1] == right[0] for left, right in pairwise(shares))
    sizes = {stop - start for start, stop in shares}
    assert max(sizes) - min(sizes) <= 1


@given(world_size=st.integers(1, 20), batch_size=st.integers(1, 100))
def test_a_full_global_batch_gives_every_rank_its_batch_size(world_size: int, batch_size: int) -> None:
    for rank in range(world_size):
        request = BatchRequest(rank=rank, world_size=world_size, batch_size=batch_size)
        assert request.share(request.global_size) == (rank * batch_size, (rank + 1) * batch_size)


@pytest.mark.parametrize("fraction", [0.0, 0.01, 0.1, 0.5])
def test_held_out_share(fraction: float) -> None:
    held = held_out(np.arange(200_000), fraction)
    spread = np.sqrt(200_000 * fraction * (1 - fraction))
    assert abs(held.sum() - 200_000 * fraction) <= 5 * spread
    # spread over the file: no thousand rows without, or full of, held-out rows
    if fraction == 0.1:
        per_thousand = held.reshape(200, 1000).sum(axis=1)
        assert 50 < per_thousand.min() <= per_thousand.max() < 160


def test_a_larger_share_holds_out_the_same_rows_and_more() -> None:
    rows = np.arange(10_000)
    assert (held_out(rows, 0.2) >= held_out(rows, 0.1)).all()


def test_all_faults_of_a_request_are_told_together() -> None:
    with pytest.raises(ConfigError) as caught:
        BatchRequest(rank=-1, world_size=2, batch_size=0, first_batch=-5)
    text = str(caught.value)
    assert "rank is -1 of world_size 2: give 0 to 1" in text
    assert "batch_size is 0" in text
    assert "first_batch is -5" in text

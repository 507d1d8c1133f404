"""Output columns: what is left to a kernel of a device."""

from __future__ import annotations

import pytest

from shardrec.exchange.assemble import _step
from shardrec.exchange.route import Source


@pytest.mark.parametrize(
    ("sources", "step"),
    [
        ([(0, 4)], 0),
        ([(0, 4), (0, 12)], 8),
        ([(0, 4), (0, 12), (0, 20)], 8),
        ([(0, 4), (0, 12), (0, 24)], 0),  # of two distances
        ([(0, 4), (1, 12)], 0),  # of two blocks
        ([(0, 12), (0, 4)], 0),  # from right to left
    ],
)
def test_columns_at_equal_distances_in_a_block_are_summed_as_a_window(
    sources: list[tuple[int, int]], step: int
) -> None:
    assert _step([Source(block=block, start=start) for block, start in sources]) == step

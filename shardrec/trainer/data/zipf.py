"""Zipf-distributed ids, drawn for many features at once from one uniform integer each.

The alias method (Walker, 1977; the linear-time table of Vose, 1991): a feature with n outcomes gets n slots of equal
probability. Slot j yields outcome j when a second uniform number is below ``threshold[j]``, and ``alias[j]`` if not.
Both numbers come from the two halves of ``uniform * n``, so that a draw is a multiply, two look-ups and a compare,
in integers only: the same ids on every machine.

Legend: N samples, F features, n outcomes of one feature.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def zipf_probabilities(count: int, exponent: float) -> NDArray[np.float64]:
    """Probabilities proportional to ``1 / (rank ** exponent)``: float64 (count,), largest first, sum 1."""
    weights = np.arange(1, count + 1, dtype=np.float64) ** -exponent
    return np.asarray(weights / weights.sum(), dtype=np.float64)


class AliasTables:
    """Samplers of F independent discrete distributions.

    Args:
        distributions: float64 (n,) of each feature, non-negative, sum 1. The outcomes are 0 to n - 1.

    Attributes:
        offsets: int64 (F,), where each feature's slots start in an array of all of them.
    """

    def __init__(self, distributions: Sequence[NDArray[np.float64]]) -> None:
        sizes = [len(probabilities) for probabilities in distributions]
        self.offsets: NDArray[np.int64] = np.cumsum([0, *sizes[:-1]], dtype=np.int64)
        self._sizes = np.array(sizes, dtype=np.uint64)
        tables = [_alias_table(probabilities) for probabilities in distributions]
        self._threshold = np.concatenate([threshold for threshold, _ in tables])
        self._alias = np.concatenate([alias for _, alias in tables])

    def draw(self, uniform_NF: NDArray[np.uint32]) -> NDArray[np.int64]:
        """One outcome per uniform integer: uint32 (N, F), all values equally likely → int64 (N, F)."""
        product = uniform_NF.astype(np.uint64) * self._sizes
        slot = (product >> np.uint64(32)).astype(np.int64)
        rest = product.astype(np.uint32)  # the low half: uniform again, given the slot
        flat = slot + self.offsets
        return np.where(rest < self._threshold[flat], slot, self._alias[flat])


def _alias_table(probabilities: NDArray[np.float64]) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
    """Thresholds (scaled by 2**32) and aliases of one distribution."""
    count = len(probabilities)
    share, alias = probabilities * count, np.arange(count)  # a full slot is its own alias: 2**-32 less is harmless
    small, large = np.flatnonzero(share < 1.0)[::-1], np.flatnonzero(share >= 1.0).tolist()
    donors, donor = [], large.pop() if large else 0
    left = float(share[donor])
    for deficit in (1.0 - share[small]).tolist():
        if left < 1.0:
            break
        donors.append(donor)
        left -= deficit
        while left < 1.0 and large:  # the donor's slot is the next to be filled up
            share[donor], alias[donor] = left, large[-1]
            donor = large.pop()
            left = float(share[donor]) - (1.0 - left)
    share[donor] = left
    alias[small[: len(donors)]] = donors
    threshold = np.minimum(share * 2.0**32, 2**32 - 1).astype(np.uint32)
    return threshold, alias

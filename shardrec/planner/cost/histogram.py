"""Which rows the ids of a table hit: often the first, where rows are in the order of how often they come."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from math import sqrt

import numpy as np
from numpy.typing import NDArray

from shardrec.errors import ConfigError

_QUANTILES = 32
_IDS_PER_QUANTILE = 50
_CHANCE = 1.63
"""Over the root of the number of ids: how far even ids are off the diagonal once in a hundred times (Kolmogorov)."""


@dataclass(frozen=True, kw_only=True)
class Histogram:
    """The share of a table's ids below some rows; in between, ids are spread evenly.

    Args:
        rows: ascending, from 0 to the table's rows.
        below: share of the ids below each, from 0 to 1.
    """

    rows: tuple[int, ...]
    below: tuple[float, ...]

    def __post_init__(self) -> None:
        shares = self.below
        if len(self.rows) != len(shares) or len(shares) < 2 or any(a >= b for a, b in pairwise(self.rows)):
            raise ConfigError(f"a histogram has ascending rows and a share for each, got {self.rows} and {shares}")
        if self.rows[0] or shares[0] or abs(shares[-1] - 1) > 1e-9 or any(a > b for a, b in pairwise(shares)):
            raise ConfigError(f"shares go up from 0, below row 0, to 1; got {shares} below rows {self.rows}")

    @classmethod
    def of_ids(cls, ids: NDArray[np.int64], rows: int) -> Histogram | None:
        """The histogram of sampled ids by their quantiles. Rows that many ids hit stand alone.

        Args:
            ids: (N,) in any order, from 0 to ``rows - 1``. Others are left out.
            rows: of the table.

        Returns:
            None if the ids are as evenly spread as chance has it.
        """
        known = np.sort(ids[(ids >= 0) & (ids < rows)])
        count = len(known)
        quantiles = min(_QUANTILES, count // _IDS_PER_QUANTILE)
        if quantiles < 2 or rows < 2:
            return None
        hit = known[np.arange(1, quantiles) * count // quantiles]
        edges = np.unique(np.concatenate([[0], hit, hit + 1, [rows]]))
        below = np.searchsorted(known, edges, side="left") / count
        if np.abs(below - edges / rows).max() <= _CHANCE / sqrt(count):
            return None
        return cls(rows=tuple(edges.tolist()), below=tuple(below.tolist()))

    def share(self, start: int, end: int) -> float:
        """The part of the ids in rows ``[start, end)``."""
        first, last = np.interp([start, end], self.rows, self.below)
        return float(last - first)

    def cut(self, blocks: int) -> tuple[int, ...]:
        """Edges of a number of blocks of rows with shares of the ids as equal as whole rows allow. None is empty."""
        total = self.rows[-1]
        edges = [0]
        for number, row in enumerate(np.interp(np.arange(1, blocks) / blocks, self.below, self.rows), 1):
            edges.append(min(max(round(float(row)), edges[-1] + 1), total - (blocks - number)))
        return (*edges, total)

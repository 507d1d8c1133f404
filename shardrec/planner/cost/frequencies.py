"""How often sample batches look each row of a table up, and what hot rows make of the table.

A hot row's ids are looked up where they are, so what is left of the table is a table with fewer ids, whose shards are
priced as any; and the copies are a small replicated table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from shardrec.planner.cost.histogram import Histogram

if TYPE_CHECKING:
    from shardrec.planner.cost.table import TableLoad

__all__ = ["Frequencies", "apart"]

_MOST = 1 - 1e-6
"""Of a table's ids that hot rows may be said to take; what is left of it keeps a price."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Frequencies:
    """The rows that samples look up.

    Args:
        rows: (R,) int64, those that come most first; of equal ones, the lowest.
        counts: (R,) int64, how often each comes.
    """

    rows: NDArray[np.int64]
    counts: NDArray[np.int64]

    @classmethod
    def of_ids(cls, ids: NDArray[np.int64], rows: int) -> Frequencies:
        """Of ids (N,) in any order, from 0 to ``rows - 1``; others are left out."""
        found, counts = np.unique(ids[(ids >= 0) & (ids < rows)], return_counts=True)
        order = np.argsort(-counts, kind="stable")
        return cls(rows=found[order], counts=counts[order])

    def hottest(self, count: int) -> tuple[int, ...]:
        """The ``count`` rows that come most, ascending; fewer if samples have not so many that come more than once."""
        most = min(count, int((self.counts > 1).sum()))
        return tuple(sorted(self.rows[:most].tolist()))

    def share_of(self, rows: Sequence[int]) -> NDArray[np.float64]:
        """Of these rows, the part of the ids that each takes."""
        counts = dict(zip(self.rows.tolist(), self.counts.tolist(), strict=True))
        total = max(int(self.counts.sum()), 1)
        return np.array([counts.get(row, 0) / total for row in rows], dtype=np.float64)

    def without(self, rows: Sequence[int]) -> Frequencies:
        """Those of the other rows."""
        others = ~np.isin(self.rows, np.asarray(rows))
        return Frequencies(rows=self.rows[others], counts=self.counts[others])


def apart(table: TableLoad, hot_rows: Sequence[int], ids: float) -> tuple[TableLoad, TableLoad]:
    """A table with hot rows as two: of the other ids, and of the copies.

    Args:
        table: the whole.
        hot_rows: ascending.
        ids: of a rank's batch.

    Returns:
        The table that the other ids are looked up in, and the hot rows as a table, which is looked up for each of their
        ids; where distinct ids are sent, for each of these.
    """
    if table.frequencies is not None:
        shares = table.frequencies.share_of(hot_rows)
    else:
        shares = np.array([table.share(row, row + 1) for row in hot_rows])
    share = min(float(shares.sum()), _MOST)
    hit = float((1 - (1 - shares) ** ids).sum())
    kept, growth, histogram = 1 - share, table.growth, table.histogram
    if growth is not None:
        # As many distinct rows as before, of as many ids with the hot ones, less the hot ones that come.
        left = max(1 - hit / max(growth.distinct(ids), 1e-9), 1e-6)
        growth = replace(growth, scale=growth.scale * left / kept**growth.power)
    frequencies = table.frequencies
    if frequencies is not None:
        frequencies = frequencies.without(hot_rows)
        histogram = Histogram.of_ids(np.repeat(frequencies.rows, frequencies.counts), table.num_embeddings)
    others = replace(
        table,
        poolings=tuple(kept * pooling for pooling in table.poolings),
        growth=growth,
        histogram=histogram,
        frequencies=frequencies,
    )
    asked = hit / max(ids, 1e-9) if table.sends_distinct_ids else share
    copies = replace(
        table,
        num_embeddings=len(hot_rows),
        poolings=tuple(asked * pooling for pooling in table.poolings),
        growth=None,
        histogram=None,
        frequencies=None,
    )
    return others, copies

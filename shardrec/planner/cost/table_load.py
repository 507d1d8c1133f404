"""The planner's description of a table: its shape, and its load in a batch."""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, expm1, inf, log

from shardrec.errors import ConfigError
from shardrec.planner.cost.histogram import Histogram

_NEVER = 1e15
"""Ids after which a cache is taken to have all rows that there are."""


@dataclass(frozen=True, kw_only=True)
class Growth:
    """How the number of distinct ids grows with the number of ids (Heaps' law): ``scale * ids ** power``.

    Args:
        scale: distinct ids of one id's worth; positive.
        power: 1 if ids never repeat, 0 if no id is new.
        points: (ids, distinct ids), ascending, between which the law has another power each.
    """

    scale: float
    power: float
    points: tuple[tuple[float, float], ...] = ()

    def distinct(self, ids: float) -> float:
        """Expected number of distinct ids among a number of ids."""
        return min(ids, self.scale * ids**self.power) if ids > 0 else 0.0

    def locally(self, ids: float) -> float:
        """The same by the points on both sides, or the last two, where there are some."""
        after = next((n for n, (known, _) in enumerate(self.points) if known >= ids), len(self.points) - 1)
        if after < 1 or ids <= 0:
            return self.distinct(ids)
        (few, first), (many, last) = self.points[after - 1 : after + 1]
        return min(ids, last * exp(log(ids / many) * log(last / first) / log(many / few)))


@dataclass(frozen=True, kw_only=True)
class TableLoad:
    """A table as the planner sees it.

    Args:
        num_embeddings: rows.
        embedding_dim: columns.
        poolings: per feature that looks the table up, the mean number of ids of a sample.
        growth: distinct ids by number of ids. Default: ids drawn evenly from all rows.
        histogram: which rows the ids hit. Default: all equally often.
        pooled: a sum per bag; else a row per id.
        dedup: of a row per id, each distinct id of a batch is sent once.
        weight_bytes: bytes of a weight.
        state_bytes: bytes of optimizer state per weight.
        row_state_bytes: bytes of optimizer state per row.
        whole_row_state: the optimizer's state is of whole rows, so that column stripes have to communicate (rowwise
            Adagrad).
        cuts_columns: whether the optimizer takes column stripes.
        fused: the update happens in backward.
        leaves_device: whether its optimizer takes the tiers other than ``"device"``.
        tier: where the rows are (:class:`~shardrec.layout.TableLayout`).
        load_factor: of tier ``"cached"``, the part of the rows that the cache has room for.
    """

    num_embeddings: int
    embedding_dim: int
    poolings: tuple[float, ...] = (1.0,)
    growth: Growth | None = None
    histogram: Histogram | None = None
    pooled: bool = True
    dedup: bool = True
    weight_bytes: int = 4
    state_bytes: int = 0
    row_state_bytes: int = 0
    whole_row_state: bool = False
    cuts_columns: bool = True
    fused: bool = True
    leaves_device: bool = False
    tier: str = "device"
    load_factor: float = 0.0

    def __post_init__(self) -> None:
        if self.num_embeddings < 1 or self.embedding_dim < 1:
            raise ConfigError(f"a table has rows and columns, got {self.num_embeddings} by {self.embedding_dim}")
        if not self.poolings or not all(0 <= pooling < inf for pooling in self.poolings):
            raise ConfigError(
                f"a table has a feature, and a sample a finite number of ids, not negative; got {self.poolings}"
            )
        if self.histogram is not None and self.histogram.rows[-1] != self.num_embeddings:
            raise ConfigError(
                f"the histogram of a table of {self.num_embeddings} rows ends at row {self.histogram.rows[-1]}. "
                "Give one of this table"
            )

    @property
    def features(self) -> int:
        """How many features look the table up."""
        return len(self.poolings)

    @property
    def ids_per_sample(self) -> float:
        """Ids of a sample over all features."""
        return sum(self.poolings)

    def share(self, start: int, end: int) -> float:
        """The part of the table's ids that are in rows ``[start, end)``."""
        if self.histogram is None:
            return (end - start) / self.num_embeddings
        return self.histogram.share(start, end)

    def distinct(self, ids: float) -> float:
        """Expected number of distinct rows among a number of ids of the whole table."""
        if self.growth is not None:
            return min(self.growth.distinct(ids), float(self.num_embeddings))
        return self._evenly(ids)

    def misses(self, ids: float, share: float, rows: int, cached: float) -> float:
        """Expected number of distinct rows, among ``ids`` ids of a batch in a block of ``rows`` rows with ``share`` of
        the table's ids, that a cache with room for ``cached`` rows does not have.

        If it drops the row not used for the longest time, it has the rows of the last ids, of as many as have
        ``cached`` distinct rows. It lacks those that the batch adds (Che, Tung and Wang, *Hierarchical Web caching
        systems*, 2002).
        """

        def distinct(seen: float) -> float:
            whole = self.growth.locally(seen / share) if self.growth else self._evenly(seen / share)
            return min(whole * share, float(rows))

        if not ids or cached >= rows:
            return 0.0
        low, high = 0.0, cached
        while distinct(high) < cached and high < _NEVER:
            high *= 2
        for _ in range(50):
            middle = (low + high) / 2
            low, high = (middle, high) if distinct(middle) < cached else (low, middle)
        return distinct(high + ids) - distinct(high)

    def _evenly(self, ids: float) -> float:
        rows = float(self.num_embeddings)
        return -rows * expm1(-ids / rows) if ids < 700 * rows else rows * (1 - exp(-700.0))

"""A shard is a rectangle of one embedding table on one rank. A table's layout is a set of them.

::

    columns 0 ........ D          a layout is made of column stripes, and each stripe of row blocks:
      ┌──────────┬─────┐  row 0
      │ rank 0   │ r 1 │          stripe [0, 64): blocks [0, 600) on rank 0 and [600, 1000) on rank 2
      │          ├─────┤          stripe [64, 96): blocks [0, 300) on rank 1 and [300, 1000) on rank 3
      ├──────────┤ r 3 │
      │ rank 2   │     │          Table-wise is one stripe of one block, row-wise one stripe of many,
      └──────────┴─────┘  R       column-wise many stripes of one block, grid many of many.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from operator import attrgetter

COLUMN_UNIT = 4
"""Kernels move four floats at a time: tables are cut between columns at multiples of this."""
_TIERS = ("device", "cached", "host")


def tier_fault(tier: str, load_factor: float) -> str:
    """What is wrong with a tier and the size of its cache; "" for nothing."""
    if tier == "ssd":
        return (
            "there is no tier 'ssd': fbgemm's tables on an SSD are rows of a key-value store, and no memory that a "
            "checkpoint, a reshard or a publisher could read. Use tier 'cached' or 'host'"
        )
    if tier not in _TIERS:
        return f"there is no tier {tier!r}. The tiers are {', '.join(_TIERS)}"
    if tier == "cached" and not 0 < load_factor <= 1:
        return f"load_factor is {load_factor}. A cache has room for a part of the rows, above 0 and at most 1"
    if tier != "cached" and load_factor:
        return f"load_factor is {load_factor} in tier {tier!r}, which has no cache. Set it to 0, or tier to 'cached'"
    return ""


@dataclass(frozen=True, kw_only=True, order=True)
class Shard:
    """Rows ``[row_start, row_end)`` and columns ``[col_start, col_end)`` of ``table`` on ``rank``."""

    table: str
    row_start: int
    row_end: int
    col_start: int
    col_end: int
    rank: int

    @property
    def rows(self) -> int:
        """Number of rows."""
        return self.row_end - self.row_start

    @property
    def cols(self) -> int:
        """Number of columns."""
        return self.col_end - self.col_start

    @property
    def numel(self) -> int:
        """Number of weights."""
        return self.rows * self.cols

    def __str__(self) -> str:
        return f"{self.table}[{self.row_start}:{self.row_end}, {self.col_start}:{self.col_end}] on rank {self.rank}"


@dataclass(frozen=True, kw_only=True)
class Stripe:
    """The shards of one column range, in row order. They share their ids' row partition."""

    col_start: int
    col_end: int
    shards: tuple[Shard, ...]

    @property
    def boundaries(self) -> tuple[int, ...]:
        """Row boundaries, ``len(shards) + 1`` of them, from 0 to the number of rows."""
        return (*(shard.row_start for shard in self.shards), self.shards[-1].row_end)


@dataclass(frozen=True, kw_only=True)
class TableLayout:
    """The shards of one table.

    Args:
        name: table name, unique in the plan (``"path.to.module.table"`` when a model holds several collections).
        num_embeddings: rows of the table.
        embedding_dim: columns of the table.
        shards: the rectangles, which cover the table exactly once. Empty when ``replicated``.
        replicated: every rank holds the whole table (data-parallel). Gradients are all-reduced.
        cut: the name of the cut that made the layout, for reports. The run time does not read it.
        tier: where its rows are on CUDA: on the ``"device"``, the ``"host"``, or there behind a cache (``"cached"``).
        load_factor: of tier ``"cached"``, the part of a shard's rows that its cache has room for.
    """

    name: str
    num_embeddings: int
    embedding_dim: int
    shards: tuple[Shard, ...] = ()
    replicated: bool = False
    cut: str = "mixed"
    tier: str = "device"
    load_factor: float = 0.0

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks that hold a shard, ascending. Empty when replicated."""
        return tuple(sorted({shard.rank for shard in self.shards}))

    def on_rank(self, rank: int) -> tuple[Shard, ...]:
        """This table's shards on ``rank``, ordered by column, then row."""
        mine = (shard for shard in self.shards if shard.rank == rank)
        return tuple(sorted(mine, key=lambda shard: (shard.col_start, shard.row_start)))

    def stripes(self) -> tuple[Stripe, ...]:
        """The column stripes in column order. Only meaningful for a layout without faults."""
        by_columns: dict[tuple[int, int], list[Shard]] = defaultdict(list)
        for shard in self.shards:
            by_columns[shard.col_start, shard.col_end].append(shard)
        return tuple(
            Stripe(col_start=start, col_end=end, shards=tuple(sorted(by_columns[start, end])))  # by rows
            for start, end in sorted(by_columns)
        )

    def local_numel(self, rank: int) -> int:
        """Number of this table's weights that ``rank`` holds."""
        if self.replicated:
            return self.num_embeddings * self.embedding_dim
        return sum(shard.numel for shard in self.shards if shard.rank == rank)

    def moved_numel(self, new: TableLayout, world_size: int) -> int:
        """Number of weights that ranks have to receive to go from this layout to another one of the same table.

        Args:
            new: the other layout.
            world_size: number of ranks.
        """
        numel = self.num_embeddings * self.embedding_dim
        if self.replicated:
            return 0
        if new.replicated:
            return sum(numel - self.local_numel(rank) for rank in range(world_size))
        moved = 0
        for shard in new.shards:
            moved += shard.numel - sum(
                max(0, min(shard.row_end, held.row_end) - max(shard.row_start, held.row_start))
                * max(0, min(shard.col_end, held.col_end) - max(shard.col_start, held.col_start))
                for held in self.on_rank(shard.rank)
            )
        return moved

    def faults(self, world_size: int) -> list[str]:
        """The faults of this layout, one sentence each. Empty if it covers its table exactly once."""
        if self.num_embeddings < 1 or self.embedding_dim < 1:
            return [
                f"table {self.name!r} has shape ({self.num_embeddings}, {self.embedding_dim}). "
                "Both sizes must be at least 1"
            ]
        if fault := tier_fault(self.tier, self.load_factor):
            return [f"table {self.name!r}: {fault}"]
        if self.replicated:
            return list(self._replica_faults())
        if not self.shards:
            return [f"table {self.name!r} has no shard. Give it to a rank with a cut, or replicate it"]
        faults = [fault for shard in self.shards for fault in self._shard_faults(shard, world_size)]
        # A rectangle that is not one inside the table would show as gaps and overlaps that are not there.
        if all(self._has_rows_of(shard) and self._has_columns_of(shard) for shard in self.shards):
            faults += self._cover_faults()
        return faults

    def _replica_faults(self) -> Iterable[str]:
        if self.tier != "device":
            yield f"table {self.name!r} is replicated, and in tier {self.tier!r}. Cut it, or set the tier to 'device'"
        if self.shards:
            yield (
                f"table {self.name!r} is replicated and has {len(self.shards)} shards as well. "
                "Leave shards empty, or set replicated=False"
            )

    def _has_rows_of(self, shard: Shard) -> bool:
        return 0 <= shard.row_start < shard.row_end <= self.num_embeddings

    def _has_columns_of(self, shard: Shard) -> bool:
        return 0 <= shard.col_start < shard.col_end <= self.embedding_dim

    def _shard_faults(self, shard: Shard, world_size: int) -> Iterable[str]:
        if shard.table != self.name:
            yield (
                f"table {self.name!r} holds a shard of table {shard.table!r}: {shard}. Put it into that table's layout"
            )
        if not 0 <= shard.rank < world_size:
            yield (
                f"{shard}: there is no rank {shard.rank}. The plan is for ranks 0 to {world_size - 1}, move the shard "
                "to one of them"
            )
        remedy = "correct the shard, or leave it out"
        if not self._has_rows_of(shard):
            yield f"{shard}: rows must be a non-empty part of [0, {self.num_embeddings}); {remedy}"
        if not self._has_columns_of(shard):
            yield f"{shard}: columns must be a non-empty part of [0, {self.embedding_dim}); {remedy}"
        elif shard.col_start % COLUMN_UNIT or (shard.col_end % COLUMN_UNIT and shard.col_end < self.embedding_dim):
            yield (
                f"{shard}: the kernels take columns that are cut at multiples of {COLUMN_UNIT}: move the column "
                "boundary"
            )

    def _cover_faults(self) -> list[str]:
        faults = []
        for region in _miscovered(self.num_embeddings, self.embedding_dim, self.shards):
            if region.owners:
                owners = "; ".join(map(str, region.owners))
                faults.append(f"table {self.name!r}: {region} are in two shards ({owners}). Keep one")
            else:
                faults.append(f"table {self.name!r}: {region} are on no rank. Add a shard for them")
        return faults or self._stripe_faults()

    def _stripe_faults(self) -> list[str]:
        ranges = [(stripe.col_start, stripe.col_end) for stripe in self.stripes()]
        crossing = next((f"{a} and {b}" for a, b in pairwise(ranges) if b[0] < a[1]), None)
        if crossing is None:
            return []
        return [
            f"table {self.name!r}: its shards are not column stripes cut into row blocks (column ranges {crossing} "
            "cross). Split the wider shards at the inner column boundary"
        ]


_Range = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class _Region:
    """Cells of a table that are in none or in two of its shards."""

    rows: _Range
    columns: _Range
    owners: tuple[Shard, ...] = ()

    def __str__(self) -> str:
        return "rows {}:{}, columns {}:{}".format(*self.rows, *self.columns)


def _miscovered(rows: int, cols: int, shards: Iterable[Shard]) -> list[_Region]:
    """The gaps, then the overlaps, on the grid of all the shards' boundaries.

    Sweeps the column intervals and, inside each, the rows of the shards that span it, so the cost is
    (column intervals) × (shards in each), not the full grid.
    """
    shards = tuple(shards)
    cuts = sorted({0, cols, *(s.col_start for s in shards), *(s.col_end for s in shards)})
    gaps: list[_Region] = []
    overlaps: list[_Region] = []
    for columns in pairwise(cuts):
        covered, last = 0, None
        for shard in sorted((s for s in shards if s.col_start <= columns[0] < s.col_end), key=attrgetter("row_start")):
            if shard.row_start > covered:
                gaps.append(_Region(rows=(covered, shard.row_start), columns=columns))
            elif shard.row_start < covered and last is not None:
                twice = (shard.row_start, min(covered, shard.row_end))
                overlaps.append(_Region(rows=twice, columns=columns, owners=(last, shard)))
            if shard.row_end > covered:
                covered, last = shard.row_end, shard
        if covered < rows:
            gaps.append(_Region(rows=(covered, rows), columns=columns))
    return _joined(gaps) + _joined(overlaps)


def _joined(regions: Iterable[_Region]) -> list[_Region]:
    """Merge consecutive regions with equal rows and adjacent columns."""
    by_rows: dict[tuple[_Range, tuple[Shard, ...]], list[_Region]] = defaultdict(list)
    for region in regions:
        alike = by_rows[region.rows, region.owners]
        if alike and alike[-1].columns[1] == region.columns[0]:
            columns = (alike[-1].columns[0], region.columns[1])
            alike[-1] = _Region(rows=region.rows, columns=columns, owners=region.owners)
        else:
            alike.append(region)
    return [region for alike in by_rows.values() for region in alike]

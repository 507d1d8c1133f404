"""The cuts: pure functions from a table (name, rows, columns) and ranks to a :class:`TableLayout`.

============================  ===================================================================
:func:`table_wise`            the whole table on one rank
:func:`row_wise`              row blocks, even or at given boundaries, one per rank
:func:`column_wise`           column stripes, even or of given widths, one per rank
:func:`table_row_wise`        row blocks over the ranks of one host
:func:`table_column_wise`     column stripes over the ranks of one host
:func:`grid`                  column stripes, each cut into row blocks over the ranks of one host
:func:`data_parallel`         a copy on every rank
============================  ===================================================================

The names are TorchRec's ``ShardingType``. A cut never makes an empty shard: a table with 3 rows that is cut for 4 ranks
has 3 shards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

from shardrec.errors import PlanError
from shardrec.layout.table_layout import COLUMN_UNIT, Shard, TableLayout
from shardrec.layout.topology import Topology

__all__ = [
    "column_wise",
    "data_parallel",
    "grid",
    "row_wise",
    "table_column_wise",
    "table_row_wise",
    "table_wise",
]


def table_wise(name: str, num_embeddings: int, embedding_dim: int, *, rank: int) -> TableLayout:
    """The whole table on ``rank``."""
    return _layout(name, num_embeddings, embedding_dim, "table_wise", [(0, num_embeddings, 0, embedding_dim, rank)])


def row_wise(
    name: str,
    num_embeddings: int,
    embedding_dim: int,
    *,
    ranks: Sequence[int],
    boundaries: Sequence[int] | None = None,
) -> TableLayout:
    """Row blocks, the i-th on ``ranks[i]``.

    Args:
        name: table name.
        num_embeddings: rows R.
        embedding_dim: columns D.
        ranks: one rank per block. A rank may come twice.
        boundaries: ``len(ranks) + 1`` ascending row numbers from 0 to R. Default: blocks of ``ceil(R / len(ranks))``
            rows, the last ones shorter or left out, as TorchRec cuts.
    """
    edges = _row_edges(name, num_embeddings, len(ranks), boundaries)
    blocks = zip(pairwise(edges), ranks, strict=True)
    rectangles = [(top, bottom, 0, embedding_dim, rank) for (top, bottom), rank in blocks]
    return _layout(name, num_embeddings, embedding_dim, "row_wise", rectangles)


def column_wise(
    name: str,
    num_embeddings: int,
    embedding_dim: int,
    *,
    ranks: Sequence[int],
    widths: Sequence[int] | None = None,
) -> TableLayout:
    """Column stripes, the i-th on ``ranks[i]``.

    Args:
        name: table name.
        num_embeddings: rows R.
        embedding_dim: columns D.
        ranks: one rank per stripe. A rank may come twice.
        widths: columns per stripe, multiples of 4 that add up to D. Default: as even as multiples of 4 allow.
    """
    edges = _column_edges(name, embedding_dim, len(ranks), widths)
    stripes = zip(pairwise(edges), ranks, strict=True)
    rectangles = [(0, num_embeddings, left, right, rank) for (left, right), rank in stripes]
    return _layout(name, num_embeddings, embedding_dim, "column_wise", rectangles)


def table_row_wise(name: str, num_embeddings: int, embedding_dim: int, *, host: int, topology: Topology) -> TableLayout:
    """Row blocks over the ranks of ``host``, so that the partial sums stay inside it."""
    layout = row_wise(name, num_embeddings, embedding_dim, ranks=topology.host_ranks(host))
    return replace(layout, cut="table_row_wise")


def table_column_wise(
    name: str, num_embeddings: int, embedding_dim: int, *, host: int, topology: Topology
) -> TableLayout:
    """Column stripes over the ranks of ``host``."""
    layout = column_wise(name, num_embeddings, embedding_dim, ranks=topology.host_ranks(host))
    return replace(layout, cut="table_column_wise")


def grid(
    name: str,
    num_embeddings: int,
    embedding_dim: int,
    *,
    hosts: Sequence[int],
    topology: Topology,
) -> TableLayout:
    """One column stripe per entry of ``hosts``, each cut into row blocks over that host's ranks."""
    edges = _column_edges(name, embedding_dim, len(hosts), None)
    rectangles = []
    for (left, right), host in zip(pairwise(edges), hosts, strict=True):
        ranks = topology.host_ranks(host)
        rows = _row_edges(name, num_embeddings, len(ranks), None)
        blocks = zip(pairwise(rows), ranks, strict=True)
        rectangles += [(top, bottom, left, right, rank) for (top, bottom), rank in blocks]
    return _layout(name, num_embeddings, embedding_dim, "grid", rectangles)


def data_parallel(name: str, num_embeddings: int, embedding_dim: int) -> TableLayout:
    """A copy of the table on every rank. Its gradient is all-reduced with the dense part's."""
    return TableLayout(
        name=name, num_embeddings=num_embeddings, embedding_dim=embedding_dim, replicated=True, cut="data_parallel"
    )


def _layout(
    name: str, num_embeddings: int, embedding_dim: int, cut: str, rectangles: list[tuple[int, int, int, int, int]]
) -> TableLayout:
    shards = tuple(
        Shard(table=name, row_start=top, row_end=bottom, col_start=left, col_end=right, rank=rank)
        for top, bottom, left, right, rank in rectangles
        if top < bottom and left < right
    )
    layout = TableLayout(name=name, num_embeddings=num_embeddings, embedding_dim=embedding_dim, shards=shards, cut=cut)
    faults = layout.faults(world_size=max((shard.rank for shard in shards), default=0) + 1)
    if faults:
        raise PlanError(faults)
    return layout


def _row_edges(name: str, rows: int, parts: int, boundaries: Sequence[int] | None) -> list[int]:
    if parts < 1:
        raise PlanError(f"table {name!r}: a cut needs at least one rank, got none")
    if boundaries is None:
        block = -(-rows // parts)
        return [min(part * block, rows) for part in range(parts + 1)]
    edges = list(boundaries)
    if len(edges) != parts + 1 or edges[0] != 0 or edges[-1] != rows or edges != sorted(edges):
        raise PlanError(
            f"table {name!r}: row boundaries {edges} do not cut {rows} rows into {parts} blocks. Give {parts + 1} "
            f"ascending numbers from 0 to {rows}"
        )
    return edges


def _column_edges(name: str, cols: int, parts: int, widths: Sequence[int] | None) -> list[int]:
    if parts < 1:
        raise PlanError(f"table {name!r}: a cut needs at least one rank or host, got none")
    if widths is None:
        base, more = divmod(-(-cols // COLUMN_UNIT), parts)
        # If the columns are not a multiple, the last stripe has less than its units, and belongs to the wider stripes.
        first = parts - more if cols % COLUMN_UNIT and base else 0
        edges = accumulate((COLUMN_UNIT * (base + (0 <= part - first < more)) for part in range(parts)), initial=0)
        return [min(edge, cols) for edge in edges]
    if len(widths) != parts or sum(widths) != cols or min(widths) < 0:
        raise PlanError(
            f"table {name!r}: column widths {list(widths)} do not cut {cols} columns into {parts} stripes. Give "
            f"{parts} multiples of {COLUMN_UNIT} that add up to {cols}"
        )
    return [0, *accumulate(widths)]

"""What a batch per rank makes the ranks look up, counted from the ids themselves, for the formula.

Counted from the batches and the plan alone: the exchange has no part in it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from benchmarks.harness.volume import TableTraffic, row_edges
from shardrec.layout import TableLayout

__all__ = ["counted_traffic"]


def counted_traffic(
    layout: TableLayout,
    ids: Sequence[Sequence[Tensor]],
    *,
    distinct: bool = False,
    whole_rows: bool = False,
    bags: Sequence[int | None] | None = None,
) -> TableTraffic:
    """Count the ids of one table.

    Args:
        layout: where the table lives.
        ids: per rank and lookup, (n,) integer ids on the CPU.
        distinct: each rank sends a row's id once, for all the lookups.
        whole_rows: as in :class:`~benchmarks.harness.volume.TableTraffic`.
        bags: as there.
    """
    per_rank = [torch.cat(list(lookups)) if lookups else torch.zeros(0, dtype=torch.int64) for lookups in ids]
    sent = [rank.unique() for rank in per_rank] if distinct else per_rank
    edges = torch.tensor(row_edges(layout))
    rows: tuple[int, ...] = ()
    if whole_rows:
        rows = _per_block(torch.cat(per_rank).unique(), edges)
    return TableTraffic(
        layout=layout,
        lookups=1 if distinct else len(ids[0]),
        ids=tuple(_per_block(rank, edges) for rank in sent),
        rows=rows,
        whole_rows=whole_rows,
        bags=bags,
    )


def _per_block(ids: Tensor, edges: Tensor) -> tuple[int, ...]:
    """(A,) how many ids are in each of the blocks between A + 1 edges."""
    block = torch.searchsorted(edges, ids.to(edges.dtype), right=True) - 1
    return tuple(torch.bincount(block, minlength=edges.numel() - 1).tolist())

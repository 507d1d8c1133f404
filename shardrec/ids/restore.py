"""Restores saved ids under another plan, or in a table of another size, as a pure function of records."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shardrec.exchange.hashing import home_rows
from shardrec.ids.id_map import FALLBACK
from shardrec.ids.options import Evict
from shardrec.layout import Shard, TableLayout


@dataclass(frozen=True, kw_only=True)
class RestoredIds:
    """The ids of a row block, and their saved rows.

    Args:
        records: (R, 3) int64 of the block's map.
        sources: (k,) int64, saved rows of the table, ascending.
        targets: (k,) int64, rows of the block.
        fallback: number of fallback rows, the block's first ones; 0 if the saved blocks have a different number.
        shares: for each saved block that the block overlaps, its first row and its share in the mean that the fallback
            rows become.
        in_place: every row of the block, including free ones, is the saved row of the same number.
        lost: number of ids without a row.
    """

    records: Tensor
    sources: Tensor
    targets: Tensor
    in_place: bool
    lost: int
    fallback: int = 0
    shares: tuple[tuple[int, float], ...] = ()


def restored_ids(
    saved: Sequence[tuple[int, Tensor]],
    old_rows: int,
    fresh: Tensor,
    shard: Shard,
    layout: TableLayout,
    evict: Evict,
    step: int,
) -> RestoredIds:
    """Assign rows to the saved ids of a row block.

    Args:
        saved: the saved blocks that it overlaps, by their first rows. Records (n, 3).
        old_rows: number of rows of the table as it was saved.
        fresh: (R, 3) records of the block's map without ids.
        shard: the block.
        layout: of its table.
        evict: which ids are left out first if there are too few rows.
        step: the step that was saved.
    """
    if len(saved) == 1 and saved[0][0] == shard.row_start and saved[0][1].shape == fresh.shape:
        records = saved[0][1]
        if torch.equal(records[:, 1].clamp(max=0), fresh[:, 1]) and bool(_mine(records, shard, layout).all()):
            rows = torch.arange(fresh.size(0))
            sources = rows + shard.row_start
            return RestoredIds(records=records, sources=sources, targets=rows, in_place=True, lost=0)
    empty = fresh.new_empty((0, 3))
    records = torch.cat([empty, *(block for _, block in saved)])
    rows = torch.cat([empty[:, 0], *(torch.arange(block.size(0)) + start for start, block in saved)])
    chosen = ((records[:, 1] > 0) & _mine(records, shard, layout)).nonzero().squeeze(1)
    free = (fresh[:, 1] == 0).nonzero().squeeze(1)
    lost = max(0, chosen.numel() - free.numel())
    if lost:
        chosen = _best(records, chosen, free.numel(), evict, step)
    free = free[: chosen.numel()]
    placed_records = fresh.clone()
    placed_records[free] = records[chosen]
    fallback = int((fresh[:, 1] == FALLBACK).sum())
    if any(int((block[:, 1] == FALLBACK).sum()) != fallback for _, block in saved):
        fallback = 0
    return RestoredIds(
        records=placed_records,
        sources=rows[chosen],
        targets=free,
        in_place=False,
        lost=lost,
        fallback=fallback,
        shares=_shares(saved, shard, layout, old_rows) if fallback else (),
    )


def _shares(
    saved: Sequence[tuple[int, Tensor]], shard: Shard, layout: TableLayout, old_rows: int
) -> tuple[tuple[int, float], ...]:
    """Of each saved block, its first row and its share of the ids of a row block."""
    new_rows = layout.num_embeddings
    common = [
        min((start + len(block)) * new_rows, shard.row_end * old_rows)
        - max(start * new_rows, shard.row_start * old_rows)
        for start, block in saved
    ]
    return tuple((start, part / sum(common)) for (start, _), part in zip(saved, common, strict=True))


def _mine(records: Tensor, shard: Shard, layout: TableLayout) -> Tensor:
    """(n,) bool, whether the id of each row belongs to a row block. True for rows without an id."""
    home = home_rows(records[:, 0], torch.tensor(layout.num_embeddings))
    return (records[:, 1] <= 0) | ((home >= shard.row_start) & (home < shard.row_end))


def _best(records: Tensor, chosen: Tensor, count: int, evict: Evict, step: int) -> Tensor:
    """Those ``count`` of the rows that would be evicted last, ascending."""
    _, uses, last = records[chosen].unbind(1)
    worth = {"lfu": uses.double(), "score": uses.double() / (step + 1 - last).clamp(min=1)}.get(
        evict, torch.zeros(len(chosen))
    )
    # Stable sorts, the least important key first: rows are ascending already.
    order = torch.argsort(last, stable=True)
    order = order[torch.argsort(worth[order], stable=True)]
    return chosen[order[-count:]].sort().values if count else chosen[:0]

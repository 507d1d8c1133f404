"""Rowwise Adagrad and partial rowwise Adam on column cuts: the mean square of a row that lies on several ranks.

The ranks that hold the column stripes of a table see the same ids, hence the same distinct rows of a step. Each sends
the sums of squares of its columns to the holders of the other stripes, in row order, in one all-to-all. Its sizes both
sides know. All ranks add up in stripe order, so that their sums, and their copies of the optimizer states, are
bit-identical.

All rows of a step form one vector, class after class and within a class table after table, and ranges of it are sent.
The edges of the ranges are known from the plan, and one search per class finds them among the step's rows. Neighbouring
ranges are merged.

TorchRec uses the mean over each rank's columns instead, which is a different optimizer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from shardrec.exchange.collectives import Collectives
from shardrec.exchange.to_device import staged
from shardrec.layout import Shard, TableLayout
from shardrec.lookup.group_shards import RowGradient, TableBank


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """Sums of squares of the rows ``[row_start, row_end)`` that go from ``source`` to ``target``."""

    source: Shard
    target: Shard
    row_start: int
    row_end: int


def transfers(layouts: Sequence[TableLayout]) -> list[Transfer]:
    """Every transfer, in an order that all ranks agree on."""
    moves = []
    for layout in layouts:
        for source in layout.shards:
            for target in layout.shards:
                start, end = max(source.row_start, target.row_start), min(source.row_end, target.row_end)
                if source.col_start != target.col_start and start < end:
                    moves.append(Transfer(source=source, target=target, row_start=start, row_end=end))
    return sorted(moves, key=lambda t: (t.source.rank, t.target.rank, t.source, t.target))


class _Range(NamedTuple):
    """Rows that hold sums of squares of one stripe.

    Args:
        rank: the rank that they are sent to or received from.
        column: the first column of the stripe, which determines the order of addition.
        start: number of the lower edge; in a step, the index of the first row.
        end: number of the upper edge; in a step, the index after the last row.
    """

    rank: int
    column: int
    start: int
    end: int


class WholeRows:
    """Exchanges sums of squares for one lookup group.

    Args:
        layouts: the group's tables, in plan order.
        local: this rank's shards, in the order of the bank's tables.
        bank: of these shards. None without shards.
        collectives: of the group that the embeddings are sharded over.
        device: of the shards.
    """

    def __init__(
        self,
        layouts: Sequence[TableLayout],
        local: Sequence[Shard],
        bank: TableBank | None,
        collectives: Collectives,
        device: torch.device,
    ) -> None:
        self._collectives = collectives
        self._nothing = torch.zeros(0, dtype=torch.float32, device=device)
        classes = () if bank is None else bank.classes
        rank = collectives.rank
        place_of = {
            local[table]: (number, base)
            for number, cls in enumerate(classes)
            for table, base in zip(cls.tables, cls.bases, strict=False)
        }

        def edges_of(shard: Shard, row_start: int, row_end: int) -> tuple[tuple[int, int], tuple[int, int]]:
            """Of some rows of a shard that is here: class, and row of its matrix."""
            cls, base = place_of[shard]
            return (cls, base + row_start - shard.row_start), (cls, base + row_end - shard.row_start)

        moves = transfers(layouts)
        outgoing = [
            (move.target.rank, move.source.col_start, *edges_of(move.source, move.row_start, move.row_end))
            for move in moves
            if move.source.rank == rank
        ]
        incoming = [
            (move.source.rank, move.source.col_start, *edges_of(move.target, move.row_start, move.row_end))
            for move in moves
            if move.target.rank == rank
        ]
        shards = [local[table] for cls in classes for table in cls.tables]
        held = [(rank, shard.col_start, *edges_of(shard, shard.row_start, shard.row_end)) for shard in shards]
        edges = sorted({edge for *_, start, end in (*outgoing, *incoming, *held) for edge in (start, end)})
        number_of = {edge: number for number, edge in enumerate(edges)}
        self._outgoing, self._incoming, self._own = (
            [_Range(other, column, number_of[start], number_of[end]) for other, column, start, end in ranges]
            for ranges in (outgoing, incoming, held)
        )
        self._edges = [
            torch.tensor([row for number, row in edges if number == cls], device=device) for cls in range(len(classes))
        ]
        dim_of = {layout.name: layout.embedding_dim for layout in layouts}
        dims = [dim_of[shard.table] for shard in shards]
        self._dim = dims[0] if len(set(dims)) == 1 else None
        self._dims = torch.tensor(dims, dtype=torch.float32, device=device)

    def mean_squares(self, gradients: Sequence[RowGradient]) -> list[Tensor]:
        """Mean square (U,) over the whole row, for each width class's rows. Every rank must call this.

        Args:
            gradients: one per width class of the bank. Empty without a bank, because all ranks take part in the
                exchange.
        """
        world_size = self._collectives.world_size
        places = self._places(gradients)
        squares = torch.cat([self._nothing, *(gradient.square_sums() for gradient in gradients)])
        parts = [[squares[:0]] for _ in range(world_size)]
        for span in _in_step(self._outgoing, places):
            parts[span.rank].append(squares[span.start : span.end])
        incoming = _in_step(self._incoming, places)
        sizes: list[list[int]] = [[] for _ in range(world_size)]
        for span in incoming:
            sizes[span.rank].append(span.end - span.start)
        received = self._collectives.send(parts, list(map(sum, sizes)), "row norm").wait()
        came = [iter(values.split(of_rank)) for values, of_rank in zip(received, sizes, strict=True)]
        held = _in_step(self._own, places)
        sums = [(span, squares[span.start : span.end]) for span in held] + [
            (span, next(came[span.rank])) for span in incoming
        ]
        total = torch.zeros_like(squares)
        for span, values in sorted(sums, key=lambda entry: entry[0].column):
            total[span.start : span.end] += values
        total /= self._dims_of_rows(places) if self._dim is None else self._dim
        return list(total.split([gradient.rows.numel() for gradient in gradients]))

    def _places(self, gradients: Sequence[RowGradient]) -> list[int]:
        """The index per edge in the vector of all rows."""
        starts = accumulate((gradient.rows.numel() for gradient in gradients), initial=0)
        by_class = [
            start + torch.searchsorted(gradient.rows, edges)
            for start, gradient, edges in zip(starts, gradients, self._edges, strict=False)
        ]
        places: list[int] = torch.cat(by_class).tolist() if by_class else []  # the device is waited for once
        return places

    def _dims_of_rows(self, places: Sequence[int]) -> Tensor:
        """(U,) columns of each row's table."""
        counts = [places[span.end] - places[span.start] for span in self._own]
        per_table = staged(counts, torch.int64, self._dims.device)
        return self._dims.repeat_interleave(per_table, output_size=sum(counts))


def _in_step(ranges: Iterable[_Range], places: Sequence[int]) -> list[_Range]:
    """The ranges in a step, without empty ones. Neighbouring ranges of one rank and stripe are merged."""
    joined: list[_Range] = []
    for span in ranges:
        start, end = places[span.start], places[span.end]
        if start == end:
            continue
        if joined and (joined[-1].rank, joined[-1].column, joined[-1].end) == (span.rank, span.column, start):
            start = joined.pop().start
        joined.append(_Range(span.rank, span.column, start, end))
    return joined

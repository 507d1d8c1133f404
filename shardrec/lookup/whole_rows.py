"""Rowwise Adagrad on tables cut by columns: the mean square of a whole row, whose columns lie on several ranks.

The ranks that hold the column stripes of a table see the same ids, hence the same distinct rows of a step. Each sends
the sums of squares of its columns to the holders of the other stripes, in row order: one all-to-all, whose sizes each
side knows without being told. All add up in stripe order, so that their sums, and the optimizer states that they keep
one copy each of, are equal to the last bit.

TorchRec, measured on the same tables, uses the mean over each rank's own columns instead, which is another optimizer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shardrec.exchange.collectives import Collectives
from shardrec.layout import Shard, TableLayout
from shardrec.lookup.bank import RowGradient, TableBank

__all__ = ["Transfer", "WholeRows", "transfers"]


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """Sums of squares of the rows ``[row_start, row_end)`` that go from ``source`` to ``target``."""

    source: Shard
    target: Shard
    row_start: int
    row_end: int


def transfers(layouts: Sequence[TableLayout]) -> list[Transfer]:
    """Every transfer, in an order that all ranks agree on."""
    found = []
    for layout in layouts:
        for source in layout.shards:
            for target in layout.shards:
                start, end = max(source.row_start, target.row_start), min(source.row_end, target.row_end)
                if source.col_start != target.col_start and start < end:
                    found.append(Transfer(source=source, target=target, row_start=start, row_end=end))
    return sorted(found, key=lambda t: (t.source.rank, t.target.rank, t.source, t.target))


class WholeRows:
    """Exchanges sums of squares for one lookup group.

    Args:
        layouts: the group's tables, in plan order.
        local: this rank's shards, in the order of the bank's tables.
        collectives: of the group that the embeddings are sharded over.
    """

    def __init__(self, layouts: Sequence[TableLayout], local: Sequence[Shard], collectives: Collectives) -> None:
        self._dims = {layout.name: layout.embedding_dim for layout in layouts}
        self._local = tuple(local)
        self._collectives = collectives
        mine = collectives.rank
        every = transfers(layouts)
        self._outgoing = [transfer for transfer in every if transfer.source.rank == mine]
        self._incoming = [transfer for transfer in every if transfer.target.rank == mine]

    def mean_squares(self, bank: TableBank | None, gradients: Sequence[RowGradient]) -> list[Tensor]:
        """Mean square (U,) over the whole row, for each width class's rows; every rank must call this.

        Args:
            bank: this rank's shards of the group, or None without any.
            gradients: one per width class of the bank.
        """
        segments = {} if bank is None else _segments(bank, self._local, gradients)
        sizes_out = [0] * self._collectives.world_size
        parts = []
        for transfer in self._outgoing:
            start, end = segments[transfer.source].range_of(transfer)
            parts.append(segments[transfer.source].squares[start:end])
            sizes_out[transfer.target.rank] += end - start
        sizes_in = [0] * self._collectives.world_size
        ranges = []
        for transfer in self._incoming:
            start, end = segments[transfer.target].range_of(transfer)
            ranges.append((transfer, start, end))
            sizes_in[transfer.source.rank] += end - start
        device = torch.device("cpu") if bank is None else bank.device
        send = torch.cat(parts) if parts else torch.zeros(0, device=device)
        pending = self._collectives.all_to_all(send, sizes_in, sizes_out, "row norm")
        received = self._collectives.wait(pending, "row norm")
        pieces = received.split([end - start for _, start, end in ranges])
        for segment in segments.values():
            segment.begin()
        arrived = [
            (transfer.source.col_start, transfer.target, start, piece)
            for (transfer, start, _), piece in zip(ranges, pieces, strict=True)
        ]
        own = [(shard.col_start, shard, 0, segment.squares) for shard, segment in segments.items()]
        for _, target, start, piece in sorted(arrived + own, key=lambda entry: (entry[0], entry[1], entry[2])):
            segments[target].total[start : start + piece.numel()] += piece
        return self._by_class(bank, gradients, segments)

    def _by_class(
        self, bank: TableBank | None, gradients: Sequence[RowGradient], segments: dict[Shard, _Segment]
    ) -> list[Tensor]:
        if bank is None:
            return []
        means = []
        for cls, gradient in zip(bank.classes, gradients, strict=True):
            totals = [segments[self._local[table]].total / self._dims[self._local[table].table] for table in cls.tables]
            means.append(torch.cat(totals) if totals else gradient.values.new_zeros(0))
        return means


@dataclass(kw_only=True)
class _Segment:
    """One local shard's distinct rows in this step: table row numbers (ascending, on the host side of a search)."""

    rows: Tensor
    squares: Tensor
    total: Tensor

    def range_of(self, transfer: Transfer) -> tuple[int, int]:
        """Positions of the transfer's rows among this shard's distinct rows."""
        edges = torch.tensor([transfer.row_start, transfer.row_end], device=self.rows.device)
        start, end = torch.searchsorted(self.rows, edges).tolist()
        return start, end

    def begin(self) -> None:
        """Start the sum over the stripes."""
        self.total = torch.zeros_like(self.squares)


def _segments(bank: TableBank, local: Sequence[Shard], gradients: Sequence[RowGradient]) -> dict[Shard, _Segment]:
    found = {}
    for cls, gradient in zip(bank.classes, gradients, strict=True):
        squares = gradient.square_sums()
        edges = torch.searchsorted(gradient.rows, torch.tensor(cls.bases, device=gradient.rows.device)).tolist()
        for position, table in enumerate(cls.tables):
            part = slice(edges[position], edges[position + 1])
            shard = local[table]
            found[shard] = _Segment(
                rows=gradient.rows[part] - cls.bases[position] + shard.row_start,
                squares=squares[part],
                total=squares[part],
            )
    return found

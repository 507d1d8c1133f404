"""Rowwise Adagrad on tables cut by columns: the mean square of a whole row, whose columns lie on several ranks.

The ranks that hold the column stripes of a table see the same ids, hence the same distinct rows of a step. Each sends
the sums of squares of its columns to the holders of the other stripes, in row order: one all-to-all, whose sizes each
side knows without being told. All add up in stripe order, so that their sums, and the optimizer states that they keep
one copy each of, are equal to the last bit.

All the rows of a step are one vector here, class after class and in a class table after table, and what travels are
ranges of it. Which edges those have is known from the plan, where they lie among the step's rows is one search per
class; neighbouring ranges are one.

TorchRec, measured on the same tables, uses the mean over each rank's own columns instead, which is another optimizer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice

import torch
from torch import Tensor

from shardrec.exchange.collectives import Collectives
from shardrec.exchange.staging import staged
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


@dataclass(frozen=True, kw_only=True)
class _Span:
    """Rows between two edges of a width class, which hold sums of squares of one stripe.

    Args:
        rank: where they go to or come from.
        stripe: number of the stripe among those of its table, by columns: the order of addition.
        cls: number of the width class.
        first: number of the lower edge in the class.
        last: number of the upper one.
    """

    rank: int
    stripe: int
    cls: int
    first: int
    last: int


@dataclass(kw_only=True)
class _Run:
    """A span in a step: places ``[start, end)`` of the vector of all rows."""

    rank: int
    stripe: int
    start: int
    end: int


class WholeRows:
    """Exchanges sums of squares for one lookup group.

    Args:
        layouts: the group's tables, in plan order.
        local: this rank's shards, in the order of the bank's tables.
        collectives: of the group that the embeddings are sharded over.
    """

    def __init__(self, layouts: Sequence[TableLayout], local: Sequence[Shard], collectives: Collectives) -> None:
        self._layouts = {layout.name: layout for layout in layouts}
        self._local = tuple(local)
        self._collectives = collectives
        self._every = transfers(layouts)
        self._spans: _Spans | None = None

    def mean_squares(self, bank: TableBank | None, gradients: Sequence[RowGradient]) -> list[Tensor]:
        """Mean square (U,) over the whole row, for each width class's rows; every rank must call this.

        Args:
            bank: this rank's shards of the group, always the same, or None without any.
            gradients: one per width class of the bank.
        """
        collectives = self._collectives
        if bank is None:
            # Without shards there is nothing to tell; the exchange takes all ranks.
            nothing = [[torch.zeros(0)] for _ in range(collectives.world_size)]
            collectives.send(nothing, [0] * collectives.world_size, "row norm").wait()
            return []
        if self._spans is None:
            self._spans = _Spans(bank, self._local, self._layouts, self._every, collectives.rank)
        spans = self._spans
        places = spans.places(gradients)
        squares = torch.cat([gradient.square_sums() for gradient in gradients])
        parts = [[squares[:0]] for _ in range(collectives.world_size)]
        for run in _runs(spans.outgoing, places):
            parts[run.rank].append(squares[run.start : run.end])
        incoming = list(_runs(spans.incoming, places))
        sizes = [0] * collectives.world_size
        for run in incoming:
            sizes[run.rank] += run.end - run.start
        received = collectives.send(parts, sizes, "row norm").wait()
        added = [(run, squares[run.start : run.end]) for run in _runs(spans.own, places)]
        taken = [0] * collectives.world_size
        for run in incoming:
            begin, taken[run.rank] = taken[run.rank], taken[run.rank] + run.end - run.start
            added.append((run, received[run.rank][begin : taken[run.rank]]))
        total = torch.zeros_like(squares)
        for run, values in sorted(added, key=lambda entry: entry[0].stripe):
            total[run.start : run.end] += values
        total /= spans.dims_of_rows(places)
        return list(total.split([gradient.rows.numel() for gradient in gradients]))


class _Spans:
    """What depends on the plan only.

    Attributes:
        outgoing: in the order of travel.
        incoming: in the order of travel.
        own: this rank's shards, table after table.
    """

    def __init__(
        self,
        bank: TableBank,
        local: Sequence[Shard],
        layouts: dict[str, TableLayout],
        every: Iterable[Transfer],
        rank: int,
    ) -> None:
        self._edges: list[dict[int, int]] = [{} for _ in bank.classes]
        self._device = bank.device
        base_of = {
            local[table]: (number, base)
            for number, cls in enumerate(bank.classes)
            for table, base in zip(cls.tables, cls.bases, strict=False)
        }
        stripes = {
            name: {start: number for number, start in enumerate(sorted({one.col_start for one in layout.stripes()}))}
            for name, layout in layouts.items()
        }

        def span(shard: Shard, other: int, source: Shard, start: int, end: int) -> _Span:
            number, base = base_of[shard]
            first, last = (self._edge(number, base + row - shard.row_start) for row in (start, end))
            stripe = stripes[source.table][source.col_start]
            return _Span(rank=other, stripe=stripe, cls=number, first=first, last=last)

        self.outgoing = [
            span(one.source, one.target.rank, one.source, one.row_start, one.row_end)
            for one in every
            if one.source.rank == rank
        ]
        self.incoming = [
            span(one.target, one.source.rank, one.source, one.row_start, one.row_end)
            for one in every
            if one.target.rank == rank
        ]
        tables = [local[table] for cls in bank.classes for table in cls.tables]
        self.own = [span(one, rank, one, one.row_start, one.row_end) for one in tables]
        self._dims = [layouts[one.table].embedding_dim for one in tables]
        self._dims_of_tables = torch.tensor(self._dims, dtype=torch.float32, device=bank.device)
        self._edge_rows = [torch.tensor(list(edges), device=bank.device) for edges in self._edges]

    def places(self, gradients: Sequence[RowGradient]) -> list[list[int]]:
        """Per class, where its edges are in the vector of all rows."""
        starts = accumulate((gradient.rows.numel() for gradient in gradients), initial=0)
        found = [
            start + torch.searchsorted(gradient.rows, edges)
            for start, gradient, edges in zip(starts, gradients, self._edge_rows, strict=False)
        ]
        numbers = iter(torch.cat(found).tolist())  # the device is waited for once
        return [list(islice(numbers, edges.numel())) for edges in self._edge_rows]

    def dims_of_rows(self, places: Sequence[Sequence[int]]) -> Tensor | float:
        """Columns of each row's table: (U,), or one number for all."""
        if len(set(self._dims)) == 1:
            return float(self._dims[0])
        counts = [places[one.cls][one.last] - places[one.cls][one.first] for one in self.own]
        per_table = staged(counts, torch.int64, self._device)
        return self._dims_of_tables.repeat_interleave(per_table, output_size=sum(counts))

    def _edge(self, cls: int, row: int) -> int:
        return self._edges[cls].setdefault(row, len(self._edges[cls]))


def _runs(spans: Iterable[_Span], places: Sequence[Sequence[int]]) -> Iterator[_Run]:
    """The spans of a step, neighbours of one rank and stripe as one; none is empty."""
    last: _Run | None = None
    for one in spans:
        start, end = places[one.cls][one.first], places[one.cls][one.last]
        if start == end:
            continue
        if last is not None and (last.rank, last.stripe, last.end) == (one.rank, one.stripe, start):
            last.end = end
            continue
        if last is not None:
            yield last
        last = _Run(rank=one.rank, stripe=one.stripe, start=start, end=end)
    if last is not None:
        yield last

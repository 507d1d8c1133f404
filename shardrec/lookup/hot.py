"""The copies of hot rows, and the shards that own the rows: kept equal, so that a checkpoint knows of no hot rows.

A copy is a small replicated table: it is looked up on its rank, its gradient rides on the dense part's all-reduce, and
every rank makes the same update. Each rank then writes the updated rows, and their optimizer states, into the shards
that it holds. So shards always have all of their table: whatever reads them (checkpoints, state_dicts) needs nothing
more. After somebody else has written into shards (first values, a checkpoint that was loaded), the copies are read from
them, in one all-to-all, by the next forward.

Copies are float32, and so are their gradients, as where shards are updated; of a 16-bit table, what was updated is
rounded to nearest, on every rank alike.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from shardrec.exchange.collectives import Collectives
from shardrec.layout import Shard, TableLayout
from shardrec.lookup.replicated import ReplicatedLookup

__all__ = ["HotRows"]

_WHAT = "hot rows"
_EXACT = 1 << 20
"""Counts travel as two float32 numbers."""


@dataclass(frozen=True, kw_only=True)
class _Piece:
    """The hot rows of a table that are in one of its shards: numbers ``first`` to ``last - 1`` among them."""

    table: TableLayout
    shard: Shard
    first: int
    last: int

    @property
    def columns(self) -> slice:
        """Of the shard, in the table."""
        return slice(self.shard.col_start, self.shard.col_end)


class HotRows:
    """The hot rows of a module's tables.

    Args:
        tables: the layouts with hot rows, by the number of their copy among the replicas.
        dtypes: of their weights, by name.
        replicas: has the copies.
        steps: per table that this rank holds a shard of, how many updates its optimizer has made.
        parts: of a shard of this rank, its weight (rows, cols) and its optimizer states by name, (rows, cols) or, if
            kept per row, (rows,).
        collectives: of the group that the tables are sharded over.
        device: where the tables are.
    """

    def __init__(
        self,
        tables: Mapping[int, TableLayout],
        dtypes: Mapping[str, torch.dtype],
        replicas: ReplicatedLookup,
        parts: Callable[[Shard], Mapping[str, Tensor]],
        steps: Callable[[], Mapping[str, int]],
        collectives: Collectives,
        device: torch.device,
    ) -> None:
        self._device, self._dtypes = device, dict(dtypes)
        self._number = {layout.name: number for number, layout in tables.items()}
        self._layouts = list(tables.values())
        self._replicas = replicas
        self._parts, self._steps = parts, steps
        self._collectives = collectives
        self._rows = {
            layout.name: torch.tensor(layout.hot_rows, dtype=torch.int64, device=device) for layout in self._layouts
        }
        for number, layout in tables.items():
            replicas.on_update(number, partial(self._write_back, layout))
        self._own: list[tuple[_Piece, list[Tensor]]] | None = None

    @torch.no_grad()
    def refresh(self) -> None:
        """Read the copies from the shards. All ranks call it alike."""
        sizes = [sum(map(self._numel, self._pieces(rank))) for rank in range(self._collectives.world_size)]
        own, steps = [torch.zeros(0, device=self._device)], self._steps()
        for piece, parts in self._owned():
            rows = self._local_rows(piece, slice(piece.first, piece.last))
            own.append(
                torch.tensor(divmod(steps.get(piece.table.name, 0), _EXACT), dtype=torch.float32, device=self._device)
            )
            own += [part.index_select(0, rows).reshape(-1).to(torch.float32) for part in parts]
        mine = torch.cat(own)
        pending = self._collectives.all_to_all(mine.repeat(len(sizes)), sizes, [mine.numel()] * len(sizes), _WHAT)
        came = self._collectives.wait(pending, _WHAT)
        counts = self._replicas.step_counts()
        start = 0
        for piece in (piece for other in range(len(sizes)) for piece in self._pieces(other)):
            high, low = came[start : start + 2].tolist()
            counts[piece.table.name] = int(high) * _EXACT + int(low)
            start += 2
            for target in self._of(piece):
                target.copy_(came[start : start + target.numel()].view(target.shape))
                start += target.numel()
        self._replicas.load_step_counts(counts)

    def _owned(self) -> list[tuple[_Piece, list[Tensor]]]:
        """This rank's pieces, and of each the weight and the states of its shard."""
        if self._own is None:
            self._own = [
                (piece, [part.detach() for part in self._parts(piece.shard).values()])
                for piece in self._pieces(self._collectives.rank)
            ]
        return self._own

    def _pieces(self, rank: int) -> Iterator[_Piece]:
        for layout in self._layouts:
            for shard in layout.on_rank(rank):
                first, last = (bisect_left(layout.hot_rows, row) for row in (shard.row_start, shard.row_end))
                if first < last:
                    yield _Piece(table=layout, shard=shard, first=first, last=last)

    def _local_rows(self, piece: _Piece, some: slice | Tensor) -> Tensor:
        """Rows of the shard, of some of the table's hot rows."""
        return self._rows[piece.table.name][some] - piece.shard.row_start

    def _copies(self, layout: TableLayout) -> Sequence[Tensor]:
        """The copy's weight, and its states, in the order of :attr:`_parts`.

        Its ``data``, for writing into it between forward and backward is no fault: a lookup's gradient does not depend
        on the weight.
        """
        number = self._number[layout.name]
        return [self._replicas.parameters[number].data, *self._replicas.states(number).values()]

    def _of(self, piece: _Piece) -> list[Tensor]:
        """A piece of the copy's weight and of its states."""
        return [
            copy[piece.first : piece.last, piece.columns] if copy.dim() > 1 else copy[piece.first : piece.last]
            for copy in self._copies(piece.table)
        ]

    def _numel(self, piece: _Piece) -> int:
        return 2 + sum(target.numel() for target in self._of(piece))

    @torch.no_grad()
    def _write_back(self, layout: TableLayout, rows: Tensor | None) -> None:
        """Write the copy's rows of these numbers (None: all of them) into this rank's shards."""
        if (dtype := self._dtypes[layout.name]) is not torch.float32:
            weight = self._copies(layout)[0]
            weight.copy_(weight.to(dtype))
        for piece, parts in self._owned():
            if piece.table.name != layout.name:
                continue
            some: Tensor | slice = slice(piece.first, piece.last)
            if rows is not None:
                some = rows[(rows >= piece.first) & (rows < piece.last)]
            local = self._local_rows(piece, some)
            for copy, part in zip(self._copies(layout), parts, strict=True):
                values = copy[some] if copy.dim() == 1 else copy[some][:, piece.columns]
                part.index_copy_(0, local, values.to(part.dtype))

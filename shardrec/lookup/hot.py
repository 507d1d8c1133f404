"""The copies of hot rows, and the shards that own the rows: kept equal, so that a checkpoint knows of no hot rows.

All the copies of a collection are one buffer: one kernel call looks them up, they take one dense gradient, which rides
on the dense part's all-reduce, and every rank makes the same update::

    buffer   | t1 (64 × 16) | t4 (256 × 16) | t2 (64 × 16) | t3 (64 × 8) |     by width, then optimizer
    packs      Adagrad: matrix (320, 16)      SGD: (64, 16)  SGD: (64, 8)      one update each
    marks    | 64           | 256           | 64           | 64          |     a number per row

Each rank then writes the updated rows, and their optimizer states, into the shards that it holds, those of a memory at
once. So shards always have all of their table: whatever reads them (checkpoints, state_dicts) needs nothing more. After
somebody else has written into shards (first values, a checkpoint that was loaded), the copies are read from them, in
one all-to-all, by the next forward.

A mark has the gradient 1 on each rank that looked its row up, and is averaged with the others: so rows are updated that
were looked up, as in a shard, though their gradient be 0 (see [Note: rows that were looked up] in
:mod:`shardrec.lookup.replicated`), and nobody searches the gradient for them.

Copies are float32, and so are their gradients, as where shards are updated; of a 16-bit table, what was updated is
rounded to nearest, on every rank alike.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx, once_differentiable

from shardrec.exchange.collectives import joined
from shardrec.exchange.context import StepContext
from shardrec.layout import Shard, TableLayout
from shardrec.lookup.bank import TableBank
from shardrec.lookup.groups import LookupTable
from shardrec.lookup.replicated import Copies, UsedRows
from shardrec.lookup.shards import ShardLookup

__all__ = ["HotRows"]

_WHAT = "hot rows"
_EXACT = 1 << 20
"""Counts travel as two float32 numbers."""


@dataclass(frozen=True, kw_only=True)
class _Pack:
    """The copies of tables of one width and optimizer, which are neighbours in the buffer.

    Args:
        starts: first row of each table's copies in the pack, by its name.
        rows: of the marks.
        weight: (rows, width), a part of the buffer.
        elements: of the buffer.
        update: None if the tables are frozen.
    """

    starts: Mapping[str, int]
    rows: slice
    weight: Tensor
    elements: slice
    update: UsedRows | None

    def parts(self) -> dict[str, Tensor]:
        """The weight and the optimizer's states, by name."""
        return {"weight": self.weight, **({} if self.update is None else self.update.optimizer.states()[0])}


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


@dataclass(frozen=True, kw_only=True)
class _Target:
    """Memory of this rank's shards that rows of a pack are written to.

    Args:
        source: (rows, cols) or (rows,), a part of the pack, or of one of its states.
        memory: all of the shards' that are of this form.
        places: (rows,) int64, where each row goes; -1 for those of other ranks.
        rows: (n,) int64, those that go anywhere.
    """

    source: Tensor
    memory: Tensor
    places: Tensor
    rows: Tensor

    def write(self, changed: Tensor | None) -> None:
        """Write the rows of these numbers; None: all of them."""
        rows = self.rows if changed is None else changed[self.places.index_select(0, changed) >= 0]
        values = self.source.index_select(0, rows)
        self.memory.index_copy_(0, self.places.index_select(0, rows), values.to(self.memory.dtype))


class HotRows(Copies):
    """The hot rows of a module's tables.

    Args:
        tables: those with hot rows.
        slot_tables: per lookup of hot rows, in the order of their ids, the table's name.
        shards: of this rank.
        context: collectives of the tables' ranks, and whether a reducer averages gradients.
        device: where the tables are.
        columns: per lookup, the first column of the output that its sums go to, ascending; None for a row per id.

    Attributes:
        weight: the buffer, flat.
        marks: (R,) for the R copies.
    """

    def __init__(
        self,
        tables: Sequence[LookupTable],
        slot_tables: Sequence[str],
        shards: ShardLookup,
        context: StepContext,
        device: torch.device,
        columns: Sequence[int] | None,
    ) -> None:
        self._device, self._collectives, self._shards = device, context.collectives, shards
        optimizers = list(dict.fromkeys(table.optimizer for table in tables))
        tables = sorted(tables, key=lambda one: (-one.layout.embedding_dim, optimizers.index(one.optimizer)))
        self._tables = {table.layout.name: table for table in tables}
        names = list(self._tables)
        shapes = [(len(table.layout.hot_rows), table.layout.embedding_dim) for table in tables]
        numbers = [names.index(name) for name in slot_tables]
        self._bank = TableBank(shapes, numbers, None, device, pooled=columns is not None)
        self._own = self._bank.own.at_columns(columns) if self._bank.own is not None and columns else None
        widths = [shapes[number][1] for number in numbers]
        # The output's columns of each slot; of all of them, where they are neighbours.
        spans = [slice(start, start + width) for start, width in zip(columns or (), widths, strict=False)]
        together = all(one.stop == other.start for one, other in pairwise(spans))
        self._spans = [slice(spans[0].start, spans[-1].stop)] if spans and together else spans
        size = sum(rows * width for rows, width in shapes)
        self.weight = nn.Parameter(self._bank.memory[:size])
        self.marks = nn.Parameter(torch.zeros(sum(rows for rows, _ in shapes), device=device))
        self._packs = list(self._new_packs(tables))
        self._pack_of = {name: pack for pack in self._packs for name in pack.starts}
        self._rows = {name: torch.tensor(one.layout.hot_rows, device=device) for name, one in self._tables.items()}
        self._targets: list[list[_Target]] = []
        super().__init__({name: self._pack_of[name].update for name in names}, [self.weight, self.marks], context)

    def _new_packs(self, tables: Sequence[LookupTable]) -> Iterator[_Pack]:
        row = element = 0
        for (width, optimizer), some in groupby(tables, lambda one: (one.layout.embedding_dim, one.optimizer)):
            layouts = [one.layout for one in some]
            starts = [0, *accumulate(len(layout.hot_rows) for layout in layouts)]
            rows, elements = slice(row, row + starts[-1]), slice(element, element + starts[-1] * width)
            weight = self.weight.data[elements].view(-1, width)
            yield _Pack(
                starts=dict(zip([layout.name for layout in layouts], starts, strict=False)),
                rows=rows,
                weight=weight,
                elements=elements,
                update=None if optimizer is None else UsedRows(weight, optimizer),
            )
            row, element = rows.stop, elements.stop

    def __call__(
        self, ids: Tensor, lengths: Tensor, weights: Tensor | None = None, output: Tensor | None = None
    ) -> Tensor:
        """Look up the copies.

        Args:
            ids: (N,) positions among the hot rows of each slot's table, slot after slot.
            lengths: (S, B).
            weights: (N,) float32 or None.
            output: (B, D) float32, to which sums are added in place.

        Returns:
            ``output``, or (N, dim) float32 rows.
        """
        self._queued = False
        found: Tensor = _HotFunction.apply(  # type: ignore[no-untyped-call]
            output, self, ids, lengths, weights, *self.reduced
        )
        return found

    def look_up(self, ids: Tensor, lengths: Tensor, weights: Tensor | None, output: Tensor | None) -> Tensor:
        """:meth:`__call__` without a gradient."""
        if output is None:
            return self._bank.look_up(ids, lengths, weights)
        if self._own is not None:
            ids, lengths = ids.contiguous(), lengths.to(torch.int32).contiguous()
            return self._own.look_up(ids, lengths, weights, output, added=True)
        sums = self._bank.look_up(ids, lengths, weights).split([one.stop - one.start for one in self._spans], dim=1)
        for span, part in zip(self._spans, sums, strict=True):
            output[:, span].add_(part)
        return output

    def gradients(
        self, ids: Tensor, lengths: Tensor, weights: Tensor | None, gradient: Tensor, *, of_weights: bool
    ) -> tuple[Tensor | None, Tensor, Tensor]:
        """Of the ids' weights, the buffer and the marks, from that of what :meth:`look_up` gave."""
        parts = [gradient[:, span] for span in self._spans] or [gradient]
        gradient = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
        marks = torch.zeros_like(self.marks)
        dense = [one.view(-1) for one in self._bank.dense_gradients(ids, lengths, weights, gradient, marks)]
        weight_gradient = self._bank.weight_gradient(ids, lengths, gradient) if of_weights else None
        return weight_gradient, dense[0] if len(dense) == 1 else torch.cat(dense), marks

    @torch.no_grad()
    def refresh(self) -> None:
        """Read the copies from the shards. All ranks call it alike, before the first lookup."""
        if not self._targets:
            self._targets = [list(self._new_targets(pack)) for pack in self._packs]
        sizes = [sum(map(self._numel, self._pieces(rank))) for rank in range(self._collectives.world_size)]
        own, steps = [torch.zeros(0, device=self._device)], self._shards.step_counts()
        for piece in self._pieces(self._collectives.rank):
            rows = self._rows[piece.table.name][piece.first : piece.last] - piece.shard.row_start
            own.append(
                torch.tensor(divmod(steps.get(piece.table.name, 0), _EXACT), dtype=torch.float32, device=self._device)
            )
            parts = self._parts(piece.shard)
            own += [parts[name].detach()[rows].reshape(-1).to(torch.float32) for name in self._of(piece)]
        mine = torch.cat(own)
        came = joined(self._collectives.send([[mine]] * len(sizes), sizes, _WHAT).wait())
        counts = self.step_counts()
        start = 0
        for piece in (piece for other in range(len(sizes)) for piece in self._pieces(other)):
            high, low = came[start : start + 2].tolist()
            counts[piece.table.name] = int(high) * _EXACT + int(low)
            start += 2
            for target in self._of(piece).values():
                target.copy_(came[start : start + target.numel()].view(target.shape))
                start += target.numel()
        self.load_step_counts(counts)

    def _parts(self, shard: Shard) -> dict[str, Tensor]:
        """A shard's weight (rows, cols) and its optimizer states by name, (rows, cols) or, if kept per row, (rows,)."""
        return {"weight": self._shards.weight(shard), **self._shards.states(shard)}

    def _pieces(self, rank: int) -> Iterator[_Piece]:
        for table in self._tables.values():
            layout = table.layout
            for shard in layout.on_rank(rank):
                first, last = (bisect_left(layout.hot_rows, row) for row in (shard.row_start, shard.row_end))
                if first < last:
                    yield _Piece(table=layout, shard=shard, first=first, last=last)

    def _of(self, piece: _Piece) -> dict[str, Tensor]:
        """A piece of the copies' weight, and of their states."""
        pack = self._pack_of[piece.table.name]
        start = pack.starts[piece.table.name]
        rows = slice(start + piece.first, start + piece.last)
        return {
            name: part[rows, piece.columns] if part.dim() > 1 else part[rows] for name, part in pack.parts().items()
        }

    def _numel(self, piece: _Piece) -> int:
        return 2 + sum(target.numel() for target in self._of(piece).values())

    @torch.no_grad()
    def _update(self) -> None:
        gradient, marks = self.weight.grad, self.marks.grad
        if gradient is None or marks is None:
            return
        used = marks > 0
        for pack, targets in zip(self._packs, self._targets, strict=True):
            if pack.update is not None:
                of_pack = gradient[pack.elements].view(pack.weight.shape)
                changed = pack.update.step(of_pack, used[pack.rows])
                self._round(pack)
                for target in targets:
                    target.write(changed)
        self.weight.grad = self.marks.grad = None

    def _round(self, pack: _Pack) -> None:
        """The copies of 16-bit tables to what these can hold."""
        for name, start in pack.starts.items():
            dtype = self._tables[name].dtype
            if dtype is not torch.float32:
                weight = pack.weight[start : start + len(self._rows[name])]
                weight.copy_(weight.to(dtype))

    def _new_targets(self, pack: _Pack) -> Iterator[_Target]:
        """Where the rows of a pack go on this rank: shards that lie in one memory, on one grid of rows, at once."""
        places: dict[tuple[Any, ...], tuple[Tensor, Tensor, Tensor]] = {}
        for piece in self._pieces(self._collectives.rank):
            if piece.table.name not in pack.starts:
                continue
            parts, start = self._parts(piece.shard), pack.starts[piece.table.name]
            local = torch.tensor(piece.table.hot_rows[piece.first : piece.last]) - piece.shard.row_start
            for name, source in pack.parts().items():
                part = parts[name].detach()
                step = part.stride(0) if part.dim() > 1 else 1
                first, shift = divmod(int(part.storage_offset()), step)
                storage = part.untyped_storage()
                key = name, storage.data_ptr(), part.dtype, shift, piece.shard.col_start, piece.shard.col_end
                if key not in places:
                    count = (storage.nbytes() // part.element_size() - shift - part[:1].numel()) // step + 1
                    whole = part.as_strided((count, *part.shape[1:]), part.stride(), shift)
                    cut = source[:, piece.columns] if source.dim() > 1 else source
                    places[key] = cut, whole, torch.full((len(source),), -1)
                places[key][2][start + piece.first : start + piece.last] = local + first
        for source, memory, of_rows in places.values():
            rows = (of_rows >= 0).nonzero().squeeze(1)
            yield _Target(source=source, memory=memory, places=of_rows.to(self._device), rows=rows.to(self._device))


class _HotFunction(torch.autograd.Function):
    """A lookup of all the copies, whose backward gives the buffer a dense gradient and marks the rows."""

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        output: Tensor | None,
        hot: HotRows,
        ids: Tensor,
        lengths: Tensor,
        weights: Tensor | None,
        *parameters: Tensor,
    ) -> Tensor:
        ctx.hot, ctx.input = hot, (ids, lengths, weights)  # type: ignore[attr-defined]
        if output is not None:
            ctx.mark_dirty(output)
        return hot.look_up(ids, lengths, weights, output)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        found = ctx.hot.gradients(*ctx.input, gradient, of_weights=ctx.needs_input_grad[4])
        return gradient if ctx.needs_input_grad[0] else None, None, None, None, *found

"""Row shards of one host summed before they leave it: what row cuts cost between hosts, divided by the ranks of a host.

Shapes: H hosts of L ranks, B_w samples of rank w, D_s columns summed on a host.

A rank is (h, l), its host and its place there. Where several ranks of host h hold row blocks of the same columns, each
has a partial sum for every sample of every rank. Two steps take it home::

    1. inside host h    (h, l) ──► (h, l'): partial sums for the samples of all ranks (·, l')      add up over l
    2. between hosts    (h, l') ──► (·, l'): sums (B, D_s), in the output all-to-all, with all other columns

Between hosts each sample's sum travels once, not once per row block. The gradient takes the same way back, so that it
enters a host once. The idea is TorchRec's table-row-wise cut (reduce-scatter inside, all-to-all between); here it holds
for whatever the plan puts on one host, with the same two exchanges for all the tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from shardrec.exchange.assemble import Columns
from shardrec.exchange.blocks import BlocksInFlight, Stream
from shardrec.exchange.route import Piece, Route, Slot, Source, add_columns
from shardrec.exchange.wire import Shape

__all__ = ["HostExchange", "HostSums", "host_sums"]

Column = tuple[int, int]
"""Lookup and first column of some neighbouring columns of its table."""

Span = tuple[int, int]
"""First column and number of columns."""


@dataclass(frozen=True, kw_only=True)
class HostSums:
    """Which columns are summed on which host.

    Args:
        ranks_per_host: L.
        columns: per host, what is summed there, with the width of each, in order.
        direct: per rank, the slots whose columns are not.
        direct_spans: per rank, their pooled columns.
        spans: per rank, the pooled columns that are summed.
        pieces: per host, how its sums come from the L blocks.
    """

    ranks_per_host: int
    columns: tuple[tuple[tuple[Column, int], ...], ...]
    direct: tuple[tuple[int, ...], ...]
    direct_spans: tuple[tuple[Span, ...], ...]
    spans: tuple[tuple[Span, ...], ...]
    pieces: tuple[tuple[Piece, ...], ...]

    def width(self, host: int) -> int:
        """Columns summed on a host."""
        return sum(width for _, width in self.columns[host])


def host_sums(route: Route, ranks_per_host: int) -> HostSums | None:
    """What can be summed inside hosts; None if there is one host, or nothing to sum on any.

    Args:
        route: of the ids.
        ranks_per_host: L; ranks are numbered host by host.
    """
    world_size = len(route.slots)
    if ranks_per_host == world_size or ranks_per_host == 1:
        return None
    hosts = range(world_size // ranks_per_host)
    columns = [_summed(route.slots[host * ranks_per_host : (host + 1) * ranks_per_host]) for host in hosts]
    if not any(columns):
        return None
    direct, direct_spans, spans = [], [], []
    sources: list[dict[Column, list[Source]]] = [{} for _ in hosts]
    for rank, slots in enumerate(route.slots):
        host, local = divmod(rank, ranks_per_host)
        alone: list[int] = []
        alone_spans: list[Span] = []
        summed_spans: list[Span] = []
        start = place = 0
        for number, slot in enumerate(slots):
            key = (slot.lookup, slot.shard.col_start)
            if key in columns[host]:
                sources[host].setdefault(key, []).append(Source(block=local, start=place))
                place += slot.shard.cols
                _append(summed_spans, (start, slot.shard.cols))
            else:
                alone.append(number)
                _append(alone_spans, (start, slot.shard.cols))
            start += slot.shard.cols
        direct.append(tuple(alone))
        direct_spans.append(tuple(alone_spans))
        spans.append(tuple(summed_spans))
    pieces = []
    for host in hosts:
        found: list[Piece] = []
        for key, width in columns[host].items():
            add_columns(found, Piece(width=width, sources=tuple(sources[host][key])))
        pieces.append(tuple(found))
    return HostSums(
        ranks_per_host=ranks_per_host,
        columns=tuple(tuple(one.items()) for one in columns),
        direct=tuple(direct),
        direct_spans=tuple(direct_spans),
        spans=tuple(spans),
        pieces=tuple(pieces),
    )


def _summed(ranks: Sequence[tuple[Slot, ...]]) -> dict[Column, int]:
    """The columns of which several ranks of a host hold row blocks, and their widths."""
    holders: dict[Column, set[int]] = {}
    widths: dict[Column, int] = {}
    for rank, slots in enumerate(ranks):
        for slot in slots:
            key = (slot.lookup, slot.shard.col_start)
            holders.setdefault(key, set()).add(rank)
            widths[key] = slot.shard.cols
    return {key: widths[key] for key in sorted(holders) if len(holders[key]) > 1}


def _append(spans: list[Span], span: Span) -> None:
    if spans and sum(spans[-1]) == span[0]:
        spans[-1] = (spans[-1][0], spans[-1][1] + span[1])
    elif span[1]:
        spans.append(span)


class HostExchange:
    """A pooled module's part of the exchange inside hosts.

    Args:
        sums: what is summed where.
        rank: this rank.
    """

    def __init__(self, sums: HostSums, rank: int) -> None:
        self.sums = sums
        self._rank = rank
        self._world_size = len(sums.spans)
        self._host, self._local = divmod(rank, sums.ranks_per_host)
        self.width = sums.width(self._host)
        self.columns = Columns(sums.pieces[self._host])
        self._widths = [sum(width for _, width in spans) for spans in sums.spans]

    def divide(self, pooled: Tensor, batch_sizes: Sequence[int]) -> tuple[Tensor, Stream]:
        """The columns that go straight to the ranks that asked, and what goes to this host's ranks.

        Args:
            pooled: (B_all, D_mine) float32, rank after rank.
            batch_sizes: samples of each rank.
        """
        order = self._order(batch_sizes)
        mine = self.sums
        division = _Division(
            direct=mine.direct_spans[self._rank],
            summed=mine.spans[self._rank],
            order=order,
            batch_sizes=tuple(batch_sizes),
            width=pooled.size(1),
        )
        direct, flat = _Divide.apply(pooled, division)  # type: ignore[no-untyped-call]
        out: list[list[Shape]] = []
        into: list[list[Shape]] = []
        for other in range(self._world_size):
            host, local = divmod(other, mine.ranks_per_host)
            if host == self._host:
                out.append([(self._rows(local, batch_sizes), self._widths[self._rank])])
                into.append([(self._rows(self._local, batch_sizes), self._widths[other])])
            else:
                out.append([])
                into.append([])
        return direct, Stream(flat=flat, out=out, into=into)

    def finish(self, flight: BlocksInFlight, stream: int, batch_sizes: Sequence[int]) -> list[Tensor]:
        """Wait and add up: per host, the sums (B_w, D_s) for its rank w of this rank's place.

        Args:
            flight: the exchange inside hosts.
            stream: number of this module's part of it.
            batch_sizes: samples of each rank.
        """
        rows = self._rows(self._local, batch_sizes)
        total: Tensor = _Sum.apply(self, flight, stream, rows, *flight.blocks(stream))  # type: ignore[no-untyped-call]
        return list(total.split([batch_sizes[rank] for rank in self._peers(self._local)]))

    def blocks(self, flats: Sequence[Tensor], rows: int) -> list[Tensor]:
        """The (rows, columns) blocks of this host's ranks."""
        first = self._host * self.sums.ranks_per_host
        ranks = range(first, first + self.sums.ranks_per_host)
        return [flats[rank].view(rows, self._widths[rank]) for rank in ranks]

    def _peers(self, local: int) -> range:
        return range(local, self._world_size, self.sums.ranks_per_host)

    def _rows(self, local: int, batch_sizes: Sequence[int]) -> int:
        return sum(batch_sizes[rank] for rank in self._peers(local))

    def _order(self, batch_sizes: Sequence[int]) -> tuple[int, ...]:
        """The ranks in the order in which their samples are sent: by their place on a host."""
        return tuple(rank for local in range(self.sums.ranks_per_host) for rank in self._peers(local))


@dataclass(frozen=True, kw_only=True)
class _Division:
    direct: tuple[Span, ...]
    summed: tuple[Span, ...]
    order: tuple[int, ...]
    batch_sizes: tuple[int, ...]
    width: int


class _Divide(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, pooled: Tensor, division: _Division) -> tuple[Tensor, Tensor]:
        ctx.division = division  # type: ignore[attr-defined]
        samples = pooled.split(list(division.batch_sizes))
        summed = [_select(samples[rank], division.summed).reshape(-1) for rank in division.order]
        return _select(pooled, division.direct), torch.cat(summed)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, direct: Tensor, flat: Tensor) -> tuple[Tensor, None]:
        division: _Division = ctx.division
        pooled = direct.new_empty((sum(division.batch_sizes), division.width))
        _write(pooled, division.direct, direct)
        columns = sum(width for _, width in division.summed)
        samples = pooled.split(list(division.batch_sizes))
        parts = flat.split([division.batch_sizes[rank] * columns for rank in division.order])
        for rank, part in zip(division.order, parts, strict=True):
            _write(samples[rank], division.summed, part.view(-1, columns) if columns else part.view(0, 0))
        return pooled, None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx, exchange: HostExchange, flight: BlocksInFlight, stream: int, rows: int, *flats: Tensor
    ) -> Tensor:
        ctx.exchange, ctx.flight, ctx.stream, ctx.rows = exchange, flight, stream, rows  # type: ignore[attr-defined]
        blocks = exchange.blocks(flats, rows)
        return exchange.columns.assemble(blocks) if exchange.width else flats[0].new_zeros((rows, 0))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        exchange: HostExchange = ctx.exchange
        views = ctx.flight.gradient_blocks(ctx.stream)
        blocks = exchange.blocks(views, ctx.rows)
        exchange.columns.distribute(gradient, blocks)
        return None, None, None, None, *views


def _select(rows: Tensor, spans: Sequence[Span]) -> Tensor:
    if not spans:
        return rows.new_zeros((rows.size(0), 0))
    return torch.cat([rows[:, start : start + width] for start, width in spans], dim=1)


def _write(target: Tensor, spans: Sequence[Span], columns: Tensor) -> None:
    place = 0
    for start, width in spans:
        target[:, start : start + width] = columns[:, place : place + width]
        place += width

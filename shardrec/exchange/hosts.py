"""Partial sums of row blocks are added up inside a host before they leave it, which divides their bytes between hosts.

Shapes: H hosts of L ranks, B_w samples of rank w, D_s columns summed on a host.

A rank is (h, l), its host and its place on the host. If several ranks of host h hold row blocks of the same columns,
each has a partial sum for every sample of every rank. It is sent in two steps::

    1. inside host h    (h, l) ──► (h, l'): partial sums for the samples of all ranks (·, l')      add up over l
    2. between hosts    (h, l') ──► (·, l'): sums (B, D_s), in the output all-to-all, with all other columns

Between hosts each sample's sum travels once, not once per row block. The gradient is sent the same way back, so that it
enters a host once. The idea is from TorchRec's table-row-wise cut (reduce-scatter inside, all-to-all between). Here
it applies to all row blocks that the plan puts on one host, with the same two exchanges for all tables.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shardrec.exchange.assemble import Columns
from shardrec.exchange.route import Piece, Route, Slot, Source, add_columns
from shardrec.exchange.row_exchange import OutgoingRows
from shardrec.exchange.wire_format import Shape

Column = tuple[int, int]
"""Lookup and first column of some neighbouring columns of its table."""


@dataclass(frozen=True, kw_only=True)
class HostSums:
    """Which columns are summed on which host.

    Args:
        ranks_per_host: L.
        columns: per host, the columns that are summed there, with their widths, in order.
        direct: per rank, the slots with columns that are not summed.
        direct_columns: per rank, the pooled columns of these slots.
        summed_columns: per rank, the pooled columns that are summed.
        pieces: per host, its sums in terms of the L blocks.
    """

    ranks_per_host: int
    columns: tuple[tuple[tuple[Column, int], ...], ...]
    direct: tuple[tuple[int, ...], ...]
    direct_columns: tuple[tuple[Piece, ...], ...]
    summed_columns: tuple[tuple[Piece, ...], ...]
    pieces: tuple[tuple[Piece, ...], ...]

    def width(self, host: int) -> int:
        """Columns summed on a host."""
        return sum(width for _, width in self.columns[host])


def host_sums(route: Route, ranks_per_host: int) -> HostSums | None:
    """The columns that can be summed inside hosts. None if there is one host, or nothing to sum on any host.

    Args:
        route: of the ids.
        ranks_per_host: L. Ranks are numbered host by host.
    """
    world_size = len(route.slots)
    if ranks_per_host == world_size or ranks_per_host == 1:
        return None
    hosts = range(world_size // ranks_per_host)
    columns = [_summed(route.slots[host * ranks_per_host : (host + 1) * ranks_per_host]) for host in hosts]
    if not any(columns):
        return None
    direct, direct_columns, summed_columns = [], [], []
    sources: list[dict[Column, list[Source]]] = [{} for _ in hosts]
    for rank, slots in enumerate(route.slots):
        host, local = divmod(rank, ranks_per_host)
        alone: list[int] = []
        alone_columns: list[Piece] = []
        summed: list[Piece] = []
        start = place = 0
        for number, slot in enumerate(slots):
            key = (slot.lookup, slot.shard.col_start)
            pooled = Piece(width=slot.shard.cols, sources=(Source(block=0, start=start),))
            if key in columns[host]:
                sources[host].setdefault(key, []).append(Source(block=local, start=place))
                place += slot.shard.cols
                add_columns(summed, pooled)
            else:
                alone.append(number)
                add_columns(alone_columns, pooled)
            start += slot.shard.cols
        direct.append(tuple(alone))
        direct_columns.append(tuple(alone_columns))
        summed_columns.append(tuple(summed))
    pieces = []
    for host in hosts:
        host_pieces: list[Piece] = []
        for key, width in columns[host].items():
            add_columns(host_pieces, Piece(width=width, sources=tuple(sources[host][key])))
        pieces.append(tuple(host_pieces))
    return HostSums(
        ranks_per_host=ranks_per_host,
        columns=tuple(tuple(host_columns.items()) for host_columns in columns),
        direct=tuple(direct),
        direct_columns=tuple(direct_columns),
        summed_columns=tuple(summed_columns),
        pieces=tuple(pieces),
    )


def _summed(ranks: Sequence[tuple[Slot, ...]]) -> dict[Column, int]:
    """The columns with row blocks on several ranks of a host, and their widths."""
    widths = [{(slot.lookup, slot.shard.col_start): slot.shard.cols for slot in slots} for slots in ranks]
    holders = Counter(key for of_rank in widths for key in of_rank)
    width_of = {key: width for of_rank in widths for key, width in of_rank.items()}
    return {key: width_of[key] for key in sorted(holders) if holders[key] > 1}


class HostExchange:
    """A pooled module's part of the exchange inside hosts.

    Attributes:
        direct: the pooled columns that are sent directly to the requesting ranks.
        summed: the pooled columns that are summed first.
        columns: this host's sums, of the blocks of its ranks.
        order: the ranks in the order in which their samples are sent: by their place on a host.
    """

    def __init__(self, sums: HostSums, rank: int) -> None:
        self.sums = sums
        self._rank = rank
        self._world_size = len(sums.direct)
        host, self._local = divmod(rank, sums.ranks_per_host)
        self._ranks = range(host * sums.ranks_per_host, (host + 1) * sums.ranks_per_host)  # of this host
        self.direct, self.summed = Columns(sums.direct_columns[rank]), Columns(sums.summed_columns[rank])
        self.columns = Columns(sums.pieces[host])
        self.order = tuple(other for local in range(sums.ranks_per_host) for other in self._same_local_rank(local))
        self._widths = [sum(piece.width for piece in pieces) for pieces in sums.summed_columns]

    def divide(self, pooled: Tensor, batch_sizes: Sequence[int]) -> tuple[Tensor, OutgoingRows]:
        """Split into columns for the requesting ranks, and the partial sums for this host's ranks.

        Args:
            pooled: (B_all, D_mine) float32, rank after rank.
            batch_sizes: samples per rank.
        """
        samples = pooled.split(list(batch_sizes))
        summed = [self.summed.assemble([samples[rank]]).view(-1) for rank in self.order]
        out: list[list[Shape]] = [[] for _ in range(self._world_size)]
        into: list[list[Shape]] = [[] for _ in range(self._world_size)]
        for local, other in enumerate(self._ranks):
            out[other] = [(self._rows(local, batch_sizes), self._widths[self._rank])]
            into[other] = [(self._rows(self._local, batch_sizes), self._widths[other])]
        return self.direct.assemble([pooled]), OutgoingRows(flat=torch.cat(summed), out=out, into=into)

    def undivide(self, direct: Tensor, flat: Tensor, batch_sizes: Sequence[int]) -> Tensor:
        """The transpose of :meth:`divide`: the gradient of ``pooled`` from the gradients of both results."""
        width = self.summed.width
        pooled = direct.new_empty((sum(batch_sizes), self.direct.width + width))
        self.direct.distribute(direct, [pooled])
        parts = flat.split([batch_sizes[rank] * width for rank in self.order])
        samples = pooled.split(list(batch_sizes))
        for rank, part in zip(self.order, parts, strict=True):
            self.summed.distribute(part.view(batch_sizes[rank], width), [samples[rank]])
        return pooled

    def add_up(self, blocks: Sequence[Tensor], batch_sizes: Sequence[int]) -> list[Tensor]:
        """Per host, the sums (B_w, D_s) for the rank w that has this rank's place on it.

        Args:
            blocks: what came from each rank.
            batch_sizes: samples per rank.
        """
        total = self.columns.assemble(self._blocks(blocks, batch_sizes))
        return list(total.split([batch_sizes[rank] for rank in self._same_local_rank(self._local)]))

    def distribute(self, gradients: Sequence[Tensor], blocks: Sequence[Tensor], batch_sizes: Sequence[int]) -> None:
        """The transpose of :meth:`add_up`: write the blocks' gradients, from the gradients of the sums."""
        self.columns.distribute(torch.cat(list(gradients)), self._blocks(blocks, batch_sizes))

    def _blocks(self, flats: Sequence[Tensor], batch_sizes: Sequence[int]) -> list[Tensor]:
        """The (rows, columns) blocks of this host's ranks."""
        rows = self._rows(self._local, batch_sizes)
        return [flats[rank].view(rows, self._widths[rank]) for rank in self._ranks]

    def _same_local_rank(self, local: int) -> range:
        return range(local, self._world_size, self.sums.ranks_per_host)

    def _rows(self, local: int, batch_sizes: Sequence[int]) -> int:
        return sum(batch_sizes[rank] for rank in self._same_local_rank(local))

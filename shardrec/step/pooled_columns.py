"""Pooled columns: laid out for the ranks that asked for them, and put in the order of the unsharded module there.

Shapes: B local batch, B_all the batches of all ranks, D_q pooled columns on rank q, D output columns, W ranks.

::

    pooled (B_all, D_mine) ── all-to-all ──► blocks (B, D_0), ..., (B, D_{W-1}) ── pieces ──► output (B, D)
    gradient of pooled     ◄── all-to-all ── gradients of the blocks, over W    ◄──────────── gradient (B, D)

[Note: the mean over ranks]
As in DistributedDataParallel, the gradient of a shard is the mean over ranks of their losses' gradients, so that a
mean loss on each rank trains as the mean over the global batch would. The division happens where the gradient is
written for sending. The gradients of replicated tables are averaged by the dense part's all-reduce.

[Note: slots with a batch size each]
On this rank and on the rank that looks up, the columns per slot have as many rows as the largest slot. The
additional bags are empty. Only a slot's own rows travel, slot after slot: ``Ragged`` removes the others and inserts
zeros again. Sums over a host's ranks (:mod:`shardrec.exchange.hosts`) travel with all the rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial

import torch
from torch import Tensor

from shardrec.exchange.assemble import Columns
from shardrec.exchange.batch import KEY_ORDERS
from shardrec.exchange.cut import permuted
from shardrec.exchange.hosts import HostExchange, host_sums
from shardrec.exchange.payload import ShardInput
from shardrec.exchange.ragged import Ragged
from shardrec.exchange.route import Lookup, Route, output_pieces
from shardrec.exchange.wire_format import Shape
from shardrec.step.records import Arrival, DifferentiableOutput, InFlight


class PooledOutput:
    """The layout of pooled columns.

    Args:
        route: of the ids.
        lookups: in the order of the unsharded module's output.
        features: that the tables use, in the order of inverse indices.
        rank: this rank.
        device: of the columns.
        dtype: of the output.
        ranks_per_host: ranks are numbered host by host. Default: one host.
        mean_over: number of ranks over which gradients are averaged. Default: all.

    Attributes:
        pools: rows are summed.
        hosts: the exchange inside hosts, if there is something to sum on any host; else None.
        columns: how the output is made of blocks.
        is_identity: nothing travels and the columns are in order.
        widths: per rank, the columns that it sends without summing them on a host.
    """

    pools = True

    def __init__(
        self,
        route: Route,
        lookups: Sequence[Lookup],
        features: Sequence[str],
        rank: int,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        ranks_per_host: int | None = None,
        mean_over: int | None = None,
    ) -> None:
        self.world_size = len(route.slots)
        self._rank, self._dtype, self._lookups = rank, dtype, tuple(lookups)
        self._ranks_per_host = ranks_per_host or self.world_size
        sums = host_sums(route, self._ranks_per_host)
        self.hosts = None if sums is None else HostExchange(sums, rank)
        self._sums = sums
        self._slots = [range(len(slots)) for slots in route.slots] if sums is None else list(sums.direct)
        self._columns = [
            tuple(slots[number].shard.cols for number in direct)
            for slots, direct in zip(route.slots, self._slots, strict=True)
        ]
        self.widths = tuple(map(sum, self._columns))
        self._slot_counts = route.slot_counts()
        blocks = self.world_size + (0 if sums is None else len(sums.columns))
        scales = [1.0 / (mean_over or self.world_size)] * blocks + [1.0]
        self.columns = Columns(output_pieces(lookups, route, () if sums is None else sums.columns), scales)
        self.is_identity = self.world_size == 1 and self.columns.is_identity
        self.dims = [lookup.layout.embedding_dim for lookup in lookups]
        keys = [lookup.feature for lookup in lookups]
        self._inverse_rows = [list(features).index(feature) for feature in keys]
        means = [index for index, lookup in enumerate(lookups) if lookup.mean]
        columns = [index for index, dim in enumerate(self.dims) for _ in range(dim)]
        sums_L = [index for index in range(len(lookups)) if index not in means]
        self._column_lookup = torch.tensor(columns, dtype=torch.int64, device=device) if means else None
        self._sum_lookups = torch.tensor(sums_L, dtype=torch.int64, device=device)
        replicated = [lookup.feature for lookup in lookups if lookup.layout.replicated]
        self._replicated_width = sum(lookup.layout.embedding_dim for lookup in lookups if lookup.layout.replicated)
        # The positions of the replicated lookups' features, and of all lookups' features, among a batch's keys.
        self._replicated_positions, self._key_positions = (
            lru_cache(maxsize=KEY_ORDERS)(partial(_positions, some, device)) for some in (replicated, keys)
        )

    def outgoing(
        self, rows: Sequence[Tensor], received: ShardInput, sums: Sequence[Tensor] = ()
    ) -> tuple[Tensor, list[list[Shape]]]:
        """The rows that this rank sends to each rank (on a server: to each request), one after the other, and their
        shapes.

        Args:
            rows: (B_all, D_mine) float32, rank after rank, without the columns that are summed on hosts. One tensor.
            received: the ids that the ranks requested, which were looked up.
            sums: from :attr:`hosts`, if that is not None.
        """
        (pooled,), mine = rows, self.widths[self._rank]
        if self._sums is None and not any(received.slot_sizes):
            return pooled.reshape(-1), [[(size, mine)] for size in received.batch_sizes]
        out: list[list[Shape]] = []
        parts: list[Tensor] = []
        for other, block in enumerate(pooled.split(list(received.batch_sizes))):
            ragged = self._ragged_out(received, other)
            shapes: list[Shape] = [(block.size(0), block.size(1))] if ragged is None else ragged.shapes
            parts.append(block.reshape(-1) if ragged is None else ragged.strip(block))
            if self._has_same_local_rank(other):
                summed = sums[other // self._ranks_per_host]
                parts.append(summed.reshape(-1))
                shapes = [*shapes, (summed.size(0), summed.size(1))]
            out.append(shapes)
        return torch.cat(parts), out

    def returned(self, flat: Tensor, received: ShardInput) -> tuple[list[Tensor], list[Tensor]]:
        """The transpose of :meth:`outgoing`: the gradients of ``rows`` and of ``sums``."""
        mine = self.widths[self._rank]
        if self._sums is None and not any(received.slot_sizes):
            return [flat.view(sum(received.batch_sizes), mine)], []
        sizes: list[int] = []
        for other, rows in enumerate(received.batch_sizes):
            ragged = self._ragged_out(received, other)
            sizes.append(rows * mine if ragged is None else sum(size * columns for size, columns in ragged.shapes))
            sizes.append(self._summed_elements(other, rows))
        parts = flat.split(sizes)
        blocks, sums = [], []
        for other, rows in enumerate(received.batch_sizes):
            ragged, part = self._ragged_out(received, other), parts[2 * other]
            blocks.append(part.view(rows, mine) if ragged is None else ragged.pad(part))
            if self._has_same_local_rank(other):
                sums.append(parts[2 * other + 1].view(rows, self._summed_width(self._rank)))
        return [torch.cat(blocks)], sums

    def into(self, arrival: Arrival) -> list[list[Shape]]:
        """Per rank, the shapes of the parts that come from it."""
        size = arrival.size
        if arrival.slot_sizes is None and self._sums is None:
            return [[(size, width)] for width in self.widths]
        ragged = self._ragged_in(arrival)
        shapes: list[list[Shape]] = []
        for other, width in enumerate(self.widths):
            shapes.append([(size, width)] if ragged is None else ragged[other].shapes)
            if self._has_same_local_rank(other):
                shapes[other] = [*shapes[other], (size, self._summed_width(other))]
        return shapes

    def assemble(self, arrival: Arrival, flats: Sequence[Tensor], replicated: Tensor | None) -> Tensor:
        """(B, D) float32, columns in the unsharded order.

        Args:
            arrival: of the rows.
            flats: the block that came from each rank.
            replicated: (B, D_r) pooled columns of the replicated tables. None without any.
        """
        size = arrival.size
        if arrival.slot_sizes is None and self._sums is None:
            blocks = [flat.view(size, width) for flat, width in zip(flats, self.widths, strict=True)]
        else:
            ragged = self._ragged_in(arrival)
            blocks = [
                part.view(size, width) if ragged is None else ragged[other].pad(part)
                for other, (part, width) in enumerate(zip(self._direct(arrival, flats), self.widths, strict=True))
            ]
            blocks += self._sums_in(flats, size)
        if replicated is not None:
            blocks.append(replicated)
        return self.columns.assemble(blocks)

    def distribute(self, arrival: Arrival, gradient: Tensor, flats: Sequence[Tensor]) -> Tensor | None:
        """The transpose of :meth:`assemble`: write the gradients of the blocks, and return the gradient of
        ``replicated``."""
        size, ragged, padded = arrival.size, None, list[Tensor]()
        if arrival.slot_sizes is None and self._sums is None:
            blocks = [flat.view(size, width) for flat, width in zip(flats, self.widths, strict=True)]
        else:
            ragged, direct = self._ragged_in(arrival), self._direct(arrival, flats)
            padded = [
                part.view(size, width) if ragged is None else gradient.new_empty((size, width))
                for part, width in zip(direct, self.widths, strict=True)
            ]
            blocks = padded + self._sums_in(flats, size)
        replicated = None
        if self._replicated_width:
            replicated = gradient.new_empty((size, self._replicated_width))
            blocks.append(replicated)
        self.columns.distribute(gradient, blocks)
        if ragged is not None:
            for part, layout, block in zip(direct, ragged, padded, strict=True):
                part.copy_(layout.strip(block))
        return replicated

    def counted(self, call: InFlight) -> tuple[Tensor, ...]:
        """Number of ids per lookup of a replicated table, to read on the host."""
        if not self._replicated_width:
            return ()
        batch = call.batch
        return (batch.lengths.index_select(0, self._replicated_positions(batch.keys)).sum(dim=1, dtype=torch.int64),)

    def meanwhile(self, call: InFlight) -> None:
        """Look up the replicated tables and count the bags, while the rows are being exchanged."""
        batch = call.batch
        if self._replicated_width:
            call.replicated = self._look_up_replicated(call)
        if self._column_lookup is not None:
            # Bag length behind each mean-pooled column, at least 1. It is 1 for sums.
            lengths = batch.lengths.index_select(0, self._key_positions(batch.keys)).to(torch.float32).clamp_(min=1)
            lengths.index_fill_(0, self._sum_lookups, 1.0)
            # Contiguous by row, like the values: dividing by a transposed view took ten times as long.
            call.finishing = lengths.t().index_select(1, self._column_lookup)

    def finish(self, call: InFlight, values: Tensor) -> Tensor:
        """(B, D) values of the output, from the assembled columns; differentiable."""
        if call.finishing is not None:
            values = values / call.finishing
        inverse = call.batch.inverse
        if inverse is not None:
            columns = values.split(self.dims, dim=1)
            rows = self._inverse_rows
            values = torch.cat(
                [part.index_select(0, inverse[row]) for part, row in zip(columns, rows, strict=True)], dim=1
            )
        return values if values.dtype is self._dtype else values.to(self._dtype)

    def differentiable(self, value: Tensor) -> DifferentiableOutput:
        """What takes a gradient in a call's value."""
        return DifferentiableOutput(value, self.dims, 1, self._lookups)

    def _look_up_replicated(self, call: InFlight) -> Tensor:
        """(B, D_r) pooled columns of the replicated tables."""
        replicas, batch = call.step.replicas, call.batch
        assert replicas is not None, "replicated tables have a lookup"
        (counts,), learned = call.counted_values, call.learned_weights
        order, positions = self._replicated_positions(batch.keys).to(torch.int32), None
        if learned is not None:
            positions = torch.arange(batch.values.numel(), dtype=torch.int32, device=batch.values.device)
        batch_tensors = batch.lengths, batch.values, batch.weights
        lengths, ids, weights, positions = permuted(order, *batch_tensors, positions, sum(counts))
        if learned is not None and positions is not None:
            weights = learned.index_select(0, batch.input_positions(positions)).to(torch.float32)
        return replicas(ids, lengths, weights, counts)

    def _direct(self, arrival: Arrival, flats: Sequence[Tensor]) -> list[Tensor]:
        """The part of each rank's block with its own columns: (B · D_q,), or less if batch sizes differ by slot."""
        ragged = self._ragged_in(arrival)
        if ragged is None:
            sizes = [arrival.size * width for width in self.widths]
        else:
            sizes = [sum(rows * cols for rows, cols in layout.shapes) for layout in ragged]
        return [flat[:count] for flat, count in zip(flats, sizes, strict=True)]

    def _sums_in(self, flats: Sequence[Tensor], size: int) -> list[Tensor]:
        """(B, D_s) per host: the end of the block from its rank that has this rank's place on a host."""
        sums = []
        for other in filter(self._has_same_local_rank, range(self.world_size)):
            width = self._summed_width(other)
            sums.append(flats[other][flats[other].numel() - size * width :].view(size, width))
        return sums

    def _has_same_local_rank(self, other: int) -> bool:
        """Whether sums over hosts travel between this rank and ``other``."""
        return self._sums is not None and (other - self._rank) % self._ranks_per_host == 0

    def _summed_width(self, other: int) -> int:
        """Columns that are summed on the host of a rank."""
        return 0 if self._sums is None else self._sums.width(other // self._ranks_per_host)

    def _summed_elements(self, other: int, rows: int) -> int:
        """Elements of this host's sums that go to a rank."""
        return rows * self._summed_width(self._rank) if self._has_same_local_rank(other) else 0

    def _ragged_out(self, received: ShardInput, other: int) -> Ragged | None:
        sizes = received.slot_sizes[other]
        if sizes is None:
            return None
        direct_sizes = tuple(sizes[number] for number in self._slots[self._rank])
        return Ragged(rows=received.batch_sizes[other], sizes=direct_sizes, columns=self._columns[self._rank])

    def _ragged_in(self, arrival: Arrival) -> list[Ragged] | None:
        if arrival.slot_sizes is None:
            return None
        layouts, start = [], 0
        for count, direct, columns in zip(self._slot_counts, self._slots, self._columns, strict=True):
            sizes = tuple(arrival.slot_sizes[start + number] for number in direct)
            layouts.append(Ragged(rows=arrival.size, sizes=sizes, columns=columns))
            start += count
        return layouts


def _positions(features: Sequence[str], device: torch.device, keys: tuple[str, ...]) -> Tensor:
    position = {key: index for index, key in enumerate(keys)}
    return torch.tensor([position[feature] for feature in features], dtype=torch.int64, device=device)

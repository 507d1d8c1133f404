"""A sharded embedding bag collection as operators and plain data: its portable twin.

:meth:`PortableBags.forward` issues the all-to-all and returns an ``Await``; in an exported graph it is the place of
``wait_tensor`` that counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from shardrec._torchscript import counts_of, list_of
from shardrec.exchange.route import Piece, output_pieces
from shardrec.modules.live_twins import parameters_of
from shardrec.pending import Await, awaitable
from shardrec.portable.portable_input import Checked, constant
from shardrec.portable.portable_module import PortableTwin

if TYPE_CHECKING:
    from shardrec.modules.bags import ShardedEmbeddingBagCollection


class PortableBags(PortableTwin):
    """The portable twin of a :class:`ShardedEmbeddingBagCollection`."""

    def __init__(self, collection: ShardedEmbeddingBagCollection) -> None:
        super().__init__(collection)
        route, outputs = collection.input.route, collection.lookups
        self.embedding_bags = parameters_of(collection.embedding_bags)
        replicated = tuple(lookup for lookup in collection.lookups if lookup.layout.replicated)
        numbers = [collection.replica_number[lookup.layout.name] for lookup in replicated]
        replicas = collection.replicas
        self.replicas = nn.ModuleList([] if replicas is None else [replicas.scripted(numbers, pooled=True)])
        self.replica_features = list_of(str, [lookup.feature for lookup in replicated])
        self.widths = [route.width(rank) for rank in range(self.world_size)]
        self.keys = list(collection.embedding_names)
        self.dims = list(collection.dims)
        self.features = [lookup.feature for lookup in outputs]
        self.any_mean = any(lookup.mean for lookup in outputs)
        self.is_sum = torch.tensor([[not lookup.mean] for lookup in outputs], device=collection.device)
        columns = [number for number, dim in enumerate(self.dims) for _ in range(dim)]
        self.column_lookup = torch.tensor(columns, device=collection.device)
        pieces = output_pieces(outputs, route)
        starts = [_starts(pieces, block) for block in range(self.world_size + 1)]
        totals = [*self.widths, sum(lookup.layout.embedding_dim for lookup in replicated)]
        splits = [_widths(block_starts, total) for block_starts, total in zip(starts, totals, strict=True)]
        sources = [
            [(source.block, starts[source.block].index(source.start)) for source in piece.sources] for piece in pieces
        ]
        # Per block (the ranks' blocks, then the block of replicated tables), the widths of its runs of columns.
        self.splits = list_of(list[int], splits)
        # Per run of the output's columns, the (block, run) that it is the sum of.
        self.sources = list_of(list[tuple[int, int]], sources)

    def forward(self, features: KeyedJaggedTensor) -> Await[KeyedTensor]:
        """Look up the local batch."""
        checked = self.input.checked(features)
        pooled, sizes = self.pooled(checked)
        batch = sizes[self.rank]
        into = [batch * width for width in self.widths]
        out = [size * self.widths[self.rank] for size in sizes]
        pending = self.exchange_rows(pooled.reshape(-1), into, out)
        replicated, bags = self.own_columns(checked, batch)
        return awaitable(self.finish, pending, batch, replicated, bags)

    def pooled(self, checked: Checked) -> tuple[Tensor, list[int]]:
        """(B_all, D_mine) pooled rows of this rank's shards, rank after rank, and the batch size per rank."""
        got = self.input.exchange(checked, checked.keys, checked.lengths, checked.values)
        sizes, ids, weights = got.sizes, got.ids, got.weights
        for maps in self.id_maps:
            ids, kept = maps(got.lengths, ids)
            # Of an id without a row, any row times 0: a graph cannot leave ids out.
            weights = kept if weights is None else weights.masked_fill(kept == 0, 0.0)
        parts = self.by_group(got.lengths, ids, weights, got.came)
        if len(parts) == 1:
            return parts[0], sizes
        pooled = torch.cat(parts, dim=1) if len(parts) > 0 else self.nothing.new_zeros([sum(sizes), 0])
        return pooled, sizes

    def own_columns(self, checked: Checked, batch: int) -> tuple[Tensor, Tensor]:
        """The (B, D_r) columns of replicated tables, and the (B, D) number of ids behind each mean, at least 1.

        The second is 1 for sums, and empty without means.
        """
        keys, local = checked.keys, checked.lengths
        replicated = self.nothing.new_zeros([batch, 0])
        for replicas in self.replicas:
            order = self.positions(keys, self.replica_features)
            own_lengths = local.index_select(0, order)
            # Not int(), because torch.export lacks a symbol for it.
            own_count = counts_of(own_lengths.sum().reshape(1))[0]
            _, own_ids, own_weights = torch.ops.fbgemm.permute_2D_sparse_data(
                order.to(torch.int32), local, checked.values, checked.weights, own_count
            )
            replicated = replicas(own_ids, own_lengths, own_weights)
        bags = self.nothing
        if self.any_mean:
            lengths = local.index_select(0, self.positions(keys, self.features)).to(torch.float32).clamp(min=1.0)
            bags = lengths.masked_fill(self.is_sum, 1.0).t().index_select(1, self.column_lookup)
        return replicated, bags

    def positions(self, keys: list[str], features: list[str]) -> Tensor:
        """Where features are among the keys."""
        positions = [keys.index(feature) for feature in features]
        return constant(positions, torch.int64, self.nothing.device)

    def finish(self, pending: Tensor, batch: int, replicated: Tensor, bags: Tensor) -> KeyedTensor:
        """Wait for the blocks and put the columns in the unsharded order.

        Args:
            pending: the all-to-all.
            batch: B.
            replicated: (B, D_r) columns of replicated tables.
            bags: (B, D) number of ids behind each mean, or empty.
        """
        received = self.arrived_rows(pending).split([batch * width for width in self.widths])
        blocks: list[list[Tensor]] = []
        for block, width in enumerate(self.widths):
            blocks.append(list(received[block].view(batch, width).split(self.splits[block], dim=1)))
        blocks.append(list(replicated.split(self.splits[self.world_size], dim=1)))
        columns: list[Tensor] = []
        for piece in self.sources:
            block, run = piece[0]
            column = blocks[block][run]
            for other, its_run in piece[1:]:
                column = column + blocks[other][its_run]
            columns.append(column)
        values = columns[0] if len(columns) == 1 else torch.cat(columns, dim=1)
        if bags.dim() == 2:
            values = values / bags
        return KeyedTensor(self.keys, self.dims, values.to(dtype=self.output_dtype))


def _starts(pieces: Sequence[Piece], block: int) -> list[int]:
    """Where the block's runs of columns begin."""
    return sorted({source.start for piece in pieces for source in piece.sources if source.block == block})


def _widths(starts: Sequence[int], total: int) -> list[int]:
    return [after - start for start, after in pairwise([*starts, total])]

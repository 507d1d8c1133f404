"""The payload: lengths, ids and weights for each rank as 32-bit words.

::

    part for rank q:  bags | ids (n_q,) | weights (n_q,)
    bags:             lengths (S_q, B), or, if batch sizes differ by slot, sizes (S_q,) | lengths (their sum,)

An id is one word, or two (``Route.wide_ids``) if any id is dynamic, or a shard has more rows than 32 bits can number.
The row of the header that precedes a part gives its sizes::

    row for rank q:   batch size B | words of bags, 0 if they are lengths alone | ids in group 0 | ... | in group G-1

Shapes: S_q slots of rank q, S of all ranks, B local batch size, W ranks, G lookup groups, n ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from operator import itemgetter

import torch
from torch import Tensor, nn

from shardrec.exchange.route import Route
from shardrec.exchange.to_device import staged

HEADER_SIZES = 2
"""Columns of a row of the header before its counts of ids."""

_BATCH_SIZE, _BAG_WORDS, _COUNTS = itemgetter(0), itemgetter(1), itemgetter(slice(HEADER_SIZES, None))
_SOURCES = 64  # numbers of sources for which constants are cached. A server that merges requests has many


@dataclass(kw_only=True, slots=True)
class ShardInput:
    """The ids that all ranks request from this rank's shards.

    Args:
        lengths: (S_mine, B_all) int32. A slot's samples are ordered by the rank they come from.
        ids: (n,) int32 or int64, slot by slot: rows inside the shard, or dynamic ids.
        weights: (n,) float32, or None.
        batch_sizes: W sizes B_w; B_all is their sum.
        group_ids: number of ids per lookup group. They lie in ``ids`` one group after the other.
        counts: ids from each rank, per group.
        slot_sizes: per rank, the batch size per slot if they differ, else None. The remaining bags up to B_w are
            empty.
        order: (n,) int32, index per id among the received ids, if the weights need a gradient and the order differs.
        offsets: (S_mine·B_all + 1,) of the ids' dtype, sums of the lengths, where they are known; else None.
    """

    lengths: Tensor
    ids: Tensor
    weights: Tensor | None
    batch_sizes: tuple[int, ...]
    group_ids: tuple[int, ...]
    counts: tuple[tuple[int, ...], ...]
    slot_sizes: tuple[tuple[int, ...] | None, ...]
    order: Tensor | None = None
    offsets: Tensor | None = None


class Payload:
    """Packs what is sent and unpacks what is received."""

    def __init__(self, route: Route, rank: int, *, weighted: bool, device: torch.device) -> None:
        self._slot_counts = route.slot_counts()
        self._slot_edges = [0, *accumulate(self._slot_counts)]
        self._mine = self._slot_counts[rank]
        self._groups = [slot.group for slot in route.slots[rank]]
        self._wide = route.wide_ids
        self._weighted = weighted
        self._id_words = 2 if self._wide else 1
        self._device = device
        self.slot_major = lru_cache(maxsize=_SOURCES)(self._new_slot_major)

    def bag_words(self, slot_sizes: Sequence[int] | None) -> list[int]:
        """Per rank, the words of sizes and lengths; 0 where all slots have one batch size.

        Args:
            slot_sizes: (S,) batch size per slot of all ranks, where they differ.
        """
        if slot_sizes is None:
            return [0] * len(self._slot_counts)
        edges = zip(self._slot_edges, self._slot_edges[1:], strict=False)
        return [end - start + sum(slot_sizes[start:end]) for start, end in edges]

    def words_in(self, header: Sequence[int]) -> int:
        """Words from one rank, by its row of the header."""
        return (header[1] or self._mine * header[0]) + sum(header[HEADER_SIZES:]) * (self._id_words + self._weighted)

    def pack(
        self,
        lengths_SB: Tensor,
        ids: Tensor,
        weights: Tensor | None,
        counts: Sequence[int],
        slot_sizes: Sequence[int] | None = None,
    ) -> list[list[Tensor]]:
        """Per rank, the tensors of its part: int32.

        Args:
            lengths_SB: (S, B) int32.
            ids: (n,) slot by slot.
            weights: (n,) float32 or None.
            counts: number of ids for each rank.
            slot_sizes: (S,) batch size per slot, where they differ.
        """
        id_parts = torch.split_with_sizes(ids.to(torch.int64 if self._wide else torch.int32), list(counts))
        weight_parts = weights.split(list(counts)) if weights is not None else None
        parts: list[list[Tensor]] = []
        for rank in range(len(counts)):
            slots = range(self._slot_edges[rank], self._slot_edges[rank + 1])
            if slot_sizes is None:
                part = [lengths_SB[slots.start : slots.stop].reshape(-1)]
            else:
                sizes = [slot_sizes[slot] for slot in slots]
                part = [staged(sizes, torch.int32, ids.device)]
                part += [lengths_SB[slot, :size] for slot, size in zip(slots, sizes, strict=True)]
            part.append(id_parts[rank].view(torch.int32))
            if weight_parts is not None:
                part.append(weight_parts[rank].view(torch.int32))
            parts.append(part)
        return parts

    def lengths_and_ids(self, words: Tensor, header: Sequence[int]) -> tuple[Tensor, Tensor] | None:
        """(S_mine, B) lengths and (n,) ids of a request to a server, or None if words and header are inconsistent.

        The caller checks that the lengths add up to the ids and that the ids are in their tables.
        """
        batch_size, bag_words, *counts = header
        bags, weights_from, end = self._edges(header)
        if words.numel() != end:
            return None
        sizes = None
        if bag_words:
            sizes = tuple(words[: self._mine].tolist())
            fit = all(0 <= size <= batch_size for size in sizes)
            if len(sizes) != self._mine or not fit or self._mine + sum(sizes) != bag_words:
                return None
        lengths, ids = self._lengths(words[:bags], batch_size, sizes), words[bags:weights_from]
        if len(counts) > 1:
            per_group = [0] * len(counts)
            for group, of_slot in zip(self._groups, lengths.sum(dim=1, dtype=torch.int64).tolist(), strict=True):
                per_group[group] += of_slot
            if per_group != counts:
                return None
        return lengths, ids.clone().view(torch.int64) if self._wide else ids

    def unpack(
        self, parts: Sequence[Tensor], headers: Sequence[Sequence[int]], *, keep_order: bool = False
    ) -> ShardInput:
        """Order the ids by slot, then rank, as a table-batched kernel takes them.

        Its pooled rows (sum of B, D) are then rank by rank, ready to be sent back.

        Args:
            parts: the words that each rank sent. On a server (:mod:`shardrec.rpc`), the words per request.
            headers: each rank's row of the header.
            keep_order: return the index per id among the received ids.
        """
        slot_sizes = self._slot_sizes(parts, headers) if any(map(_BAG_WORDS, headers)) else (None,) * len(headers)
        lengths, ids, weights = [], [], []
        for part, header, sizes in zip(parts, headers, slot_sizes, strict=True):
            count = sum(header[HEADER_SIZES:])
            sections = header[1] or self._mine * header[0], count * self._id_words, count * self._weighted
            bag_words, id_words, weight_words = part.split_with_sizes(sections)
            plain = sizes is None
            lengths.append(
                bag_words.view(self._mine, header[0]) if plain else self._lengths(bag_words, header[0], sizes)
            )
            ids.append(id_words)
            weights.append(weight_words)
        flat_ids = torch.cat(ids)
        if self._wide:
            flat_ids = flat_ids.view(torch.int64)
        flat_weights = torch.cat(weights).view(torch.float32) if self._weighted else None
        counts = _counts(headers)
        total = sum(map(sum, counts))
        order = None
        if self._mine > 1 and total > 0:
            block_lengths = torch.cat([part.sum(dim=1, dtype=torch.int32) for part in lengths])
            slot_major = self.slot_major(len(parts))
            if keep_order:
                positions = torch.arange(total, dtype=torch.int32, device=flat_ids.device)
                _, order, _ = torch.ops.fbgemm.permute_1D_sparse_data(slot_major, block_lengths, positions, None, total)
            _, flat_ids, flat_weights = torch.ops.fbgemm.permute_1D_sparse_data(
                slot_major, block_lengths, flat_ids, flat_weights, total
            )
        return ShardInput(
            lengths=torch.cat(lengths, dim=1),
            ids=flat_ids,
            weights=flat_weights,
            batch_sizes=tuple(map(_BATCH_SIZE, headers)),
            group_ids=tuple(map(sum, zip(*counts, strict=True))),
            counts=counts,
            slot_sizes=slot_sizes,
            order=order,
        )

    def _edges(self, header: Sequence[int]) -> tuple[int, int, int]:
        """In a part, the ends of its bags, of its ids and of its weights."""
        ids = sum(header[HEADER_SIZES:])
        bags = header[1] or self._mine * header[0]
        weights_from = bags + ids * self._id_words
        return bags, weights_from, weights_from + ids * self._weighted

    def _new_slot_major(self, sources: int) -> Tensor:
        """(S_mine · sources,) int32: source-major blocks in slot-major order."""
        blocks = torch.arange(sources * self._mine, dtype=torch.int32, device=self._device)
        return blocks.view(sources, self._mine).t().flatten()

    def _slot_sizes(
        self, parts: Sequence[Tensor], headers: Sequence[Sequence[int]]
    ) -> tuple[tuple[int, ...] | None, ...]:
        """Read the sizes that some ranks sent, for which the host waits."""
        heads = [part[: self._mine] for part, header in zip(parts, headers, strict=True) if header[1]]
        sizes = iter(torch.stack(heads).tolist() if heads else [])
        return tuple(tuple(next(sizes)) if header[1] else None for header in headers)

    def _lengths(self, words: Tensor, batch_size: int, sizes: tuple[int, ...] | None) -> Tensor:
        """(S_mine, B_w) lengths, slots with fewer samples filled up with empty bags."""
        if sizes is None:
            return words.view(self._mine, batch_size)
        rows = words[self._mine :].split(list(sizes))
        padded = [nn.functional.pad(row, (0, batch_size - size)) for row, size in zip(rows, sizes, strict=True)]
        return torch.stack(padded) if padded else words.new_zeros((0, batch_size))


def _counts(headers: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    """Ids from each rank, per group."""
    return tuple(map(tuple, map(_COUNTS, headers)))

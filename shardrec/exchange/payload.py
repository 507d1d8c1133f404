"""The payload: lengths, ids and weights for each rank as 32-bit words.

::

    part for rank q:  bags | ids (n_q,) | weights (n_q,)
    bags:             lengths (S_q, B), or, where slots have a batch size each, sizes (S_q,) | lengths (their sum,)

An id is one word, or two where a shard has more rows than 32 bits can number.

Shapes: S_q slots of rank q, S of all ranks, B local batch size, W ranks, n ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

import torch
from torch import Tensor, nn

from shardrec.exchange.route import Route
from shardrec.exchange.staging import staged

__all__ = ["Arrival", "Payload", "Unpacked"]

_SOURCES = 64  # numbers of sources for which constants are kept; ranks have one, a server that merges requests many


@dataclass(frozen=True, kw_only=True)
class Arrival:
    """What a header says of one rank's part.

    Args:
        batch_size: samples B_w.
        bag_words: words of sizes and lengths, where slots have a batch size each; else 0.
        ids: number of ids.
    """

    batch_size: int
    bag_words: int
    ids: int


@dataclass(frozen=True, kw_only=True)
class Unpacked:
    """What the ranks sent, slot by slot and in a slot rank by rank.

    Args:
        lengths: (S_mine, sum of B_w) int32.
        ids: (n,) int32 or int64.
        weights: (n,) float32 or None.
        order: (n,) int32 place of each id among the received ones; None where nobody asks or they are in place.
        slot_sizes: per rank, the batch size of each slot where they differ, else None.
    """

    lengths: Tensor
    ids: Tensor
    weights: Tensor | None
    order: Tensor | None
    slot_sizes: tuple[tuple[int, ...] | None, ...]


class Payload:
    """Packs what is sent and unpacks what is received.

    Args:
        route: where the ids of each lookup go.
        rank: this rank.
        weighted: whether each id has a weight.
        device: of the buffers.
    """

    def __init__(self, route: Route, rank: int, *, weighted: bool, device: torch.device) -> None:
        self._slot_counts = route.slot_counts()
        self._slot_edges = [0, *accumulate(self._slot_counts)]
        self._mine = self._slot_counts[rank]
        self._wide = route.wide_ids
        self._weighted = weighted
        self._id_words = 2 if self._wide else 1
        self._device = device
        self._slot_major = lru_cache(maxsize=_SOURCES)(self._new_slot_major)

    def bag_words(self, slot_sizes: Sequence[int] | None) -> list[int]:
        """Per rank, the words of sizes and lengths; 0 where all slots have one batch size.

        Args:
            slot_sizes: (S,) batch size of each slot of all ranks, where they differ.
        """
        if slot_sizes is None:
            return [0] * len(self._slot_counts)
        edges = zip(self._slot_edges, self._slot_edges[1:], strict=False)
        return [end - start + sum(slot_sizes[start:end]) for start, end in edges]

    def words_in(self, arrival: Arrival) -> int:
        """Words from one rank."""
        bags = arrival.bag_words or self._mine * arrival.batch_size
        return bags + arrival.ids * (self._id_words + self._weighted)

    def pack(
        self,
        lengths_SB: Tensor,
        ids: Tensor,
        weights: Tensor | None,
        counts: Sequence[int],
        slot_sizes: Sequence[int] | None = None,
    ) -> list[list[Tensor]]:
        """Per rank, the pieces of its part, int32.

        Args:
            lengths_SB: (S, B) int32.
            ids: (n,) slot by slot.
            weights: (n,) float32 or None.
            counts: number of ids for each rank.
            slot_sizes: (S,) batch size of each slot, where they differ.
        """
        id_parts = ids.to(torch.int64 if self._wide else torch.int32).split(list(counts))
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

    def lengths_and_ids(self, words: Tensor, arrival: Arrival) -> tuple[Tensor, Tensor] | None:
        """(S_mine, B) lengths and (n,) ids of one part, or None if it has not the size that its header says."""
        if words.numel() != self.words_in(arrival):
            return None
        sizes, bags = None, arrival.bag_words or self._mine * arrival.batch_size
        if arrival.bag_words:
            sizes = tuple(words[: self._mine].tolist())
            fit = all(0 <= size <= arrival.batch_size for size in sizes)
            if len(sizes) != self._mine or not fit or self._mine + sum(sizes) != arrival.bag_words:
                return None
        ids = words[bags : bags + arrival.ids * self._id_words]
        return self._lengths(words[:bags], arrival.batch_size, sizes), ids.clone().view(
            torch.int64
        ) if self._wide else ids

    def unpack(self, parts: Sequence[Tensor], arrivals: Sequence[Arrival], *, keep_order: bool = False) -> Unpacked:
        """Put the ids slot by slot, and in a slot rank by rank.

        Args:
            parts: what each rank sent; of servers (:mod:`shardrec.rpc`), what came with each request.
            arrivals: what each rank's header said.
            keep_order: tell where each id was among the received ones.
        """
        slot_sizes = self._slot_sizes(parts, arrivals)
        lengths, ids, weights = [], [], []
        for part, arrival, sizes in zip(parts, arrivals, slot_sizes, strict=True):
            bags = arrival.bag_words or self._mine * arrival.batch_size
            weights_from = bags + arrival.ids * self._id_words
            lengths.append(self._lengths(part[:bags], arrival.batch_size, sizes))
            ids.append(part[bags:weights_from])
            weights.append(part[weights_from:])
        flat_ids = torch.cat(ids)
        if self._wide:
            flat_ids = flat_ids.view(torch.int64)
        flat_weights = torch.cat(weights).view(torch.float32) if self._weighted else None
        total = sum(arrival.ids for arrival in arrivals)
        order = None
        if self._mine > 1 and total > 0:
            block_lengths = torch.stack([part.sum(dim=1, dtype=torch.int32) for part in lengths]).view(-1)
            slot_major = self._slot_major(len(parts))
            if keep_order:
                places = torch.arange(total, dtype=torch.int32, device=flat_ids.device)
                _, order, _ = torch.ops.fbgemm.permute_1D_sparse_data(slot_major, block_lengths, places, None, total)
            _, flat_ids, flat_weights = torch.ops.fbgemm.permute_1D_sparse_data(
                slot_major, block_lengths, flat_ids, flat_weights, total
            )
        return Unpacked(
            lengths=torch.cat(lengths, dim=1), ids=flat_ids, weights=flat_weights, order=order, slot_sizes=slot_sizes
        )

    def _new_slot_major(self, sources: int) -> Tensor:
        """(S_mine · sources,) int32: source-major blocks in slot-major order."""
        order = [source * self._mine + slot for slot in range(self._mine) for source in range(sources)]
        return torch.tensor(order, dtype=torch.int32, device=self._device)

    def _slot_sizes(self, parts: Sequence[Tensor], arrivals: Sequence[Arrival]) -> tuple[tuple[int, ...] | None, ...]:
        """Read the sizes that some ranks sent; on the host only if any did."""
        heads = [part[: self._mine] for part, arrival in zip(parts, arrivals, strict=True) if arrival.bag_words]
        numbers: list[int] = torch.cat(heads).tolist() if heads else []
        found: list[tuple[int, ...] | None] = []
        for arrival in arrivals:
            found.append(tuple(numbers[: self._mine]) if arrival.bag_words else None)
            if arrival.bag_words:
                del numbers[: self._mine]
        return tuple(found)

    def _lengths(self, words: Tensor, batch_size: int, sizes: tuple[int, ...] | None) -> Tensor:
        """(S_mine, B_w) lengths, slots with fewer samples filled up with empty bags."""
        if sizes is None:
            return words.view(self._mine, batch_size)
        rows = words[self._mine :].split(list(sizes))
        padded = [nn.functional.pad(row, (0, batch_size - size)) for row, size in zip(rows, sizes, strict=True)]
        return torch.stack(padded) if padded else words.new_zeros((0, batch_size))

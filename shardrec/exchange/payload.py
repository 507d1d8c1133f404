"""The payload: lengths, ids and weights for each rank in one buffer of 32-bit words.

::

    part for rank q:  lengths (S_q, B) | ids (n_q,) | weights (n_q,)

An id is one word, or two where a shard has more rows than 32 bits can number.

Shapes: S_q slots of rank q, S of all ranks, B local batch size, W ranks, n ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from shardrec.exchange.route import Route

__all__ = ["Payload"]


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
        self._words = (2 if self._wide else 1) + weighted
        sources = range(len(self._slot_counts))
        order = [source * self._mine + slot for slot in range(self._mine) for source in sources]
        self._slot_major = torch.tensor(order, dtype=torch.int32, device=device)

    def sizes_out(self, batch_size: int, ids: Sequence[int]) -> list[int]:
        """Words to each rank, from the number of ids to each."""
        return [slots * batch_size + n * self._words for slots, n in zip(self._slot_counts, ids, strict=True)]

    def sizes_in(self, batch_sizes: Sequence[int], ids: Sequence[int]) -> list[int]:
        """Words from each rank, from the batch size of each and the number of ids from each."""
        return [self._mine * size + n * self._words for size, n in zip(batch_sizes, ids, strict=True)]

    def pack(self, lengths_SB: Tensor, ids: Tensor, weights: Tensor | None, counts: Sequence[int]) -> Tensor:
        """The send buffer, int32.

        Args:
            lengths_SB: (S, B) int32.
            ids: (n,) slot by slot.
            weights: (n,) float32 or None.
            counts: number of ids for each rank.
        """
        id_parts = ids.to(torch.int64 if self._wide else torch.int32).split(list(counts))
        weight_parts = weights.split(list(counts)) if weights is not None else None
        parts = []
        for rank in range(len(counts)):
            parts.append(lengths_SB[self._slot_edges[rank] : self._slot_edges[rank + 1]].reshape(-1))
            parts.append(id_parts[rank].view(torch.int32))
            if weight_parts is not None:
                parts.append(weight_parts[rank].view(torch.int32))
        return torch.cat(parts)

    def unpack(
        self, buffer: Tensor, batch_sizes: Sequence[int], counts: Sequence[int]
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Lengths (S_mine, sum of B), ids (n,) and weights (n,), slot by slot and in a slot rank by rank.

        Args:
            buffer: what the ranks sent, one after the other.
            batch_sizes: of each rank.
            counts: number of ids from each rank.
        """
        lengths, ids, weights = [], [], []
        id_words = self._words - self._weighted
        parts = buffer.split(self.sizes_in(batch_sizes, counts))
        for part, size, count in zip(parts, batch_sizes, counts, strict=True):
            head = self._mine * size
            body = head + count * id_words
            lengths.append(part[:head].view(self._mine, size))
            ids.append(part[head:body])
            weights.append(part[body:])
        flat_ids = torch.cat(ids)
        if self._wide:
            flat_ids = flat_ids.view(torch.int64)
        flat_weights = torch.cat(weights).view(torch.float32) if self._weighted else None
        total = sum(counts)
        if self._mine > 1 and total > 0:
            block_lengths = torch.stack([part.sum(dim=1, dtype=torch.int32) for part in lengths])
            _, flat_ids, flat_weights = torch.ops.fbgemm.permute_1D_sparse_data(
                self._slot_major, block_lengths.view(-1), flat_ids, flat_weights, total
            )
        return torch.cat(lengths, dim=1), flat_ids, flat_weights

"""The lookup of a rank's shards, without gradients, as modules that TorchScript compiles and saves.

Shapes: S slots, B_all the samples of all ranks, N ids, D pooled columns.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from shardrec._torchscript import counts_of


class _Table(nn.Module):
    """One table."""

    def __init__(self, weight: Tensor, pooled: bool) -> None:
        super().__init__()
        self.weight = weight.detach()  # not a parameter, which would add a name to the state_dict
        self.pooled = pooled

    def forward(self, ids: Tensor, lengths: Tensor, id_weights: Tensor | None) -> Tensor:
        """(B, w) or (N, w) float32, from ``ids`` (N,), ``lengths`` (B,) and ``id_weights`` (N,)."""
        if self.pooled and self.weight.dtype == torch.float32:
            offsets = torch.ops.fbgemm.asynchronous_complete_cumsum(lengths.to(ids.dtype))
            sums: Tensor = torch.embedding_bag(self.weight, ids, offsets, False, 0, False, id_weights, True)[0]
            return sums
        rows = nn.functional.embedding(ids, self.weight).to(torch.float32)
        if not self.pooled:
            return rows
        if id_weights is not None:
            rows = rows * id_weights.unsqueeze(1)
        # embedding_bag lacks float16 on the CPU, and rounds each sum to the dtype of the table.
        bags = torch.arange(lengths.size(0), device=ids.device).repeat_interleave(
            lengths.to(torch.int64), output_size=ids.size(0)
        )
        return rows.new_zeros([lengths.size(0), rows.size(1)]).index_add(0, bags, rows)


class Tables(nn.Module):
    """Tables that are looked up in their existing memory.

    Args:
        weights: (rows, w) per table.
        slot_tables: per slot, the number of its table.
        pooled: sums of bags. Otherwise rows.
    """

    def __init__(self, weights: Sequence[Tensor], slot_tables: Sequence[int], *, pooled: bool) -> None:
        super().__init__()
        tables = [_Table(weight, pooled) for weight in weights]
        self.slots = nn.ModuleList([tables[number] for number in slot_tables])
        self.pooled = pooled

    def forward(self, ids: Tensor, lengths: Tensor, id_weights: Tensor | None) -> Tensor:
        """(B_all, D) or (N, w) float32, from ``ids`` (N,), ``lengths`` (S, B_all) and ``id_weights`` (N,)."""
        counts = counts_of(lengths.sum(dim=1), ids.size(0))
        ids_of = ids.to(torch.int64).split(counts)
        columns: list[Tensor] = []
        for slot, table in enumerate(self.slots):
            part: Tensor | None = None
            if id_weights is not None:
                part = id_weights.split(counts)[slot]
            columns.append(table(ids_of[slot], lengths[slot], part))
        return torch.cat(columns, dim=1 if self.pooled else 0)


class NoTables(nn.Module):
    """A group without a table on this rank.

    Args:
        width: columns of a row without pooling. 0 with pooling.
        device: of the other groups' rows.
    """

    def __init__(self, width: int, device: torch.device) -> None:
        super().__init__()
        self.width = width
        self.nothing = torch.zeros(0, dtype=torch.float32, device=device)

    def forward(self, ids: Tensor, lengths: Tensor, id_weights: Tensor | None) -> Tensor:
        """(B_all, 0), or (0, w) without pooling."""
        if self.width > 0:
            return self.nothing.new_zeros([0, self.width])
        return self.nothing.new_zeros([lengths.size(1), 0])

"""Duplicate ids sent and looked up once.

The ids of all the features of a table, in a batch, become one sorted list of distinct ids, sent as one bag of a feature
named after the table. The rows that come back are copied to where each id stood; the copies' gradients add up on this
rank before they travel.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from shardrec.exchange.batch import Batch

__all__ = ["distinct", "distinct_ids"]


def distinct_ids(
    batch: Batch, lookups: Sequence[tuple[str, str]], tables: Sequence[tuple[str, int]]
) -> tuple[Batch, Tensor]:
    """The distinct ids of each table.

    Args:
        batch: checked input.
        lookups: (feature, table), in output order.
        tables: (name, rows), in module order.

    Returns:
        A batch of one key per table, batch size 1, sorted distinct ids; and for each id of the lookups, lookup after
        lookup, its place in that batch's values, (N,) int64.
    """
    device = batch.values.device
    edges = [0, *accumulate(rows for _, rows in tables)]
    starts = dict(zip((name for name, _ in tables), edges, strict=False))
    place = {key: index for index, key in enumerate(batch.keys)}
    counts, values, inverse = distinct(
        torch.tensor([place[feature] for feature, _ in lookups], dtype=torch.int32, device=device),
        batch.lengths,
        batch.values,
        torch.tensor([starts[table] for _, table in lookups], dtype=torch.int64, device=device),
        torch.tensor(edges, device=device),
        None,
    )
    return Batch(keys=tuple(name for name, _ in tables), lengths=counts, values=values, weights=None), inverse


def distinct(
    order: Tensor, lengths: Tensor, values: Tensor, firsts: Tensor, edges: Tensor, total: int | None
) -> tuple[Tensor, Tensor, Tensor]:
    """:func:`distinct_ids` of plain tensors. TorchScript compiles it, too.

    Args:
        order: (L,) int32, the key of each lookup.
        lengths: (F, B).
        values: (N,).
        firsts: (L,) int64, where the rows of each lookup's table begin, if tables lie one after the other.
        edges: (T + 1,) int64, where those of each table begin.
        total: ids of the lookups, where that is known on the host.

    Returns:
        (T, 1) int32 numbers of distinct ids, the ids, and for each id of the lookups its place among them, int64.
    """
    lengths, ids, _ = torch.ops.fbgemm.permute_2D_sparse_data(order, lengths, values, None, total)
    linear = ids + firsts.repeat_interleave(lengths.sum(dim=1, dtype=torch.int64), output_size=ids.numel())
    found, inverse, _ = torch._unique2(linear, sorted=True, return_inverse=True)
    counts = torch.searchsorted(found, edges).diff()
    local = found - edges[:-1].repeat_interleave(counts, output_size=found.numel())
    return counts.to(torch.int32).unsqueeze(1), local.to(values.dtype), inverse

"""Duplicate ids sent and looked up once.

The ids of all the features of a table, in a batch, become one sorted list of distinct ids, sent as one bag of a feature
named after the table. The rows that come back are copied to where each id stood; the copies' gradients add up on this
rank before they travel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from shardrec.exchange.batch import Batch

__all__ = ["Distinct", "distinct_ids"]


@dataclass(frozen=True, kw_only=True)
class Distinct:
    """Distinct ids of a batch.

    Args:
        batch: one key per table, batch size 1, sorted distinct ids.
        inverse: (N,) int64, for each id of the lookups, lookup after lookup, its place in ``batch.values``.
    """

    batch: Batch
    inverse: Tensor


def distinct_ids(batch: Batch, lookups: Sequence[tuple[str, str]], tables: Sequence[tuple[str, int]]) -> Distinct:
    """The distinct ids of each table.

    Args:
        batch: checked input.
        lookups: (feature, table), in output order.
        tables: (name, rows), in module order.
    """
    device = batch.values.device
    starts = dict(zip((name for name, _ in tables), [0, *accumulate(rows for _, rows in tables)], strict=False))
    edges = torch.tensor([0, *accumulate(rows for _, rows in tables)], device=device)
    place = {key: index for index, key in enumerate(batch.keys)}
    index = torch.tensor([place[feature] for feature, _ in lookups], dtype=torch.int32, device=device)
    lengths, ids, _ = torch.ops.fbgemm.permute_2D_sparse_data(index, batch.lengths, batch.values, None, None)
    first = torch.tensor([starts[table] for _, table in lookups], dtype=torch.int64, device=device)
    linear = ids + first.repeat_interleave(lengths.sum(dim=1, dtype=torch.int64), output_size=ids.numel())
    values, inverse = torch.unique(linear, sorted=True, return_inverse=True)
    ends = torch.searchsorted(values, edges)
    counts = ends.diff()
    local = values - edges[:-1].repeat_interleave(counts, output_size=values.numel())
    return Distinct(
        batch=Batch(
            keys=tuple(name for name, _ in tables),
            lengths=counts.to(torch.int32).unsqueeze(1),
            values=local.to(batch.values.dtype),
            weights=None,
        ),
        inverse=inverse,
    )

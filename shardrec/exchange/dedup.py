"""Deduplication: duplicate ids of a table are sent and looked up once.

The ids of all the features of a table, in a batch, become one sorted list of distinct ids, sent as one bag of a feature
named after the table. The received rows are copied to the positions of all ids. The copies' gradients are added up on
this rank before they are sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate

import torch
from torch import Tensor, nn

from shardrec.exchange.batch import KEY_ORDERS, Batch
from shardrec.exchange.cut import permuted


class DistinctIds:
    """Finds the distinct ids of each table in a batch.

    On the CPU there are U distinct ids. On CUDA the host would have to wait to know U: the result has an element for
    each id that the keys could have. The first U are valid.

    Args:
        lookups: (feature, table), in output order.
        tables: (name, rows), in module order.
        device: of the batches.
        any_ids: ids may be any int64 numbers instead of rows of the tables; on CUDA the host then waits for U.
    """

    def __init__(
        self,
        lookups: Sequence[tuple[str, str]],
        tables: Sequence[tuple[str, int]],
        device: torch.device,
        any_ids: bool = False,
    ) -> None:
        edges = [0, *accumulate(rows for _, rows in tables)]
        starts = dict(zip((name for name, _ in tables), edges, strict=False))
        self._features = [feature for feature, _ in lookups]
        self._tables = tuple(name for name, _ in tables)
        self._edges = torch.tensor(edges, dtype=torch.int64, device=device)
        self._firsts = torch.tensor([starts[table] for _, table in lookups], dtype=torch.int64, device=device)
        self._device = device
        self._lookups = [[table for _, table in lookups].count(name) for name, _ in tables] if any_ids else []
        self._order = lru_cache(maxsize=KEY_ORDERS)(self._new_order)

    def __call__(self, batch: Batch) -> tuple[Batch, Tensor]:
        """The distinct ids of a checked batch.

        Returns:
            A batch of one key per table, batch size 1, sorted distinct ids; and for each id of the lookups, lookup
            after lookup, its index in that batch's values, (N,) int64.
        """
        order, most = self._order(batch.keys)
        arguments = order, batch.lengths, batch.values
        if self._lookups:
            lengths, values, distinct_index = distinct_by_table(*arguments, self._lookups)
        elif self._device.type == "cpu":
            lengths, values, distinct_index = distinct(*arguments, self._firsts, self._edges, None)
        else:
            total = batch.values.numel() * most
            lengths, values, distinct_index = distinct_padded(*arguments, self._firsts, self._edges, total)
        return Batch(keys=self._tables, lengths=lengths, values=values, weights=None), distinct_index

    def _new_order(self, keys: tuple[str, ...]) -> tuple[Tensor, int]:
        """(L,) int32 position of each lookup's key, and the largest number of lookups of one key."""
        place = {key: index for index, key in enumerate(keys)}
        index = [place[feature] for feature in self._features]
        most = max(map(index.count, index), default=0)
        return torch.tensor(index, dtype=torch.int32, device=self._device), most


def distinct(
    order: Tensor, lengths: Tensor, values: Tensor, firsts: Tensor, edges: Tensor, total: int | None
) -> tuple[Tensor, Tensor, Tensor]:
    """:class:`DistinctIds` of plain tensors. TorchScript also compiles it.

    Args:
        order: (L,) int32, the key per lookup.
        lengths: (F, B).
        values: (N,).
        firsts: (L,) int64, the first row of each lookup's table if tables lie one after the other.
        edges: (T + 1,) int64, the first row per table, and the end.
        total: number of ids of the lookups, if the host knows it.

    Returns:
        (T, 1) int32 numbers of distinct ids, the ids, and for each id of the lookups its index among them, int64.
    """
    lengths, ids, _, _ = permuted(order, lengths, values, None, None, total)
    linear = ids + firsts.repeat_interleave(lengths.sum(dim=1, dtype=torch.int64), output_size=ids.numel())
    distinct_ids, distinct_index, _ = torch._unique2(linear, sorted=True, return_inverse=True)
    counts = torch.searchsorted(distinct_ids, edges).diff()
    local = distinct_ids - edges[:-1].repeat_interleave(counts, output_size=distinct_ids.numel())
    return counts.to(torch.int32).unsqueeze(1), local.to(values.dtype), distinct_index


def distinct_by_table(
    order: Tensor, lengths: Tensor, values: Tensor, lookups: Sequence[int]
) -> tuple[Tensor, Tensor, Tensor]:
    """:func:`distinct` for ids of any value, table after table.

    Args:
        order: (L,) int32, the key per lookup.
        lengths: (F, B).
        values: (N,).
        lookups: number of lookups per table.
    """
    most = values.numel() * order.numel() if values.is_cuda else None
    lengths, ids, _, _ = permuted(order, lengths, values, None, None, most)
    counts = [int(part.sum()) for part in lengths.sum(dim=1, dtype=torch.int64).split(list(lookups))]
    per_table = [torch.unique(part, return_inverse=True) for part in ids[: sum(counts)].split(counts)]
    firsts = [0, *accumulate(part.numel() for part, _ in per_table)]
    distinct_index = torch.cat([index + first for (_, index), first in zip(per_table, firsts, strict=False)])
    sizes = torch.tensor([[part.numel()] for part, _ in per_table], dtype=torch.int32, device=values.device)
    return sizes, torch.cat([part for part, _ in per_table]), distinct_index


def distinct_padded(
    order: Tensor, lengths: Tensor, values: Tensor, firsts: Tensor, edges: Tensor, total: int
) -> tuple[Tensor, Tensor, Tensor]:
    """:func:`distinct`, padded instead of waiting for the number. ``total`` is the most ids that the lookups can have.

    Returns:
        As :func:`distinct`. Elements that are not ids or indices may follow.
    """
    lengths, ids, _, _ = permuted(order, lengths, values, None, None, total)
    numbers = torch.arange(ids.numel(), device=ids.device)
    lookup_N = torch.searchsorted(lengths.sum(dim=1, dtype=torch.int64).cumsum(0), numbers, right=True)
    first_N = firsts[lookup_N.clamp(max=firsts.numel() - 1)]
    linear = torch.where(lookup_N < firsts.numel(), ids + first_N, edges[-1])
    ordered, places = linear.sort()
    is_new = torch.ones_like(ordered, dtype=torch.bool)
    is_new[1:] = ordered[1:] != ordered[:-1]
    seen = is_new.cumsum(0)
    distinct_index = torch.empty_like(places).scatter_(0, places, seen - 1)
    table_N = torch.searchsorted(edges[1:], ordered, right=True)
    # Equal ids write one value to one place.
    local = torch.zeros_like(ordered).scatter_(0, seen - 1, ordered - edges[table_N])
    counts = nn.functional.pad(seen, [1, 0])[torch.searchsorted(ordered, edges)].diff()
    return counts.to(torch.int32).unsqueeze(1), local.to(values.dtype), distinct_index

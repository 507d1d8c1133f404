"""Duplicate ids sent and looked up once.

The ids of all the features of a table, in a batch, become one sorted list of distinct ids, sent as one bag of a feature
named after the table. The rows that come back are copied to where each id stood; the copies' gradients add up on this
rank before they travel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

import torch
from torch import Tensor, nn

from shardrec.exchange.batch import KEY_ORDERS, Batch

__all__ = ["Distinct", "DistinctIds"]


@dataclass(frozen=True, kw_only=True)
class Distinct:
    """Distinct ids of a batch.

    Args:
        batch: one key per table, batch size 1, sorted distinct ids.
        inverse: (N,) int64, for each id of the lookups, lookup after lookup, its place in ``batch.values``.
    """

    batch: Batch
    inverse: Tensor


@dataclass(frozen=True, kw_only=True)
class _KeyOrder:
    """Constants for one order of the batch's keys."""

    keys: Tensor  # (L,) int32 position of each lookup's key
    most: int  # lookups of one key


class DistinctIds:
    """Finds the distinct ids of each table in a batch.

    On the CPU there are U of them. On CUDA the host would have to wait to know U: ``values`` has an element for each id
    there, of which the first U count, and ``inverse`` one for each id that the keys could have.

    Args:
        lookups: (feature, table), in output order.
        tables: (name, rows), in module order.
        device: of the batches.
    """

    def __init__(
        self, lookups: Sequence[tuple[str, str]], tables: Sequence[tuple[str, int]], device: torch.device
    ) -> None:
        edges = [0, *accumulate(rows for _, rows in tables)]
        starts = dict(zip((name for name, _ in tables), edges, strict=False))
        self._features = [feature for feature, _ in lookups]
        self._tables = tuple(name for name, _ in tables)
        self._edges = torch.tensor(edges, dtype=torch.int64, device=device)
        self._first = torch.tensor([starts[table] for _, table in lookups], dtype=torch.int64, device=device)
        self._device = device
        self._order = lru_cache(maxsize=KEY_ORDERS)(self._new_order)

    def __call__(self, batch: Batch) -> Distinct:
        """The distinct ids of a checked batch."""
        on_cpu = self._device.type == "cpu"
        order = self._order(batch.keys)
        lengths, ids, _ = torch.ops.fbgemm.permute_2D_sparse_data(
            order.keys, batch.lengths, batch.values, None, None if on_cpu else batch.values.numel() * order.most
        )
        ids_L = lengths.sum(dim=1, dtype=torch.int64)
        values, inverse, counts = self._distinct(ids, ids_L) if on_cpu else self._distinct_of_any(ids, ids_L)
        return Distinct(
            batch=Batch(
                keys=self._tables,
                lengths=counts.to(torch.int32).unsqueeze(1),
                values=values.to(batch.values.dtype),
                weights=None,
            ),
            inverse=inverse,
        )

    def _distinct(self, ids: Tensor, ids_L: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(U,) distinct ids, (N,) place of each id among them, and (T,) how many of each table there are."""
        linear = ids + self._first.repeat_interleave(ids_L, output_size=ids.numel())
        values, inverse = torch.unique(linear, sorted=True, return_inverse=True)
        counts = torch.searchsorted(values, self._edges).diff()
        return values - self._edges[:-1].repeat_interleave(counts, output_size=values.numel()), inverse, counts

    def _distinct_of_any(self, ids: Tensor, ids_L: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The same without knowing U, nor how many of ``ids`` the lengths tell of; the others follow at the end."""
        numbers = torch.arange(ids.numel(), device=self._device)
        lookup_N = torch.searchsorted(ids_L.cumsum(0), numbers, right=True)
        first_N = self._first[lookup_N.clamp(max=self._first.numel() - 1)]
        linear = torch.where(lookup_N < self._first.numel(), ids + first_N, self._edges[-1])
        ordered, order = linear.sort()
        is_new = torch.ones_like(ordered, dtype=torch.bool)
        is_new[1:] = ordered[1:] != ordered[:-1]
        seen = is_new.cumsum(0)
        inverse = torch.empty_like(order).scatter_(0, order, seen - 1)
        table_N = torch.searchsorted(self._edges[1:], ordered, right=True)
        # Equal ids write one value to one place.
        values = torch.zeros_like(ordered).scatter_(0, seen - 1, ordered - self._edges[table_N])
        ends = torch.searchsorted(ordered, self._edges)
        return values, inverse, nn.functional.pad(seen, [1, 0])[ends].diff()

    def _new_order(self, keys: tuple[str, ...]) -> _KeyOrder:
        place = {key: index for index, key in enumerate(keys)}
        index = [place[feature] for feature in self._features]
        return _KeyOrder(
            keys=torch.tensor(index, dtype=torch.int32, device=self._device),
            most=max(map(index.count, index), default=0),
        )

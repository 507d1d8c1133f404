"""``ClickRows``: decoded rows in numpy arrays, between a reader and a batch.

Legend: N rows, D dense features, F sparse features, V ids in all.

    row-major, as in the file                      feature-major, as in a KeyedJaggedTensor
    row 0: f0 | f1 f1 | f2                         f0: row 0 | row 1
    row 1: f0 | f1    | f2 f2          ──────►     f1: row 0, row 0 | row 1
                                                   f2: row 0 | row 1, row 1

Row-major makes taking a range of rows and joining blocks plain slices. The order is turned once, on the rows that a
rank keeps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from shardrec.trainer.data.click_data import ClickBatch
from shardrec.trainer.data.schema import ClickSchema

NO_TIME = -62_135_596_800.0
"""The first second of the calendar, which stands for no event time."""


_OF_ROWS = ("labels", "dense", "groups", "row_weights", "times")
"""The arrays with a value or more of each row, but for lengths."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ClickRows:
    """N decoded rows.

    Attributes:
        labels: float32 (N,), 0 or 1; or (N, tasks), NaN where a row lacks one.
        dense: float32 (N, D), transformed.
        ids: int64 (V,), row-major: row after row, feature after feature.
        lengths: int64 (N, F), ids of each feature of each row. None where each has exactly one (V = N * F).
        weights: float32 (V,), of the ids. None without.
        groups: uint64 (N,), keys of the groups that the rows are ranked in. None without.
        row_weights: float32 (N,), of the rows in the losses. None without.
        times: float64 (N,), event times in seconds since 1970. None without.
    """

    labels: NDArray[np.float32]
    dense: NDArray[np.float32]
    ids: NDArray[np.int64]
    lengths: NDArray[np.int64] | None = None
    weights: NDArray[np.float32] | None = None
    groups: NDArray[np.uint64] | None = None
    row_weights: NDArray[np.float32] | None = None
    times: NDArray[np.float64] | None = None

    def __len__(self) -> int:
        return int(self.labels.shape[0])

    @cached_property
    def num_sparse(self) -> int:
        """F, the number of sparse features (0 when there are no rows and every bag has one id)."""
        if self.lengths is not None:
            return int(self.lengths.shape[1])
        return self.ids.size // max(len(self), 1)

    def ids_between(self, start: int, stop: int) -> slice:
        """The places of the ids of rows ``start`` to ``stop`` (not included)."""
        if self.lengths is None:
            return slice(start * self.num_sparse, stop * self.num_sparse)
        return slice(int(self._starts[start]), int(self._starts[stop]))

    @cached_property
    def _starts(self) -> NDArray[np.int64]:
        """Of rows with ``lengths``, the first id of each and the end of the last one, int64 (N + 1,)."""
        assert self.lengths is not None, "only rows of several ids a feature are asked for"
        return np.asarray(np.r_[0, np.cumsum(self.lengths.sum(axis=1))], dtype=np.int64)

    def where(self, keep: NDArray[np.bool_]) -> ClickRows:
        """The rows for which ``keep``, bool (N,), is true, in their order."""
        return self if keep.all() else self.take(np.flatnonzero(keep))

    def take(self, places: NDArray[np.int64]) -> ClickRows:
        """The rows at these places (M,), in this order."""
        of_rows = {
            name: getattr(self, name).take(places, axis=0) for name in _OF_ROWS if getattr(self, name) is not None
        }
        if self.lengths is None:
            ids = self.ids.reshape(len(self), -1).take(places, axis=0).reshape(-1) if len(self) else self.ids
            return ClickRows(ids=ids, **of_rows)
        _, ids_V, weights_V = bags_at(places, self.lengths.sum(axis=1), self.ids, self.weights)
        weights = None if weights_V is None else weights_V.numpy()
        return ClickRows(ids=ids_V.numpy(), lengths=self.lengths[places], weights=weights, **of_rows)

    def to_batch(self, schema: ClickSchema) -> ClickBatch:
        """These rows as tensors, ids feature-major under ``schema.sparse_names``. No memory is shared."""
        count, features = len(self), len(schema.sparse_names)
        weights = None
        if self.lengths is None:
            ids_FN = np.array(self.ids.reshape(count, features).T, order="C").reshape(-1)
            values, lengths = torch.from_numpy(ids_FN), torch.ones(count * features, dtype=torch.int64)
        else:
            by_feature = np.arange(count * features).reshape(count, features).T.reshape(-1)
            lengths, values, weights = bags_at(by_feature, self.lengths.reshape(-1), self.ids, self.weights)
        groups, row_weights = self.groups, self.row_weights
        return ClickBatch(
            dense=torch.from_numpy(self.dense.copy()),
            sparse=KeyedJaggedTensor(
                keys=list(schema.sparse_names), values=values, lengths=lengths, weights=weights, stride=count
            ),
            labels=torch.from_numpy(self.labels.copy()),
            groups=None if groups is None else torch.from_numpy(groups.view(np.int64).copy()),
            row_weights=None if row_weights is None else torch.from_numpy(row_weights.copy()),
        )


RowRange: TypeAlias = tuple[ClickRows, int, int]
"""Rows from one to another (not included)."""


def bags_at(
    places: NDArray[np.int64], lengths: NDArray[np.int64], ids: NDArray[np.int64], weights: NDArray[np.float32] | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The bags at these places (M,) of those with lengths (L,), in this order: lengths (M,), ids (V,), weights (V,)."""
    tensors = [
        None if array is None else torch.from_numpy(array) for array in (places.astype(np.int32), lengths, ids, weights)
    ]
    permuted: tuple[Tensor, Tensor, Tensor | None] = torch.ops.fbgemm.permute_1D_sparse_data(*tensors)
    return permuted


def join_rows(ranges: Sequence[RowRange]) -> ClickRows:
    """The rows of some ranges (at least one) in order."""
    first = ranges[0][0]
    joined = {
        name: np.concatenate([getattr(rows, name)[start:stop] for rows, start, stop in ranges])
        for name in _OF_ROWS
        if getattr(first, name) is not None
    }
    if any(rows.lengths is not None for rows, _, _ in ranges):
        width = max(rows.num_sparse for rows, _, _ in ranges)
        joined["lengths"] = np.concatenate(
            [
                np.ones((stop - start, width), np.int64) if rows.lengths is None else rows.lengths[start:stop]
                for rows, start, stop in ranges
            ]
        )
    places = [(rows, rows.ids_between(start, stop)) for rows, start, stop in ranges]
    ids = np.concatenate([rows.ids[of_rows] for rows, of_rows in places])
    weights = [rows.weights[of_rows] for rows, of_rows in places if rows.weights is not None]
    if weights:
        joined["weights"] = np.concatenate(weights)
    return ClickRows(ids=ids, **joined)

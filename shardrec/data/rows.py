"""``ClickRows``: decoded rows in numpy arrays, between a reader and a batch.

Legend: N rows, D dense features, F sparse features, V ids in all.

    row-major, as in the file                      feature-major, as in a KeyedJaggedTensor
    row 0: f0 | f1 f1 | f2                         f0: row 0 | row 1
    row 1: f0 | f1    | f2 f2          ──────►     f1: row 0, row 0 | row 1
                                                   f2: row 0 | row 1, row 1

Row-major makes taking a range of rows and joining blocks plain slices; the order is turned once, on the rows that a
rank keeps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from shardrec.data.batch import ClickBatch
from shardrec.data.schema import ClickSchema

__all__ = ["ClickRows", "NumberedRows", "join_rows"]


@dataclass(frozen=True, kw_only=True, eq=False)
class ClickRows:
    """N decoded rows.

    Attributes:
        labels: float32 (N,), 0 or 1.
        dense: float32 (N, D), transformed.
        ids: int64 (V,), row-major: row after row, feature after feature.
        lengths: int64 (N, F), ids of each feature of each row; None where each has exactly one (V = N * F).
    """

    labels: NDArray[np.float32]
    dense: NDArray[np.float32]
    ids: NDArray[np.int64]
    lengths: NDArray[np.int64] | None = None

    def __len__(self) -> int:
        return int(self.labels.shape[0])

    @property
    def num_sparse(self) -> int:
        """F, the number of sparse features (0 when there are no rows and every bag has one id)."""
        if self.lengths is not None:
            return int(self.lengths.shape[1])
        return self.ids.size // max(len(self), 1)

    def between(self, start: int, stop: int) -> ClickRows:
        """Rows ``start`` to ``stop`` (not included); views, no copies."""
        if self.lengths is None:
            width = self.num_sparse
            return ClickRows(
                labels=self.labels[start:stop],
                dense=self.dense[start:stop],
                ids=self.ids[start * width : stop * width],
            )
        first = int(self.lengths[:start].sum())
        last = first + int(self.lengths[start:stop].sum())
        return ClickRows(
            labels=self.labels[start:stop],
            dense=self.dense[start:stop],
            ids=self.ids[first:last],
            lengths=self.lengths[start:stop],
        )

    def where(self, keep: NDArray[np.bool_]) -> ClickRows:
        """The rows for which ``keep``, bool (N,), is true, in their order."""
        if keep.all():
            return self
        if self.lengths is None:
            ids = self.ids.reshape(len(self), -1)[keep].reshape(-1) if len(self) else self.ids
            return ClickRows(labels=self.labels[keep], dense=self.dense[keep], ids=ids)
        ids = self.ids[np.repeat(keep, self.lengths.sum(axis=1))]
        return ClickRows(labels=self.labels[keep], dense=self.dense[keep], ids=ids, lengths=self.lengths[keep])

    def to_batch(self, schema: ClickSchema) -> ClickBatch:
        """These rows as tensors, ids feature-major under ``schema.sparse_names``; no memory is shared."""
        count, features = len(self), len(schema.sparse_names)
        if self.lengths is None:
            ids_FN = np.array(self.ids.reshape(count, features).T, order="C").reshape(-1)
            values, lengths = torch.from_numpy(ids_FN), torch.ones(count * features, dtype=torch.int64)
        else:
            feature_V = np.repeat(np.tile(np.arange(features, dtype=np.int16), count), self.lengths.reshape(-1))
            values = torch.from_numpy(self.ids[np.argsort(feature_V, kind="stable")])
            lengths = torch.from_numpy(self.lengths.T.reshape(-1).copy())
        return ClickBatch(
            dense=torch.from_numpy(self.dense.copy()),
            sparse=KeyedJaggedTensor(keys=list(schema.sparse_names), values=values, lengths=lengths, stride=count),
            labels=torch.from_numpy(self.labels.copy()),
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class NumberedRows:
    """Good rows and where they stand in their file.

    Attributes:
        rows: N decoded rows.
        numbers: int64 (N,), each row's number in the file, from 0; broken rows are counted too.
        seen: rows of the file read so far, broken ones included.
    """

    rows: ClickRows
    numbers: NDArray[np.int64]
    seen: int


def join_rows(parts: Sequence[ClickRows]) -> ClickRows:
    """All rows of ``parts`` (at least one) in order."""
    if len(parts) == 1:
        return parts[0]
    lengths = None
    if any(part.lengths is not None for part in parts):
        width = max(part.num_sparse for part in parts)
        lengths = np.concatenate(
            [np.ones((len(part), width), np.int64) if part.lengths is None else part.lengths for part in parts]
        )
    return ClickRows(
        labels=np.concatenate([part.labels for part in parts]),
        dense=np.concatenate([part.dense for part in parts]),
        ids=np.concatenate([part.ids for part in parts]),
        lengths=lengths,
    )

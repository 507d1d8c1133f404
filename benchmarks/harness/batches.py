"""The batches of a workload: the same for the same seed, rank and step, on whatever rank they are drawn."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from benchmarks.harness.workload import WorkloadTable
from shardrec.trainer.data.zipf import zipf_probabilities

__all__ = ["BatchMaker"]

_ZIPF_EXPONENT = 1.05


class BatchMaker:
    """Draws batches of bags that have as many ids as their table's ``pooling``.

    Args:
        tables: of the workload.
        batch_size: samples B.
        ids: ``"uniform"``, or ``"zipf"``: the k-th most frequent row comes k^-1.05 as often as the first; which rows
            are frequent is random, as it is for hashed ids.
        seed: of everything.
        weighted: ids come with weights.
    """

    def __init__(
        self, tables: Sequence[WorkloadTable], *, batch_size: int, ids: str, seed: int, weighted: bool = False
    ) -> None:
        self._tables = tables
        self._batch_size = batch_size
        self._is_zipf = ids == "zipf"
        self._seed = seed
        self._weighted = weighted
        self._frequent: dict[int, tuple[Tensor, Tensor]] = {}

    def draw(self, rank: int, step: int) -> KeyedJaggedTensor:
        """The batch of one rank in one step, on the CPU: int64 ids, int32 lengths, float32 weights."""
        generator = torch.Generator().manual_seed(zlib.crc32(f"{self._seed} {rank} {step}".encode()))
        values = torch.cat([self._ids(table, generator) for table in self._tables])
        lengths = torch.tensor([table.pooling for table in self._tables], dtype=torch.int32)
        return KeyedJaggedTensor(
            keys=[table.feature for table in self._tables],
            values=values,
            lengths=lengths.repeat_interleave(self._batch_size),
            weights=torch.rand(values.numel(), generator=generator) if self._weighted else None,
            stride=self._batch_size,
        )

    def _ids(self, table: WorkloadTable, generator: torch.Generator) -> Tensor:
        count = self._batch_size * table.pooling
        if not self._is_zipf:
            return torch.randint(table.rows, (count,), generator=generator)
        edges, row_of = self._zipf(table.rows)
        places = torch.searchsorted(edges, torch.rand(count, generator=generator, dtype=torch.float64), right=True)
        return row_of[places.clamp_(max=table.rows - 1)]

    def _zipf(self, rows: int) -> tuple[Tensor, Tensor]:
        """(R,) where each place's share of [0, 1) ends, and (R,) the row at each place."""
        if rows not in self._frequent:
            edges = torch.from_numpy(np.cumsum(zipf_probabilities(rows, _ZIPF_EXPONENT)))
            shuffled = torch.randperm(rows, generator=torch.Generator().manual_seed(self._seed))
            self._frequent[rows] = edges, shuffled
        return self._frequent[rows]

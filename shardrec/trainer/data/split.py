"""Which rows a rank trains on, and which rows are held out: pure functions of row numbers.

Each rank takes its part of each *global batch* of ``world_size * batch_size`` rows of one stream:

    stream      0 1 2 3 4 5 6 7 | 8 9 10 11 12 13 14 15 | 16 17 18          (world_size 2, batch_size 4)
    rank 0      0 1 2 3         | 8 9 10 11             | 16
    rank 1              4 5 6 7 |           12 13 14 15 |    17 18

so that all the ranks make the same number of steps without exchanging anything, global batches do not depend on how
many ranks share them, and what is left at the end is spread evenly (a rank may get nothing of it).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardrec import ConfigError
from shardrec.trainer.data.preprocess import mixed

__all__ = ["BatchRequest", "held_out"]


@dataclass(frozen=True, kw_only=True)
class BatchRequest:
    """Which batches one rank asks for.

    Attributes:
        rank: this rank, from 0.
        world_size: number of ranks that share each global batch.
        batch_size: rows per rank.
        first_batch: batches of this pass to leave out, for instance those before a checkpoint.
        drop_last: leave out the last global batch when it is not full.
        global_rows: rows of a global batch where they are not ``world_size * batch_size``, to spread evenly.

    Raises:
        ConfigError: a value out of range; all the faults are in one message.
    """

    rank: int
    world_size: int
    batch_size: int
    first_batch: int = 0
    drop_last: bool = False
    global_rows: int | None = None

    def __post_init__(self) -> None:
        faults = []
        if self.world_size < 1:
            faults.append(f"world_size is {self.world_size}: give at least 1")
        elif not 0 <= self.rank < self.world_size:
            faults.append(f"rank is {self.rank} of world_size {self.world_size}: give 0 to {self.world_size - 1}")
        if self.batch_size < 1:
            faults.append(f"batch_size is {self.batch_size}: give at least 1 row per rank")
        if self.first_batch < 0:
            faults.append(f"first_batch is {self.first_batch}: give 0 or the number of batches already done")
        if self.global_rows is not None and self.global_rows < 1:
            faults.append(f"global_rows is {self.global_rows}: give at least 1 row over all ranks")
        if faults:
            raise ConfigError("BatchRequest: " + "; ".join(faults))

    @property
    def global_size(self) -> int:
        """Rows of a full global batch."""
        return self.global_rows or self.world_size * self.batch_size

    def share(self, count: int) -> tuple[int, int]:
        """First row and end (not included) of this rank's part of a global batch of ``count`` rows."""
        return count * self.rank // self.world_size, count * (self.rank + 1) // self.world_size

    def wants(self, index: int, count: int) -> bool:
        """Whether the global batch ``index``, of ``count`` rows, is part of the request."""
        return index >= self.first_batch and not (self.drop_last and count < self.global_size)


def held_out(rows: NDArray[np.int64] | NDArray[np.uint64], fraction: float) -> NDArray[np.bool_]:
    """Whether each row belongs to the held-out part: a hash of its number falls in the lowest ``fraction`` of values.

    Needs no pass over the file, gives every reader the same answer, and spreads the held-out rows over the file. It
    is not a split by time: for one, hold out the last day's file.

    Args:
        rows: row numbers, int64 (N,), counted from 0 over all files, broken rows included; or the keys of their groups.
        fraction: expected share of held-out rows, from 0 to 1 (not included).

    Returns:
        bool (N,).
    """
    hashed = mixed(rows.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(0x9E3779B97F4A7C15))
    return np.asarray((hashed >> np.uint64(11)) < np.uint64(int(fraction * 2**53)), dtype=np.bool_)

"""Which rows are in which batch, on which rank, and which are held out: pure functions of the files' row counts.

Each rank takes its part of each *global batch* of ``world_size * batch_size`` rows:

    order       0 1 2 3 4 5 6 7 | 8 9 10 11 12 13 14 15 | 16 17 18          (world_size 2, batch_size 4)
    rank 0      0 1 2 3         | 8 9 10 11             | 16
    rank 1              4 5 6 7 |           12 13 14 15 |    17 18

so that all the ranks make the same number of steps without exchanging anything, global batches do not depend on how
many ranks share them, and what is left at the end is spread evenly (a rank may get nothing of it).

The order of an epoch's rows is the same for any number of ranks.

A *chunk* is what can be read without what is before it: a row group of Parquet.
Chunks are dealt to S *streams*, and streams are read side by side, each in proportion to its length, so that all end
together. A rank takes a contiguous range of each global batch, and so decodes the streams in this range, and no others:

    chunks     a b c d e f g …        each to the stream that is shortest so far; with a shuffle in a random order
    stream 0   a e …            batch 0      batch 1      …
    stream 1   b f …            00 11 22 33  00 11 22 33         rank 0 of 2: streams 0 and 1
    stream 2   c g …            └ rank 0┘└ rank 1 ┘              rank 1 of 2: streams 2 and 3
    stream 3   d …

Row j of a stream of L rows has the key (2j + 1) / 2L. The canonical order is that of the keys, then of the streams. A
batch is a range of it, with its rows sorted by stream. It has no state: a stream's offset is a function of the step.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardrec import ConfigError
from shardrec.trainer.data.preprocess import mixed

STREAMS = 64
"""Default number of streams: a multiple of the usual numbers of ranks."""

_MIN_ROWS = 32
_MIN_GROUPED = 256
_BATCHES_AT_ONCE = 64


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
        ConfigError: a value out of range. All the faults are in one message.
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


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """Rows that are read as a whole.

    Attributes:
        file: number of the file.
        group: number of the row group in it.
        row: number of the first row, over all files.
        rows: number of rows, broken ones included.
        kept: those of them that the pass reads: the training rows, or those held out.
    """

    file: int
    group: int
    row: int
    rows: int
    kept: int


class Slice(NamedTuple):
    """Rows ``start`` to ``stop`` (not included) of a stream."""

    stream: int
    start: int
    stop: int


def stream_count(streams: int, batch_rows: int, *, grouped: bool) -> int:
    """The streams of a pass: a batch takes at least 32 rows of each, or 256 where groups of rows are to stay whole."""
    return max(1, min(streams, batch_rows // (_MIN_GROUPED if grouped else _MIN_ROWS)))


def deal(chunks: Sequence[Chunk], streams: int, draws: np.random.Generator | None = None) -> list[list[Chunk]]:
    """The chunks of each stream, in the order in which they are read.

    Args:
        chunks: in the order of the files.
        streams: S.
        draws: draws another order of the chunks. None keeps theirs.
    """
    order = range(len(chunks)) if draws is None else draws.permutation(len(chunks)).tolist()
    dealt: list[list[Chunk]] = [[] for _ in range(streams)]
    shortest = [(0, stream) for stream in range(streams)]
    for number in order:
        rows, stream = shortest[0]
        heapq.heapreplace(shortest, (rows + chunks[number].kept, stream))
        dealt[stream].append(chunks[number])
    return dealt


def rows_before(lengths: NDArray[np.int64], counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """How many rows of each stream are among the first of the canonical order, for each of several numbers of rows.

    Args:
        lengths: int64 (S,), rows of each stream.
        counts: int64 (C,), each from 0 to the sum of the lengths.

    Returns:
        int64 (C, S), whose rows have the sums ``counts``. No entry falls as the count grows.
    """
    total, margin, shape = int(lengths.sum()), len(lengths) + 2, (len(counts), len(lengths))
    # Fewer than S rows lie between a key t and the place t * total of the order: what is outside of it is certain.
    low, high = (
        np.clip(np.floor(lengths * (places[:, None] / max(total, 1)) + 0.5), 0, lengths).astype(np.int64).reshape(-1)
        for places in (counts - margin, counts + margin)
    )
    spans = high - low
    cell = np.repeat(np.arange(len(spans)), spans)
    row = np.arange(len(cell)) - np.repeat(np.cumsum(spans) - spans, spans) + low[cell]
    number, stream = np.divmod(cell, len(lengths))
    order = np.lexsort((stream, (2 * row + 1) / (2 * lengths[stream]), number))
    place = np.arange(len(cell)) - np.searchsorted(number, number)
    is_first = place < (counts - low.reshape(shape).sum(axis=1))[number]
    first = cell[order][is_first]
    return np.asarray(low + np.bincount(first, minlength=len(low)), dtype=np.int64).reshape(shape)


def batch_bounds(
    lengths: NDArray[np.int64], size: int, first: int
) -> Iterator[tuple[int, NDArray[np.int64], NDArray[np.int64]]]:
    """The number of each global batch of ``size`` rows from ``first`` on, with the rows of each stream, int64 (S,),
    before it and before its end."""
    total = int(lengths.sum())
    for begin in range(first, -(-total // size), _BATCHES_AT_ONCE):
        numbers = np.arange(begin, min(begin + _BATCHES_AT_ONCE, -(-total // size)) + 1)
        rows = rows_before(lengths, np.minimum(numbers * size, total))
        yield from zip(numbers[:-1].tolist(), rows[:-1], rows[1:], strict=True)


def slices(before: NDArray[np.int64], after: NDArray[np.int64], share: tuple[int, int]) -> Iterator[Slice]:
    """A rank's rows of a global batch.

    Args:
        before: int64 (S,), of :func:`rows_before` the rows before the batch in the canonical order.
        after: int64 (S,), those before its end.
        share: the rank's first row in the batch, and its end.
    """
    counts = after - before
    begins = np.cumsum(counts) - counts
    firsts, lasts = np.maximum(share[0] - begins, 0), np.minimum(share[1] - begins, counts)
    streams = np.flatnonzero(lasts > firsts)
    starts, stops = (before + firsts)[streams], (before + lasts)[streams]
    return map(Slice, streams.tolist(), starts.tolist(), stops.tolist())


def stream_share(lengths: NDArray[np.int64], world_size: int) -> float:
    """The largest share of all rows that one of the ranks decodes: 1 / ``world_size`` where streams are even."""
    total = int(lengths.sum())
    ends = np.cumsum(lengths)
    shares = [
        int(lengths[(ends * world_size > total * rank) & ((ends - lengths) * world_size < total * (rank + 1))].sum())
        for rank in range(world_size)
    ]
    return max(shares) / max(total, 1)


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

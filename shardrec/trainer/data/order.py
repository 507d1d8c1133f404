"""The order of an epoch's rows: pure functions of the files' row counts, never of the ranks.

A *chunk* is what can be read without what is before it: a row group of Parquet, or a whole file of another format.
Chunks are dealt to S *streams*, and streams are read side by side, each in proportion to its length, so that all end
together. A rank takes a contiguous range of each global batch, and so decodes the streams in this range, and no others:

    chunks     a b c d e f g …        each to the stream that is shortest so far; with a shuffle in a random order
    stream 0   a e …            batch 0      batch 1      …
    stream 1   b f …            00 11 22 33  00 11 22 33         rank 0 of 2: streams 0 and 1
    stream 2   c g …            └ rank 0┘└ rank 1 ┘              rank 1 of 2: streams 2 and 3
    stream 3   d …

Row j of a stream of L rows has the key (2j + 1) / 2L. The canonical order is that of the keys, then of the streams; a
batch is a range of it, with its rows sorted by stream. It has no state: a stream's offset is a function of the step.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["STREAMS", "Chunk", "Slice", "deal", "rows_before", "slices", "stream_count", "stream_share"]

STREAMS = 64
"""Default number of streams: a multiple of the usual numbers of ranks."""

_MIN_ROWS = 32
_MIN_GROUPED = 256


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


@dataclass(frozen=True, kw_only=True)
class Slice:
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
        draws: draws another order of the chunks; None keeps theirs.
    """
    order = range(len(chunks)) if draws is None else draws.permutation(len(chunks)).tolist()
    dealt: list[list[Chunk]] = [[] for _ in range(streams)]
    shortest = [(0, stream) for stream in range(streams)]
    for number in order:
        rows, stream = shortest[0]
        heapq.heapreplace(shortest, (rows + chunks[number].kept, stream))
        dealt[stream].append(chunks[number])
    return dealt


def rows_before(lengths: NDArray[np.int64], count: int) -> NDArray[np.int64]:
    """How many rows of each stream are among the first ``count`` of the canonical order.

    Args:
        lengths: int64 (S,), rows of each stream.
        count: from 0 to the sum of the lengths.

    Returns:
        int64 (S,), with the sum ``count``; no entry falls as ``count`` grows.
    """
    total, margin = int(lengths.sum()), len(lengths) + 2
    # Fewer than S rows lie between a key t and the place t * total of the order: what is outside of it is certain.
    low, high = (
        np.clip(np.floor(lengths * (place / max(total, 1)) + 0.5), 0, lengths).astype(np.int64)
        for place in (count - margin, count + margin)
    )
    spans = high - low
    stream = np.repeat(np.arange(len(lengths)), spans)
    row = np.arange(len(stream)) - np.repeat(np.cumsum(spans) - spans, spans) + low[stream]
    first = np.lexsort((stream, (2 * row + 1) / (2 * lengths[stream])))[: count - int(low.sum())]
    return np.asarray(low + np.bincount(stream[first], minlength=len(lengths)), dtype=np.int64)


def slices(lengths: NDArray[np.int64], start: int, stop: int, share: tuple[int, int]) -> Iterator[Slice]:
    """A rank's rows of a global batch.

    Args:
        lengths: int64 (S,), rows of each stream.
        start: the batch's first row in the canonical order.
        stop: its end (not included).
        share: the rank's first row in the batch, and its end.
    """
    begin = 0
    rows = zip(*(rows_before(lengths, count).tolist() for count in (start, stop)), strict=True)
    for stream, (row, stop_row) in enumerate(rows):
        first, last = max(share[0] - begin, 0), min(share[1] - begin, stop_row - row)
        if last > first:
            yield Slice(stream=stream, start=row + first, stop=row + last)
        begin += stop_row - row


def stream_share(lengths: NDArray[np.int64], world_size: int) -> float:
    """The largest share of all rows that one of the ranks decodes: 1 / ``world_size`` where streams are even."""
    total = int(lengths.sum())
    ends = np.cumsum(lengths)
    shares = [
        int(lengths[(ends * world_size > total * rank) & ((ends - lengths) * world_size < total * (rank + 1))].sum())
        for rank in range(world_size)
    ]
    return max(shares) / max(total, 1)

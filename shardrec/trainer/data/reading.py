"""Rows of a stream of chunks, decoded and encoded ahead on threads.

thread:   decode block 1 │ decode block 2 │ …      one block ahead of the one that batches are taken from
batches:            rows of block 0 …     │ rows of block 1 …
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from shardrec.trainer.data.encode import Dictionary, Encoded, encode
from shardrec.trainer.data.fault import Reason, RowFault
from shardrec.trainer.data.order import Chunk, held_out
from shardrec.trainer.data.rows import NO_TIME, ClickRows, RowRange, bags_at, join_rows
from shardrec.trainer.data.spec import FeatureSpec
from shardrec.trainer.data.tables import FileInfo, TableBlock, read_blocks


@dataclass(frozen=True, kw_only=True, eq=False)
class Part:
    """Rows of a stream one after the other, broken ones included, which have a place and no values.

    Attributes:
        rows: the good ones.
        faults: of the others, by their places in the part. Each says file, row group and row.
    """

    rows: ClickRows
    faults: dict[int, RowFault] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.rows) + len(self.faults)


PartRange: TypeAlias = tuple[Part, int, int]
"""Rows of a part, from one to another (not included)."""


def joined(ranges: Sequence[PartRange]) -> tuple[ClickRows, dict[int, RowFault]]:
    """The good rows of some ranges (at least one) in order, and the faults of the others by their places among all."""
    good: list[RowRange] = []
    faults: dict[int, RowFault] = {}
    begin = 0
    for part, start, stop in ranges:
        first, last = start, stop
        if part.faults:
            first, last = (place - sum(broken < place for broken in part.faults) for place in (start, stop))
            places = {place: fault for place, fault in part.faults.items() if start <= place < stop}
            faults |= {begin + place - start: fault for place, fault in places.items()}
        good.append((part.rows, first, last))
        begin += stop - start
    return join_rows(good), faults


@dataclass(kw_only=True, eq=False)
class Reader:
    """Reads chunks.

    Attributes:
        files: of the chunks' numbers.
        spec: what the columns are.
        holdout: share of the rows that is held out.
        held: whether to read the held-out rows, or the others.
        part: of the usual size of a block, where many streams are read at once.
        skips: whether what follows in a chunk that is gone, damaged or changed is broken rows, in place of an error.
        bounds: event times, before and after which rows are broken.
        decoded: bytes of the Arrow tables that were decoded so far, by the number of the stream.
        good: whether any row could be read.
    """

    files: Sequence[FileInfo]
    spec: FeatureSpec
    holdout: float
    held: bool
    part: float = 1.0
    skips: bool = False
    bounds: tuple[float, float] = (NO_TIME, math.inf)
    decoded: dict[int, int] = field(default_factory=dict, init=False)
    good: bool = field(default=False, init=False)

    def kept(self, chunk: Chunk) -> int:
        """The rows of a chunk that are on this side: of groups by reading them."""
        if not self._by_group:
            return int(self._sides(np.arange(chunk.row, chunk.row + chunk.rows)).sum())
        return sum(map(len, self.parts(-1, [chunk], 0)))

    def parts(self, stream: int, chunks: Sequence[Chunk], at: int) -> Iterator[Part]:
        """The rows of a stream's chunks on this side, without the first ``at`` of them."""
        for chunk in chunks:
            if 0 < chunk.kept <= at:
                at -= chunk.kept
                continue
            start = 0
            if at and not self._by_group:
                sides = self._sides(np.arange(chunk.row, chunk.row + chunk.rows))
                start, at = int(np.flatnonzero(sides)[at]), 0
            info = self.files[chunk.file]
            offset = chunk.row - sum(info.groups[: chunk.group])
            dictionaries: dict[str, Dictionary] = {}
            # Of rows that are lost it is not known which groups they are of.
            skips = self.skips and not self._by_group
            for block in read_blocks(info, self.spec, group=chunk.group, start=start, part=self.part, skips=skips):
                self.decoded[stream] = self.decoded.get(stream, 0) + block.table.nbytes
                part = self._encoded(block, info, chunk.group, offset, dictionaries)
                dropped = min(at, len(part))
                at -= dropped
                if dropped < len(part):
                    yield _part([(part, dropped, len(part))]) if dropped else part

    @property
    def _by_group(self) -> bool:
        return self.holdout > 0 and self.spec.group is not None

    def _sides(self, units: NDArray[np.int64] | NDArray[np.uint64]) -> NDArray[np.bool_]:
        if not self.holdout:
            return np.full(len(units), not self.held)
        held = held_out(units, self.holdout)
        return held if self.held else ~held

    def _encoded(
        self, block: TableBlock, info: FileInfo, group: int, offset: int, dictionaries: dict[str, Dictionary]
    ) -> Part:
        encoded = encode(block.table, self.spec, dictionaries=dictionaries)
        if encoded.rows.times is not None:
            self._add_untimely(encoded, encoded.rows.times)
        self.good = self.good or len(encoded.faults) < len(block.numbers)
        faults = {int(block.numbers[row]): fault for row, fault in encoded.faults.items()} | block.faults
        if not (self.holdout or self.held or faults):
            return Part(rows=encoded.rows)
        units = np.arange(block.first, block.stop) + offset
        if self._by_group and encoded.rows.groups is not None:
            # A group is held out as a whole: half of it would be ranked on its own.
            units = units.astype(np.uint64)
            units[block.numbers - block.first] = encoded.rows.groups
        kept = self._sides(units)
        good = kept[block.numbers - block.first]
        good[list(encoded.faults)] = False
        place = np.cumsum(kept) - 1
        broken = {
            int(place[number - block.first]): replace(
                fault,
                where=f"{info.place(number, group)}: {fault.where}",
                remedy=f"{fault.remedy}{', give a column of texts kind: id' * (fault.reason is Reason.NUMBER)}, "
                "or leave such rows out (on_bad_row: skip, --on-bad-row skip)",
            )
            for number, fault in sorted(faults.items())
            if kept[number - block.first]
        }
        return Part(rows=encoded.rows.where(good), faults=broken)

    def _add_untimely(self, encoded: Encoded, times: NDArray[np.float64]) -> None:
        """Add the faults of rows with event times out of the bounds."""
        oldest, newest = self.bounds
        for row in np.flatnonzero((times < oldest) | (times > newest)).tolist():
            reason, words, bound = Reason.LATE, "before {}, late by --late-after", oldest
            if times[row] > newest:
                reason, words, bound = Reason.TIME, "after {}, an hour after its arrival was first read", newest
            value, limit = (datetime.fromtimestamp(seconds, UTC).isoformat() for seconds in (times[row], bound))
            where = f"field {self.spec.event_time!r}: {value} is {words.format(limit)}"
            encoded.faults.setdefault(row, RowFault(reason=reason, where=where, remedy="correct it"))


class StreamRows:
    """The rows of one stream, one part ahead of those taken.

    Args:
        parts: makes them, on threads of the pool.
        at: place in the stream of the first row of ``parts``.
        pool: where to.
    """

    def __init__(self, parts: Iterator[Part], at: int, pool: Executor) -> None:
        self._parts, self._at, self._pool = parts, at, pool
        self._current: Part | None = None
        self._end = at  # of the current part
        self._ahead = pool.submit(next, parts, None)

    def take(self, start: int, stop: int) -> list[PartRange]:
        """Rows ``start`` to ``stop`` (not included) of the stream, which are not before those taken last."""
        taken: list[PartRange] = []
        while start < stop:
            if self._current is None or self._end <= start:
                self._current = self._ahead.result()
                assert self._current is not None, "chunks have the rows that were counted, or raise"
                self._at, self._end = self._end, self._end + len(self._current)
                self._ahead = self._pool.submit(next, self._parts, None)
                continue
            end = min(stop, self._end)
            taken.append((self._current, start - self._at, end - self._at))
            start = end
        return taken


def shuffled(
    parts: Iterator[Part], size: int, first: int, draws: Sequence[int], *, keep_groups: bool
) -> Iterator[Part]:
    """The rows in a random order inside of windows. Broken rows keep their places.

    Args:
        parts: of a stream, from the beginning of window ``first``.
        size: rows of a window.
        first: number of the first window.
        draws: seed, epoch and stream, of which with a window's number the order is a function.
        keep_groups: move neighbouring rows of a group together.
    """
    seed, *counter = draws
    for window, part in enumerate(_windows(parts, size), first):
        random = np.random.Generator(np.random.Philox(key=seed, counter=[window, *counter]))
        rows = part.rows
        if not keep_groups or rows.groups is None:
            yield Part(rows=rows.take(random.permutation(len(rows))), faults=part.faults)
            continue
        starts = np.flatnonzero(np.r_[True, rows.groups[1:] != rows.groups[:-1]]) if len(rows) else np.arange(0)
        sizes = np.diff(np.r_[starts, len(rows)])
        _, places, _ = bags_at(random.permutation(len(starts)), sizes, np.arange(len(rows)), None)
        yield Part(rows=rows.take(places.numpy()), faults=part.faults)


def _windows(parts: Iterator[Part], size: int) -> Iterator[Part]:
    """The rows, ``size`` at a time. What is left at the end is a smaller part."""
    waiting: list[PartRange] = []
    count = 0
    for part in parts:
        start = 0
        while count + len(part) - start >= size:
            stop = start + size - count
            yield _part([*waiting, (part, start, stop)])
            waiting, count, start = [], 0, stop
        if start < len(part):
            waiting.append((part, start, len(part)))
            count += len(part) - start
    if waiting:
        yield _part(waiting)


def _part(ranges: Sequence[PartRange]) -> Part:
    rows, faults = joined(ranges)
    return Part(rows=rows, faults=faults)

"""Reads whose sources are the ranks' memories: asked for, and answered, in rounds of a bounded size.

::

    header     to rank q: words of the requests to it | whether this rank has a further round | whether it has failed
    requests   to rank q: per block, number of the part | rows from, to | columns from, to | count, numbers of rows
    answers    to rank q: the values of the blocks that it asked for, each from a multiple of 8 bytes on

A rank asks each other rank for at most its share of a round, so that no rank has to send more than a round either.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from shardrec.checkpoint.manifest import Read
from shardrec.checkpoint.parts import Part, Rect, as_matrix
from shardrec.errors import PeerError
from shardrec.exchange.collectives import Collectives

__all__ = ["Messages"]

_ROUND_BYTES = 16 * 2**20
"""Of the values that a rank sends in a round, and of those that it receives; transports may hold both once more."""
_FIELDS = 6


class _Block(NamedTuple):
    """A part of a read: rows ``[first, end)`` of its tensor, or of those that it lists; all of its columns."""

    read: Read
    rect: Rect
    first: int
    end: int
    is_last: bool

    @property
    def shape(self) -> tuple[int, int]:
        return self.end - self.first, self.rect.cols

    @property
    def words(self) -> int:
        """Of its values."""
        rows, cols = self.shape
        return -(-rows * cols * self.read.dtype.itemsize // 8)

    @property
    def rows(self) -> Tensor:
        """Numbers of its rows, if they are listed; else empty."""
        return torch.empty(0, dtype=torch.int64) if self.read.rows is None else self.read.rows[0][self.first : self.end]

    @property
    def fields(self) -> list[int]:
        """Number of the part, rows, columns, count of listed rows."""
        return [self.read.source.start, self.first, self.end, *self.rect[2:], len(self.rows)]

    def write(self, values: Tensor) -> None:
        """Write its values (rows, columns) where they are wanted."""
        read = self.read
        into = read.into[:, self.rect.cols_in(read.place)]
        if read.rows is None:
            into[self.first - read.place.row_start : self.end - read.place.row_start].copy_(values)
        else:
            targets = read.rows[1][self.first : self.end].to(into.device)
            into.index_copy_(0, targets, values.to(into.device, into.dtype))
        if self.is_last and read.then is not None:
            read.then()


class Messages:
    """Reads from the parts that ranks hold.

    Args:
        parts: of this rank; the source of a read is a part by its rank (``file``) and its number (``start``).
        collectives: of the ranks.
        device: of their tensors.

    Attributes:
        received: bytes of the values that have come from other ranks.
        fault: the first error of this rank.
    """

    def __init__(self, parts: Sequence[Part], collectives: Collectives, device: torch.device) -> None:
        self._parts, self._collectives, self._device = parts, collectives, device
        self._ranks = range(collectives.world_size)
        self.received = 0
        self.fault: Exception | None = None

    def run(self, reads: Iterable[Read]) -> None:
        """Carry out the reads, in their order, until one fails on any rank. Every rank calls it.

        Raises:
            PeerError: if another rank is gone.
        """
        blocks = self._blocks(reads)
        left: list[_Block] = []
        goes_on = True
        while goes_on:
            of_round: list[_Block] = []
            with self._noted():
                of_round, left = self._next(chain(left, blocks))
            requests = [[torch.empty(0, dtype=torch.int64)] for _ in self._ranks]
            sizes = [0 for _ in self._ranks]
            for block in of_round:
                if block.read.source.file != self._collectives.rank:
                    requests[block.read.source.file] += [torch.tensor(block.fields), block.rows]
                    sizes[block.read.source.file] += block.words
            words = [torch.cat(parts) for parts in requests]
            state = [bool(left), self.fault is not None]
            heads = [
                one.tolist()
                for one in self._send([torch.tensor([len(one), *state]) for one in words], [3] * len(words))
            ]
            if any(failed for *_, failed in heads):
                return
            goes_on = any(more for _, more, _ in heads)
            answers = self._send(self._answers(self._send(words, [count for count, *_ in heads])), sizes)
            with self._noted():
                self._write(of_round, answers)

    def check(self, then: Callable[[], None] | None = None) -> None:
        """Raise this rank's error, if there was one; else do ``then``."""
        if self.fault is not None:
            raise self.fault
        if then is not None:
            then()

    @contextmanager
    def _noted(self) -> Iterator[None]:
        """Keep an error of this rank, which goes on until the others know of it."""
        try:
            yield
        except PeerError:
            raise
        except Exception as error:
            self.fault = self.fault or error

    def _send(self, parts: Sequence[Tensor], receive: Sequence[int]) -> list[Tensor]:
        sent = [[part.to(self._device)] for part in parts]
        return self._collectives.send(sent, receive, "reshard").wait()

    @property
    def _room(self) -> int:
        """Bytes that a rank may ask another for in a round."""
        return _ROUND_BYTES // max(1, len(self._ranks) - 1)

    def _blocks(self, reads: Iterable[Read]) -> Iterator[_Block]:
        for read in reads:
            source, place = read.source.rect, read.place
            if read.rows is not None:
                place = place._replace(row_start=source.row_start, row_end=source.row_end)
            rect = source.common(place)
            assert rect is not None, "what is read is there"
            first, end = rect[:2] if read.rows is None else (0, len(read.rows[0]))
            row_bytes = rect.cols * read.dtype.itemsize + (0 if read.rows is None else 8)
            length = max(1, self._room // row_bytes)
            for start in range(first, end, length):
                yield _Block(read, rect, start, min(start + length, end), start + length >= end)

    def _next(self, blocks: Iterator[_Block]) -> tuple[list[_Block], list[_Block]]:
        """The blocks of a round, in order, and the first one after them, if there is one."""
        of_round: list[_Block] = []
        sizes = [0 for _ in self._ranks]
        for block in blocks:
            source, listed = block.read.source.file, 0 if block.read.rows is None else block.end - block.first
            size = 0 if source == self._collectives.rank else 8 * (block.words + listed)
            if sizes[source] and sizes[source] + size > self._room:
                return of_round, [block]
            sizes[source] += size
            of_round.append(block)
        return of_round, []

    def _answers(self, asked: Sequence[Tensor]) -> list[Tensor]:
        """Per rank, the values that it asked for, as int64 words."""
        requests = [list(_requests(words.cpu())) for words in asked]
        sizes = [[self._shape(request, rows) for request, rows in of_rank] for of_rank in requests]
        answers = []
        for of_rank, shapes in zip(requests, sizes, strict=True):
            answer = self._collectives.allocate(2 * sum(words for *_, words in shapes), self._device).view(torch.int64)
            answers.append(answer)
            with self._noted():
                parts = answer.split([words for *_, words in shapes])
                for ((number, *place), rows), (*shape, _), part in zip(of_rank, shapes, parts, strict=True):
                    values = self._values(number, place, rows)
                    _as_values(part, values.dtype, shape).copy_(values)
        return answers

    def _shape(self, request: list[int], rows: Tensor) -> tuple[int, int, int]:
        number, first, end, left, right = request
        count, cols = len(rows) or end - first, right - left
        return count, cols, -(-count * cols * self._parts[number].values.itemsize // 8)

    def _values(self, number: int, place: Sequence[int], rows: Tensor) -> Tensor:
        """A part of this rank: rows ``first`` to ``end``, or those that are listed; columns ``left`` to ``right``."""
        rect, (first, end, left, right) = self._parts[number].rect, place
        matrix = as_matrix(self._parts[number].values)[:, left - rect.col_start : right - rect.col_start]
        if len(rows):
            return matrix.index_select(0, (rows - rect.row_start).to(matrix.device))
        return matrix[first - rect.row_start : end - rect.row_start]

    def _write(self, blocks: Sequence[_Block], answers: Sequence[Tensor]) -> None:
        places = [0 for _ in self._ranks]
        for block in blocks:
            source = block.read.source
            if source.file == self._collectives.rank:
                (number, *place, _), rows = block.fields, block.rows
                block.write(self._values(number, place, rows))
                continue
            start = places[source.file]
            places[source.file] = end = start + block.words
            self.received += block.shape[0] * block.shape[1] * block.read.dtype.itemsize
            block.write(_as_values(answers[source.file][start:end], block.read.dtype, block.shape))


def _requests(words: Tensor) -> Iterator[tuple[list[int], Tensor]]:
    """The requests of a rank: part, rows, columns; and the numbers of rows that are listed."""
    place = 0
    while place < len(words):
        *fields, count = words[place : place + _FIELDS].tolist()
        place += _FIELDS + count
        yield fields, words[place - count : place]


def _as_values(words: Tensor, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    """The matrix that lies at the beginning of int64 words."""
    rows, cols = shape
    return words.view(torch.uint8)[: rows * cols * dtype.itemsize].view(dtype).view(rows, cols)

"""Reads from the ranks' memories: asked for, and answered, in rounds of a bounded size.

::

    agree      each rank writes the answers of the previous round, and asks for its next reads, by rank
    agree      each rank has made its answers
    answers    to rank q: the values that it asked for, each from a multiple of 8 bytes on

A rank asks another one for its share of a round at most, so that no rank has to send more than a round either.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from shardrec.checkpoint.manifest import Read
from shardrec.checkpoint.parts import Part, Rect, as_matrix
from shardrec.exchange.agree import Ranks, on_all_ranks
from shardrec.step.context import ModelContext

_ROUND_BYTES = 16 * 2**20
"""Of the values that a rank sends in a round, and of those that it receives. Transports may hold both once more."""


class _Request(NamedTuple):
    """Values of a part of a rank: a rectangle, or its columns in rows that are listed, int64 numbers."""

    rank: int
    part: int
    rect: Rect
    itemsize: int
    rows: bytes

    @property
    def words(self) -> int:
        """Of 8 bytes, in the answer."""
        return -(-self.rect.numel * self.itemsize // 8)


class _Block(NamedTuple):
    """Rows ``[start, end)`` of a read, or of those that it lists."""

    read: Read
    request: _Request
    start: int
    end: int
    is_last: bool


class Messages:
    """Reads from the parts that ranks hold.

    Args:
        parts: of this rank. The source of a read is a part by its rank (``file``) and its number (``start``).
        ranks: that read.
        context: of their model.
        remedy: for an error of the operating system.

    Attributes:
        received: bytes of the values that have come from other ranks.
    """

    def __init__(self, parts: Sequence[Part], ranks: Ranks, context: ModelContext, remedy: str) -> None:
        self._parts, self._ranks, self._context, self._remedy = parts, ranks, context, remedy
        self._room = _ROUND_BYTES // max(1, ranks.world_size - 1)
        self.received = 0

    def run(self, reads: Iterable[Read]) -> None:
        """Carry out the reads, in their order. Every rank calls it. Raises what :func:`on_all_ranks` does."""
        blocks, left = self._blocks(reads), list[_Block]()
        of_round, answers = list[_Block](), list[Tensor]()
        sent = list[list[Tensor]]()

        def go_on() -> tuple[bool, list[_Request]]:
            nonlocal left, of_round
            self._write(of_round, answers)
            answers.clear()  # the next ones take their memory
            of_round, left = self._next(chain(left, blocks))
            return bool(of_round), [block.request for block in of_round if block.request.rank != self._ranks.rank]

        def answer() -> None:
            sent[:] = [[self._answer(requests)] for _, requests in asked]

        while True:
            asked = on_all_ranks(go_on, self._ranks, "reshard", remedy=self._remedy)
            if not any(wants for wants, _ in asked):
                return
            on_all_ranks(answer, self._ranks, "reshard", remedy=self._remedy)  # its memory may not be there
            answers = self._exchange(sent, asked[self._ranks.rank][1])

    def _blocks(self, reads: Iterable[Read]) -> Iterator[_Block]:
        for read in reads:
            source, place, listed = read.source, read.place, b""
            if read.rows is not None:
                place = place._replace(row_start=source.rect.row_start, row_end=source.rect.row_end)
            rect = source.rect.common(place)
            assert rect is not None, "what is read is there"
            start, stop = rect[:2] if read.rows is None else (0, len(read.rows[0]))
            row_bytes = rect.cols * read.dtype.itemsize
            if read.rows is not None:
                row_bytes += 8 * self._ranks.world_size  # their numbers go to all ranks
            length = max(1, self._room // row_bytes)
            for first in range(start, stop, length):
                end = min(first + length, stop)
                if read.rows is not None:
                    listed = read.rows[0][first:end].numpy().tobytes()
                wanted = rect._replace(row_start=first, row_end=end)
                request = _Request(source.file, source.start, wanted, read.dtype.itemsize, listed)
                yield _Block(read, request, first, end, is_last=end == stop)

    def _next(self, blocks: Iterator[_Block]) -> tuple[list[_Block], list[_Block]]:
        """The blocks of a round, in order, and the first one after them, if there is one."""
        of_round, sizes = list[_Block](), [0] * self._ranks.world_size
        for block in blocks:
            request = block.request
            size = (
                0
                if request.rank == self._ranks.rank
                else 8 * request.words + len(request.rows) * self._ranks.world_size
            )
            if sizes[request.rank] and sizes[request.rank] + size > self._room:
                return of_round, [block]
            sizes[request.rank] += size
            of_round.append(block)
        return of_round, []

    def _answer(self, requests: Sequence[_Request]) -> Tensor:
        """What a rank has asked of this one, words of 8 bytes."""
        mine = [request for request in requests if request.rank == self._ranks.rank]
        words = [request.words for request in mine]
        answer = self._context.collectives.allocate(2 * sum(words), self._context.device).view(torch.int64)
        for request, part in zip(mine, answer.split(words) if words else (), strict=True):
            values = self._values(request)
            _as_values(part, values.dtype, request.rect).copy_(values)
        return answer

    def _exchange(self, sent: Sequence[Sequence[Tensor]], requests: Sequence[_Request]) -> list[Tensor]:
        """Send the answers. Returns the answers of the other ranks to this rank's requests."""
        sizes = [0] * self._ranks.world_size
        for request in requests:
            sizes[request.rank] += request.words
        return self._context.collectives.send(sent, sizes, "reshard").wait()

    def _values(self, request: _Request) -> Tensor:
        """What is asked of a part of this rank."""
        part, rect = self._parts[request.part], request.rect
        matrix = as_matrix(part.values)[:, rect.cols_in(part.rect)]
        if not request.rows:
            return matrix[rect.rows_in(part.rect)]
        rows = torch.frombuffer(bytearray(request.rows), dtype=torch.int64) - part.rect.row_start
        return matrix.index_select(0, rows.to(matrix.device))

    def _write(self, blocks: Sequence[_Block], answers: Sequence[Tensor]) -> None:
        """Write the values of a round where they are wanted."""
        places = [0] * self._ranks.world_size
        for read, request, start, end, is_last in blocks:
            if request.rank == self._ranks.rank:
                values = self._values(request)
            else:
                place = places[request.rank]
                places[request.rank] += request.words
                words = answers[request.rank][place : place + request.words]
                values = _as_values(words, read.dtype, request.rect)
                self.received += values.nbytes
            into = read.into[:, request.rect.cols_in(read.place)]
            if read.rows is None:
                into[request.rect.rows_in(read.place)].copy_(values)
            else:
                targets = read.rows[1][start:end].to(into.device)
                into.index_copy_(0, targets, values.to(into.device, into.dtype))
            if is_last and read.then is not None:
                read.then()


def _as_values(words: Tensor, dtype: torch.dtype, rect: Rect) -> Tensor:
    """The matrix that lies at the beginning of words of 8 bytes."""
    return words.view(torch.uint8)[: rect.numel * dtype.itemsize].view(dtype).view(-1, rect.cols)

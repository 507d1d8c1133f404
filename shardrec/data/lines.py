"""``LineStream``: a text file as blocks of whole lines, in constant memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from shardrec.data.compression import ByteStream, FileKind

__all__ = ["LineBlock", "LineStream"]

_BLOCK_BYTES = 1 << 20
_SHOWN_BYTES = 1 << 10


@dataclass(frozen=True, kw_only=True)
class LineBlock:
    """Whole lines, each with its line feed (one was added to the last line of a file that lacked it).

    Attributes:
        data: the bytes.
        first_line: number of the first line, from 1.
        cut: whether the last line had no line feed.
        too_long: whether this is the beginning of one line of more than 1 MiB, the rest of which is left out.
    """

    data: bytes
    first_line: int
    cut: bool = False
    too_long: bool = False


class LineStream:
    """The lines of one text file, plain or compressed, in blocks of about 1 MiB.

    Iterating yields every whole line before a fault of the compressed stream, then stops; ``damage`` tells why.

    Args:
        path: the file.
        kind: how it is written; not Parquet.

    Attributes:
        lines: lines yielded so far.
    """

    def __init__(self, path: Path, kind: FileKind) -> None:
        self._bytes = ByteStream(path, kind)
        self.lines = 0

    @property
    def damage(self) -> str | None:
        """What is wrong with the compressed stream, None while nothing is."""
        return self._bytes.damage

    def __iter__(self) -> Iterator[LineBlock]:
        pieces: list[bytes] = []
        size = 0
        in_long_line = False
        for chunk in self._bytes:
            if in_long_line:
                _, line_feed, chunk = chunk.partition(b"\n")
                in_long_line = not line_feed
            pieces.append(chunk)
            size += len(chunk)
            if size < _BLOCK_BYTES:
                continue
            data = b"".join(pieces)
            end = data.rfind(b"\n") + 1
            if end:
                yield self._block(data[:end])
                pieces, size = [data[end:]], len(data) - end
            else:
                yield self._block(data[:_SHOWN_BYTES] + b"\n", too_long=True)
                pieces, size, in_long_line = [], 0, True
        data = b"".join(pieces)
        end = data.rfind(b"\n") + 1
        if end:
            yield self._block(data[:end])
        if end < len(data) and self.damage is None:
            yield self._block(data[end:] + b"\n", cut=True)

    def _block(self, data: bytes, *, cut: bool = False, too_long: bool = False) -> LineBlock:
        first = self.lines + 1
        self.lines += data.count(b"\n")
        return LineBlock(data=data, first_line=first, cut=cut, too_long=too_long)

"""Fields of text, decoded many at once with numpy: positions of columns, integers, hexadecimal numbers.

A field of at most 8 characters is one 64-bit word, read at any byte position and decoded by a few word-wide steps that
treat its 8 bytes in parallel (the technique of "Number Parsing at a Gigabyte per Second", Lemire, 2021):

    "1a2b0c0d" → bytes 1 a 2 b 0 c 0 d → nibbles 1 10 2 11 0 12 0 13 → pairs 0x1a 0x2b 0x0c 0x0d → 0x1a2b0c0d

Legend: L lines, R lines with the right number of columns, C columns.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["ByteFields", "LineTable", "split_lines"]

_TAB, _LINE_FEED, _RETURN, _MINUS = 9, 10, 13, 45
_BAD = 0xFF
_NIBBLES = bytes(int(chr(c), 16) if chr(c) in "0123456789abcdefABCDEF" else _BAD for c in range(256))
_U64 = np.uint64
_HIGH_NIBBLES = _U64(0xF0F0F0F0F0F0F0F0)
_PAD = bytes(8)


@dataclass(frozen=True, kw_only=True, eq=False)
class LineTable:
    """Where the fields of some lines are.

    Attributes:
        line_starts: int64 (L + 1,), position of each line, and the end of the last.
        good: int64 (R,), the lines that have the right number of columns.
        starts: int64 (R, C), position of each field of those lines.
        lengths: int64 (R, C), its bytes.
    """

    line_starts: NDArray[np.int64]
    good: NDArray[np.int64]
    starts: NDArray[np.int64]
    lengths: NDArray[np.int64]


def split_lines(data: bytes, columns: int) -> LineTable:
    """Finds the lines and fields of ``data``, which ends with a line feed; a carriage return before one is left out."""
    characters = np.frombuffer(data, dtype=np.uint8)
    separators = np.flatnonzero((characters == _TAB) | (characters == _LINE_FEED))
    last = np.flatnonzero(characters[separators] == _LINE_FEED)  # index of each line's last separator
    line_ends = separators[last]
    line_starts = np.concatenate([[0], line_ends + 1])
    first = np.concatenate([[0], last[:-1] + 1])
    good = np.flatnonzero(last - first + 1 == columns)
    if len(good) == len(last):
        ends = separators.reshape(-1, columns).copy()
    else:
        ends = separators[first[good][:, None] + np.arange(columns)]
    starts = np.empty_like(ends)
    starts[:, 0] = line_starts[good]
    starts[:, 1:] = ends[:, :-1] + 1
    before = np.maximum(ends[:, -1] - 1, 0)
    ends[:, -1] -= (characters[before] == _RETURN) & (ends[:, -1] > starts[:, -1])
    return LineTable(line_starts=line_starts, good=good, starts=starts, lengths=ends - starts)


class ByteFields:
    """Decodes fields of one byte string.

    Args:
        data: the bytes that the fields are in.
    """

    def __init__(self, data: bytes) -> None:
        padded = data + _PAD
        self._characters = np.frombuffer(padded, dtype=np.uint8)
        nibbles = padded.translate(_NIBBLES)
        # every byte position starts a word of 8 nibbles, the first in the lowest byte
        self._words: NDArray[np.uint64] = np.ndarray((len(data) + 1,), dtype="<u8", buffer=nibbles, strides=(1,))

    def bits(
        self, starts: NDArray[np.int64], lengths: NDArray[np.int64]
    ) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
        """Fields that must be ``0`` or ``1``: values, and which are bad; both of the shape of ``starts``."""
        values = self._characters[starts].astype(np.int16) - ord("0")
        bad = (lengths != 1) | (values < 0) | (values > 1)
        return values.astype(np.float32), bad

    def categories(
        self, starts: NDArray[np.int64], lengths: NDArray[np.int64]
    ) -> tuple[NDArray[np.uint64], NDArray[np.bool_], NDArray[np.bool_]]:
        """Fields of 8 hexadecimal digits or none: values, which are missing, which are bad; the shape of ``starts``."""
        words = self._words[starts]
        missing = lengths == 0
        bad = (lengths != 8) | ((words & _HIGH_NIBBLES) != 0)
        bad &= ~missing
        words = ((words << _U64(4)) | (words >> _U64(8))) & _U64(0x00FF00FF00FF00FF)
        words = ((words << _U64(8)) | (words >> _U64(16))) & _U64(0x0000FFFF0000FFFF)
        words = ((words << _U64(16)) | (words >> _U64(32))) & _U64(0xFFFFFFFF)
        return words, missing, bad

    def integers(
        self, starts: NDArray[np.int64], lengths: NDArray[np.int64]
    ) -> tuple[NDArray[np.float64], NDArray[np.bool_], NDArray[np.bool_]]:
        """Fields of 1 to 18 decimal digits after an optional minus, or empty: values, missing, bad."""
        missing = lengths == 0
        negative = (self._characters[starts] == _MINUS) & ~missing
        digits = lengths - negative
        first = starts + negative
        # The last digit goes to the highest byte; the low bytes that come free are leading zeros.
        shift = ((8 - np.clip(digits, 1, 8)) * 8).astype(np.uint64)
        words = self._words[first] << shift
        bad = (words & _HIGH_NIBBLES) != 0
        bad |= ((words + _U64(0x0606060606060606)) & _HIGH_NIBBLES) != 0
        bad |= (digits < 1) | (digits > 18)
        bad &= ~missing
        words = (words * _U64(10) + (words >> _U64(8))) & _U64(0x00FF00FF00FF00FF)
        words = (words * _U64(100) + (words >> _U64(16))) & _U64(0x0000FFFF0000FFFF)
        words = (words * _U64(10000) + (words >> _U64(32))) & _U64(0xFFFFFFFF)
        values = words.astype(np.float64)
        for place in zip(*np.nonzero((digits > 8) & (digits <= 18)), strict=True):  # rare
            text = self._characters[first[place] : first[place] + digits[place]].tobytes()
            bad[place] = not text.isdigit()
            values[place] = 0.0 if bad[place] else float(int(text))
        return np.where(negative, -values, values), missing, bad

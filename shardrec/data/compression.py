"""How a data file is written, and its bytes without the compression, in constant memory."""

from __future__ import annotations

import lzma
import zlib
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Protocol

from shardrec.errors import DataError

__all__ = ["ByteStream", "FileKind", "detect_kind", "promised_kind"]

_CHUNK_BYTES = 1 << 20


class FileKind(Enum):
    """How a data file is written."""

    TEXT = "plain text"
    GZIP = "gzip"
    XZ = "xz"
    PARQUET = "Parquet"


_SUFFIXES = {".gz": FileKind.GZIP, ".xz": FileKind.XZ, ".parquet": FileKind.PARQUET, ".pq": FileKind.PARQUET}
_MAGIC = {
    b"\x1f\x8b": FileKind.GZIP.value,
    b"\xfd7zXZ\x00": FileKind.XZ.value,
    b"PAR1": FileKind.PARQUET.value,
    b"PK\x03\x04": "zip",
    b"BZh": "bzip2",
    b"\x28\xb5\x2f\xfd": "zstandard",
}
_REMEDIES = {
    FileKind.TEXT.value: "name it without that suffix",
    FileKind.GZIP.value: "name it .gz",
    FileKind.XZ.value: "name it .xz",
    FileKind.PARQUET.value: "name it .parquet",
}


def promised_kind(path: Path) -> FileKind:
    """The kind that a file's suffix promises: ``.gz``, ``.xz``, ``.parquet`` or ``.pq``, anything else plain text."""
    return _SUFFIXES.get(path.suffix.lower(), FileKind.TEXT)


def detect_kind(path: Path) -> FileKind:
    """The kind that a file's suffix promises, after checking that its first bytes keep the promise.

    Raises:
        DataError: no such file, a directory, an unreadable or empty file, or contents of another kind.
    """
    if path.is_dir():
        raise DataError(f"data file {path} is a directory: give the files in it, as a list")
    try:
        with path.open("rb") as file:
            head = file.read(8)
    except FileNotFoundError:
        raise DataError(f"data file {path} does not exist: check the path") from None
    except OSError as error:
        raise DataError(f"data file {path} cannot be read ({error.strerror}): check its permissions") from error
    if not head:
        raise DataError(f"data file {path} is empty: copy or write it again")
    promised = promised_kind(path)
    found = next((kind for magic, kind in _MAGIC.items() if head.startswith(magic)), FileKind.TEXT.value)
    if found != promised.value:
        remedy = _REMEDIES.get(found, "write it as plain text, .gz, .xz or .parquet")
        raise DataError(f"data file {path} is {found} by its first bytes but {promised.value} by its suffix: {remedy}")
    return promised


class ByteStream:
    """The bytes of a text file in chunks of at most 1 MiB, decompressed.

    Decompresses by itself rather than through a file object, so that everything before a fault is yielded: then the
    iteration ends and ``damage`` tells why.

    Args:
        path: the file.
        kind: how it is written; not Parquet.

    Attributes:
        damage: what is wrong with the compressed stream, None while nothing is.
    """

    def __init__(self, path: Path, kind: FileKind) -> None:
        self._path, self._kind = path, kind
        self.damage: str | None = None

    def __iter__(self) -> Iterator[bytes]:
        with self._path.open("rb") as file:
            raw = iter(lambda: file.read(_CHUNK_BYTES), b"")
            if self._kind is FileKind.TEXT:
                yield from raw
            else:
                yield from self._decompress(raw)

    def _decompress(self, raw: Iterator[bytes]) -> Iterator[bytes]:
        name = self._kind.value
        member: _Member | None = None
        for data in raw:
            while True:
                if member is None:
                    data = data.lstrip(b"\0")  # padding between members
                    if not data:
                        break
                    member = _GzipMember() if self._kind is FileKind.GZIP else _XzMember()
                try:
                    out = member.feed(data)
                except (zlib.error, lzma.LZMAError) as error:
                    self.damage = f"the {name} stream is damaged ({error})"
                    return
                if out:
                    yield out
                if member.done:
                    data, member = member.rest, None
                elif member.hungry:
                    break
                else:
                    data = b""
        if member is not None:
            self.damage = f"the {name} stream ends before its end mark"


class _Member(Protocol):
    """One compressed member of a file (a file may be several of them in a row)."""

    done: bool  # its end has been read; ``rest`` is what follows
    hungry: bool  # nothing more comes out before more goes in
    rest: bytes

    def feed(self, data: bytes) -> bytes:
        """Takes compressed bytes (none while not hungry) and gives at most 1 MiB."""


class _GzipMember:
    def __init__(self) -> None:
        self._inner = zlib.decompressobj(wbits=31)
        self.done, self.hungry, self.rest = False, True, b""

    def feed(self, data: bytes) -> bytes:
        out = self._inner.decompress(self._inner.unconsumed_tail + data, _CHUNK_BYTES)
        self.done, self.rest = self._inner.eof, self._inner.unused_data
        self.hungry = not self._inner.unconsumed_tail and len(out) < _CHUNK_BYTES
        return out


class _XzMember:
    def __init__(self) -> None:
        self._inner = lzma.LZMADecompressor(format=lzma.FORMAT_XZ)
        self.done, self.hungry, self.rest = False, True, b""

    def feed(self, data: bytes) -> bytes:
        out = self._inner.decompress(data, _CHUNK_BYTES)
        self.done, self.rest = self._inner.eof, self._inner.unused_data
        self.hungry = self._inner.needs_input
        return out

"""Data files of a checkpoint: in the safetensors format, written, verified and read in blocks.

::

    8 bytes    header size
    header     JSON: name, dtype, shape and place per tensor
    tensors    row-major, little-endian, one after the other
    ├ block 0 ──────┤├ block 1 ──────┤├ ...        16 MiB of the file each, with a CRC-32 each

The checksums are of the file's blocks, not of its tensors: so they cover the header, any rank can verify any block, and
W ranks verify a file of any size in 1/W of the time. Every change within 32 consecutive bits is detected, and other
changes with a probability of 1 - 2^-32 per block. zlib-ng computes it with the processor's carry-less multiplication,
10 GiB/s on a core, four times as fast as zlib: with that, verifying a file costs as much as reading it.

Values are written from a tensor's memory and read into it without a copy if they are contiguous on the CPU; else
through a buffer of one block.
"""

from __future__ import annotations

import json
import math
import os
import struct
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from zlib_ng.zlib_ng import crc32

from shardrec.checkpoint.parts import Part, Rect
from shardrec.errors import CheckpointError
from shardrec.files import naming, open_regular, parse_json

BLOCK_BYTES = 16 * 2**20
CACHED_BYTES = 2**19
"""Bytes that are summed and written, or read and summed, together: they stay in the processor's second cache in
between."""

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""The dtypes that a checkpoint can hold, by their names in the safetensors format."""

DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True, kw_only=True)
class SavedFile:
    """A data file.

    Args:
        name: inside the data folder.
        size: bytes.
        header: bytes before the first tensor.
        checksums: CRC-32 per block.
    """

    name: str
    size: int
    header: int
    checksums: tuple[int, ...]

    @property
    def blocks(self) -> int:
        """Number of blocks."""
        return -(-self.size // BLOCK_BYTES)


class SavedRows(NamedTuple):
    """Rows of a rectangle that have changed since it was written.

    Args:
        file: its number.
        start: byte in the file, of the rows' values.
        numbers: byte in the file, of their int64 numbers, which count from the rectangle's first row and ascend.
        length: number of rows.
    """

    file: int
    start: int
    numbers: int
    length: int


class _Writer:
    """Writes, counts and sums."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.size = 0
        self.checksums: list[int] = []

    def write(self, data: memoryview) -> None:
        while data:
            if self.size % BLOCK_BYTES == 0:
                self.checksums.append(0)
            part = data[: min(CACHED_BYTES, BLOCK_BYTES - self.size % BLOCK_BYTES)]
            self.checksums[-1] = crc32(part, self.checksums[-1])
            self._file.write(part)
            self.size += len(part)
            data = data[len(part) :]


def write_file(path: Path, tensors: Sequence[tuple[str, Part, Tensor | None]]) -> tuple[SavedFile, list[int]]:
    """Write a new file of named tensors, on any device, and wait until it is on the disk.

    Args:
        path: of the file.
        tensors: names, parts, and (n,) int64 the rows to write, or None for all.

    Returns:
        The file, and where in it each tensor starts, in bytes.
    """
    header, end = {}, 0
    for name, part, rows in tensors:
        values = part.values
        shape = list(values.shape) if rows is None else [len(rows), *values.shape[1:]]
        start, end = end, end + math.prod(shape) * values.itemsize
        header[name] = {"dtype": DTYPE_NAMES[values.dtype], "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    starts = []
    with naming(path), path.open("xb") as file:
        writer = _Writer(file)
        writer.write(memoryview(struct.pack("<Q", len(text)) + text))
        for _, part, rows in tensors:
            starts.append(writer.size)
            for block in part.blocks(rows, BLOCK_BYTES):
                writer.write(as_bytes(block.cpu().contiguous()).data)
        file.flush()
        os.fsync(file.fileno())
    sync_folder(path.parent)
    header_size = writer.size - end
    return SavedFile(name=path.name, size=writer.size, header=header_size, checksums=tuple(writer.checksums)), starts


def as_bytes(values: Tensor) -> npt.NDArray[np.uint8]:
    """(n,) the memory of a contiguous tensor on the CPU."""
    return values.view(-1).view(torch.uint8).numpy()


class OpenFile:
    """A file of a checkpoint that is being loaded. Its size has been checked.

    Raises:
        CheckpointError: if it has another size.
    """

    def __init__(self, folder: Path, file: SavedFile, stack: ExitStack) -> None:
        self._path = folder / file.name
        self._file = file
        self._descriptor = open_regular(self._path)
        stack.callback(os.close, self._descriptor)
        size = os.fstat(self._descriptor).st_size
        if size != file.size:
            raise self._damaged(f"has {size:,} bytes, and {file.size:,} were written")

    def check_contents(self, contents: Mapping[int, tuple[str, int]]) -> None:
        """Compare the manifest with the file's header.

        Args:
            contents: what starts at which byte: the dtype by its name, and the byte after the last.

        Raises:
            CheckpointError: if the header says otherwise.
        """
        text = bytearray(self._file.header)
        self._read(memoryview(text), 0)
        try:
            if struct.unpack_from("<Q", text)[0] != len(text) - 8:
                raise ValueError(f"it is not of {len(text) - 8:,} bytes")
            of_file = {
                len(text) + tensor["data_offsets"][0]: (tensor["dtype"], len(text) + tensor["data_offsets"][1])
                for tensor in parse_json(bytes(text[8:])).values()
                if tensor["data_offsets"][0] != tensor["data_offsets"][1]
            }
        except (AttributeError, LookupError, TypeError, ValueError, struct.error) as error:
            raise self._damaged(f"has a damaged header ({type(error).__name__}: {error})") from error
        for start, (dtype, end) in contents.items():
            dtype_of_file, end_of_file = of_file.get(start, ("nothing", start))
            if (dtype_of_file, end_of_file) != (dtype, end):
                raise self._damaged(
                    f"has {dtype_of_file} at bytes {start:,} to {end_of_file:,}, and the manifest says {dtype} to byte "
                    f"{end:,}"
                )

    def _damaged(self, how: str) -> CheckpointError:
        return CheckpointError(f"{self._path} {how}. Load an older checkpoint, or restore this one from a copy")

    def verify(self, block: int, buffer: memoryview) -> None:
        """Compare a block with its checksum.

        Args:
            block: its number.
            buffer: memory to read into, small enough for the processor's cache.

        Raises:
            CheckpointError: if it is damaged. Names the file and the position.
        """
        start = block * BLOCK_BYTES
        end = min(start + BLOCK_BYTES, self._file.size)
        checksum = 0
        for place in range(start, end, len(buffer)):
            part = buffer[: end - place]
            self._read(part, place)
            checksum = crc32(part, checksum)
        if checksum != self._file.checksums[block]:
            raise self._damaged(f"is damaged: bytes {start:,} to {end:,} are not what was written")

    def _read(self, into: memoryview, start: int) -> None:
        while into:
            count = os.preadv(self._descriptor, [into], start)
            if not count:
                raise self._damaged(f"ends at byte {start:,}")
            into, start = into[count:], start + count

    def read(self, start: int, saved: Rect, dtype: torch.dtype, into: Tensor, place: Rect, buffer: Tensor) -> None:
        """Read a part of a saved rectangle.

        Args:
            start: byte at which the saved rectangle begins.
            saved: which part of the tensor it is.
            dtype: of the saved values.
            into: a matrix of any dtype, on any device.
            place: which part of the tensor the matrix is, inside of ``saved``.
            buffer: (n,) uint8 on the CPU, for values that cannot be read in place. At least a row of ``saved``.
        """
        row_bytes = saved.cols * dtype.itemsize
        start += (place.row_start - saved.row_start) * row_bytes
        if into.device.type == "cpu" and into.dtype == dtype and into.is_contiguous() and place.cols == saved.cols:
            self._read(as_bytes(into).data, start)
            return
        for part in into.split(buffer.numel() // row_bytes):
            block = buffer[: len(part) * row_bytes]
            self._read(block.numpy().data, start)
            part.copy_(block.view(dtype).view(len(part), saved.cols)[:, place.cols_in(saved)])
            start += len(block)

    def rows(
        self, rows: SavedRows, saved: Rect, dtype: torch.dtype, place: Rect, buffer: Tensor
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """The numbers, counted from the first row of ``place``, and the values of some rows of the saved rectangle, as
        :meth:`read` takes it, in blocks: (n,) int64 and (n, columns) in ``buffer``."""
        row_bytes = saved.cols * dtype.itemsize
        wanted = place.rows_in(saved)
        begin, end = (
            bisect_left(range(rows.length), row, key=lambda number: int(self._numbers(rows, number, 1)))
            for row in (wanted.start, wanted.stop)
        )
        length = max(1, buffer.numel() // (row_bytes + 8))
        for first in range(begin, end, length):
            numbers = self._numbers(rows, first, min(length, end - first)) - wanted.start
            if not 0 <= int(numbers.min()) <= int(numbers.max()) < place.row_end - place.row_start:
                raise self._damaged(f"has numbers of rows at byte {rows.numbers:,} that do not ascend")
            block = buffer[: len(numbers) * row_bytes]
            self._read(block.numpy().data, rows.start + first * row_bytes)
            yield numbers, block.view(dtype).view(len(numbers), saved.cols)[:, place.cols_in(saved)]

    def _numbers(self, rows: SavedRows, first: int, count: int) -> Tensor:
        numbers = torch.empty(count, dtype=torch.int64)
        self._read(as_bytes(numbers).data, rows.numbers + 8 * first)
        return numbers


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with naming(folder):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)

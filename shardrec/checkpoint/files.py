"""Data files of a checkpoint: in the safetensors format, written, verified and read in blocks.

::

    8 bytes    header size
    header     JSON: name, dtype, shape and place of each tensor
    tensors    row-major, little-endian, one after the other
    ├ block 0 ──────┤├ block 1 ──────┤├ ...        16 MiB of the file each, with a CRC-32 each

The checksums are of the file's blocks, not of its tensors: so they cover the header, any rank can verify any block, and
W ranks verify a file of any size in 1/W of the time. Any change inside a run of 32 bits is found for certain, others
with a probability of 1 - 2^-32 per block. zlib's CRC-32 was the fastest checksum in Python's library (2.5 GiB/s on a
core; SHA-256 with the processor's instructions 1.4, BLAKE2b 0.6).

Values go from a tensor's memory to the file and back without a copy where they lie in one piece on the CPU; else
through one block's worth of memory.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from shardrec.checkpoint.parts import Rect, as_matrix
from shardrec.errors import CheckpointError

__all__ = ["BLOCK_BYTES", "DTYPES", "NamedTensor", "SavedFile", "read_rows", "sync_folder", "verify", "write_file"]

BLOCK_BYTES = 16 * 2**20

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

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True, kw_only=True)
class SavedFile:
    """A data file.

    Args:
        name: inside the data folder.
        size: bytes.
        checksums: CRC-32 of each block.
    """

    name: str
    size: int
    checksums: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class NamedTensor:
    """What a file holds one of.

    Args:
        name: in the file.
        shape: in the file.
        values: as many, on any device.
    """

    name: str
    shape: tuple[int, ...]
    values: Tensor


class _Writer:
    """Counts and sums what is written."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.size = 0
        self.checksums: list[int] = []

    def write(self, data: memoryview) -> None:
        while data:
            if self.size % BLOCK_BYTES == 0:
                self.checksums.append(0)
            part = data[: BLOCK_BYTES - self.size % BLOCK_BYTES]
            self.checksums[-1] = zlib.crc32(part, self.checksums[-1])
            self._file.write(part)
            self.size += len(part)
            data = data[len(part) :]


def write_file(path: Path, tensors: Sequence[NamedTensor]) -> tuple[SavedFile, list[int]]:
    """Write a new file and wait until it is on the disk.

    Returns:
        The file, and where in it each tensor starts, in bytes.
    """
    header: dict[str, object] = {}
    start = 0
    for tensor in tensors:
        end = start + tensor.values.nbytes
        header[tensor.name] = {
            "dtype": _NAMES[tensor.values.dtype],
            "shape": tensor.shape,
            "data_offsets": [start, end],
        }
        start = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    starts = []
    with path.open("xb") as file:
        writer = _Writer(file)
        writer.write(memoryview(struct.pack("<Q", len(text)) + text))
        for tensor in tensors:
            starts.append(writer.size)
            for part in _chunks(tensor.values):
                writer.write(part)
        file.flush()
        os.fsync(file.fileno())
    sync_folder(path.parent)
    return SavedFile(name=path.name, size=writer.size, checksums=tuple(writer.checksums)), starts


def _chunks(values: Tensor) -> Iterator[memoryview]:
    """The bytes of a tensor, row-major, in parts of a block or so."""
    matrix = as_matrix(values)
    if not matrix.numel():
        return
    rows = max(1, BLOCK_BYTES // (matrix.size(1) * matrix.itemsize))
    for part in matrix.split(rows):
        yield part.cpu().contiguous().view(torch.uint8).numpy().data.cast("B")


def verify(descriptor: int, path: Path, file: SavedFile, blocks: range) -> None:
    """Compare some blocks of a file with their checksums.

    Raises:
        CheckpointError: naming the file, and where in it the damage is.
    """
    buffer = memoryview(bytearray(min(BLOCK_BYTES, file.size)))
    for block in blocks:
        start = block * BLOCK_BYTES
        part = buffer[: min(BLOCK_BYTES, file.size - start)]
        _read(descriptor, path, part, start)
        if zlib.crc32(part) != file.checksums[block]:
            raise CheckpointError(
                f"{path} is damaged: bytes {start:,} to {start + len(part):,} are not what was written; load an older "
                "checkpoint, or copy this one again from where it is whole"
            )


def _read(descriptor: int, path: Path, into: memoryview, start: int) -> None:
    while into:
        count = os.preadv(descriptor, [into], start)
        if not count:
            raise CheckpointError(
                f"{path} ends at byte {start:,}, before what the manifest says; load an older checkpoint, or copy this "
                "one again from where it is whole"
            )
        into, start = into[count:], start + count


def read_rows(
    descriptor: int,
    path: Path,
    start: int,
    saved: Rect,
    dtype: torch.dtype,
    target: Tensor,
    place: Rect,
    buffer: Tensor,
) -> None:
    """Read what a saved rectangle and a target have in common.

    Args:
        descriptor: of the open file.
        path: for messages.
        start: byte at which the saved rectangle begins.
        saved: which part of the tensor it is.
        dtype: of the saved values.
        target: gets them, in its own dtype and on its own device; a matrix.
        place: which part of the tensor ``target`` is.
        buffer: (BLOCK_BYTES,) uint8 on the CPU, for what cannot be read in place.
    """
    common = saved.common(place)
    if common is None:
        return
    row_bytes = saved.cols * dtype.itemsize
    start += (common.row_start - saved.row_start) * row_bytes
    into = target[
        common.row_start - place.row_start : common.row_end - place.row_start,
        common.col_start - place.col_start : common.col_end - place.col_start,
    ]
    if into.device.type == "cpu" and into.dtype == dtype and into.is_contiguous() and common.cols == saved.cols:
        _read(descriptor, path, into.view(torch.uint8).numpy().data.cast("B"), start)
        return
    if row_bytes > buffer.numel():
        buffer = torch.empty(row_bytes, dtype=torch.uint8)
    columns = slice(common.col_start - saved.col_start, common.col_end - saved.col_start)
    for part in into.split(buffer.numel() // row_bytes):
        block = buffer[: len(part) * row_bytes]
        _read(descriptor, path, block.numpy().data, start)
        part.copy_(block.view(dtype).view(len(part), saved.cols)[:, columns])
        start += len(block)


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

"""Rows of a table in a file of Parquet or NumPy, by id, which are read as a data file of a checkpoint is.

A Parquet file has the ids in its first column, and in the others the rows: a column of lists, or a column for each
value. An ``.npz`` archive has arrays ``ids`` (n,) and ``rows`` (n, columns); of an ``.npy`` array (n, columns) the id
of a row is its number.
"""

from __future__ import annotations

import os
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import IO, TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shardrec.checkpoint.data_files import BLOCK_BYTES, OpenFile
from shardrec.checkpoint.parts import Rect
from shardrec.errors import ConfigError
from shardrec.files import open_regular

if TYPE_CHECKING:
    import pyarrow as pa

Rows = NDArray[np.float32] | NDArray[np.int64]
"""(n, columns) of a table, or of the records of its ids."""

_NONE: Rows = np.empty(0, np.float32)

_FORMS = (
    "give Parquet with the ids in the first column and a list, or a column for each value, after it; .npz with ids "
    "(n,) and rows (n, columns); or .npy (n, columns)"
)
_DAMAGE = (ArithmeticError, EOFError, LookupError, OSError, RuntimeError, ValueError, zipfile.BadZipFile, zlib.error)


class RowFile(OpenFile):
    """A matrix that takes the place of a data file. Its blocks are read forwards.

    Args:
        path: for messages.
        shape: n rows, and columns.
        blocks: begins to read it. Writable blocks of at most 16 MiB, or one row.

    Attributes:
        targets: (n,) int64, the row of the saved rectangle that each is, or negative. None for their own numbers.
        checksum: of the ids.
    """

    targets: Tensor | None = None
    checksum = ""

    def __init__(self, path: str, shape: tuple[int, int], blocks: Callable[[], Iterator[Rows]]) -> None:
        self.path, self.shape, self._blocks = path, shape, blocks
        self._reading: Iterator[Rows] = iter(())
        self._at, self._rest = shape[0], _NONE

    def read(self, start: int, saved: Rect, dtype: torch.dtype, into: Tensor, place: Rect, buffer: Tensor) -> None:
        first, end = (place.row_start, place.row_end) if self.targets is None else (0, self.shape[0])
        for at, block in self._between(first, end):
            rows = torch.arange(at, at + len(block)) if self.targets is None else self.targets[at : at + len(block)]
            mine = ((rows >= place.row_start) & (rows < place.row_end)).nonzero().squeeze(1)
            values = torch.from_numpy(block)[mine, place.cols_in(saved)]
            into[(rows[mine] - place.row_start).to(into.device)] = values.to(into.device, into.dtype)

    def check(self, start: int, end: int) -> None:
        """Raise a ConfigError if a row cannot be read, or has a value that is not a finite float32."""
        for at, block in self._between(start, end):
            for row, column in np.argwhere(~np.isfinite(block))[:1].tolist():
                value = f"row {at + row} of {self.path} has {block[row, column]} in column {column}"
                raise ConfigError(f"{value}: write finite numbers")

    def _between(self, start: int, end: int) -> Iterator[tuple[int, Rows]]:
        """Blocks of rows, each with the number of its first."""
        if start < self._at:
            self._reading, self._at, self._rest = self._blocks(), 0, _NONE
        while self._at < end:
            if not len(self._rest):
                with _readable(self.path):
                    self._rest = next(self._reading, self._rest)
                    if not len(self._rest):
                        raise ValueError(f"it ends at row {self._at}")
            block, left = self._rest[: end - self._at], max(0, start - self._at)
            if left < len(block):
                yield self._at + left, block[left:]
            self._at, self._rest = self._at + len(block), self._rest[len(block) :]


def open_rows(path: str, stack: ExitStack) -> tuple[RowFile, pa.Array]:
    """Open a file of rows.

    Returns:
        The file, and its ids, a ``pyarrow.Array`` (n,).

    Raises:
        ConfigError: if it cannot be opened, is not such a file, or has an id twice.
    """
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    with _readable(path):
        file = stack.enter_context(os.fdopen(open_regular(path), "rb"))
        if path.endswith((".parquet", ".pq")):
            parquet = pq.ParquetFile(file, page_checksum_verification=True)
            kinds = parquet.schema_arrow
            ids = parquet.read(columns=kinds.names[:1]).column(0).combine_chunks()
            ids = ids.dictionary_decode() if pa.types.is_dictionary(ids.type) else ids
            columns, is_list = kinds.names[1:], len(kinds) == 2 and pa.types.is_nested(kinds.field(1).type)
            width = len(columns)
            if is_list:
                width = next((len(batch[0][0]) for batch in parquet.iter_batches(1, columns=columns)), 0)
            many = max(1, BLOCK_BYTES // (4 * max(1, width)))

            def blocks() -> Iterator[Rows]:
                for batch in parquet.iter_batches(many, columns=columns, use_threads=False):
                    lists = batch.column(0)
                    if is_list and not (pc.list_value_length(lists).to_numpy(zero_copy_only=False) == width).all():
                        raise ValueError(f"its lists have other lengths than {width}")
                    numbers = [lists.flatten()] if is_list else batch.columns
                    arrays = [np.array(array.to_numpy(zero_copy_only=False), np.float32) for array in numbers]
                    yield arrays[0].reshape(-1, width) if is_list else np.column_stack(arrays)

            return RowFile(path, (len(ids), width), blocks), _once(ids)
        ids = None
        if path.endswith(".npz"):
            archive = stack.enter_context(zipfile.ZipFile(file))
            with archive.open("ids.npy") as stream:
                ids = pa.array(np.lib.format.read_array(stream, allow_pickle=False))
            opened: Callable[[], IO[bytes]] = partial(archive.open, "rows.npy")
        elif path.endswith(".npy"):

            def opened() -> IO[bytes]:
                file.seek(0)
                return file

        else:
            raise ValueError("its name says no format")
        shape = _header(opened())[0]
        if len(shape) != 2 or (ids is not None and len(ids) != shape[0]):
            raise ValueError(f"its rows have shape {shape}" + (f", for {len(ids)} ids" if ids is not None else ""))
        ids = pa.array(np.arange(shape[0])) if ids is None else _once(ids)
    return RowFile(path, (shape[0], shape[1]), lambda: _array_blocks(opened())), ids


def _once(ids: pa.Array) -> pa.Array:
    """The ids, if none is there twice."""
    import pyarrow.compute as pc

    counts = ids.drop_null().value_counts()
    repeated = counts.filter(pc.greater(counts.field("counts"), 1))
    if len(repeated):
        raise ValueError(f"it has id {repeated[0]['values'].as_py()!r} twice")
    return ids


def _array_blocks(stream: IO[bytes]) -> Iterator[Rows]:
    (_, width), dtype = _header(stream)
    row_bytes = width * dtype.itemsize
    while data := stream.read(row_bytes * max(1, BLOCK_BYTES // (row_bytes + 4 * width))):
        yield np.frombuffer(data, dtype).reshape(-1, width).astype(np.float32)


def _header(stream: IO[bytes]) -> tuple[tuple[int, ...], np.dtype[np.generic]]:
    version = np.lib.format.read_magic(stream)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, by_column, dtype = read(stream)
    if by_column or dtype.kind not in "fiu":
        raise ValueError(f"its rows are of {dtype}, by {'column' if by_column else 'row'}, not numbers by row")
    return shape, dtype


@contextmanager
def _readable(path: str) -> Iterator[None]:
    """Inside, what a reader says of a file becomes a ConfigError."""
    try:
        with np.errstate(over="ignore"):
            yield
    except _DAMAGE as error:
        reason = (getattr(error, "strerror", None) or str(error) or type(error).__name__).splitlines()[0]
        raise ConfigError(f"rows of a table cannot be read from {path} ({reason}): {_FORMS}") from error

"""``convert``: a file's columns as Parquet with row groups small enough to be dealt to ranks, checked after writing."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from shardrec import DataError
from shardrec.files import replacing
from shardrec.trainer.data.arrays import is_null, plain_column
from shardrec.trainer.data.spec import FeatureSpec
from shardrec.trainer.data.tables import check_file, counted, read_blocks

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["convert"]


def convert(
    source: str, spec: FeatureSpec, target: Path, *, columns: Sequence[str] = (), group_rows: int = 65_536
) -> tuple[int, str]:
    """Write a file's rows as Parquet, a row group at a time; texts stay texts, and rows bit-identical to train on.

    The file appears under its name when it is complete, and when its rows, read again, have the checksum of those read.

    Args:
        source: the file, of any format that is read.
        spec: whose columns are written.
        target: the file to write.
        columns: of the source, to write with those of the spec.
        group_rows: rows of a row group.

    Returns:
        The number of rows, and their checksum, which is also in the file's metadata (``shardrec.checksum``).

    Raises:
        DataError: for a row that cannot be read, or a file that did not come out as it was written.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    def tables() -> Iterator[pa.Table]:
        info = counted(check_file(source, spec), spec)
        for group in range(len(info.groups)):
            for block in read_blocks(info, spec, group=group, columns=columns):
                for number, fault in block.faults.items():
                    raise DataError(f"{source}:{number + info.first_line}: {fault}")
                columns_of = zip(block.table.schema.names, block.table.columns, strict=True)
                yield pa.table({name: plain_column(column) for name, column in columns_of})

    read, written, rows = _Checksum(), _Checksum(), 0
    with replacing(target) as partial:
        iterator = tables()
        waiting = next(iterator, None)
        if waiting is None:
            raise DataError(f"data file {source} has no rows: leave it out")
        with pq.ParquetWriter(partial, waiting.schema, compression="zstd") as writer:
            for table in chain([waiting], iterator):
                read.add(table)
                waiting = pa.concat_tables([waiting, table]) if rows else table
                rows += len(table)
                full = len(waiting) - len(waiting) % group_rows
                if full:
                    writer.write_table(waiting.slice(0, full), row_group_size=group_rows)
                    waiting = waiting.slice(full)
            if len(waiting):
                writer.write_table(waiting, row_group_size=group_rows)
            writer.add_key_value_metadata({"shardrec.checksum": str(read)})
        with pq.ParquetFile(partial) as file:
            for batch in file.iter_batches():
                written.add(batch)
        if str(written) != str(read):
            raise DataError(f"{target} has checksum {written} where {source} has {read}: check the disk, and try again")
    return rows, str(read)


class _Checksum:
    """CRC-32 of the values of a table's columns, whatever blocks they come in."""

    def __init__(self) -> None:
        self._sums: dict[tuple[str, int], int] = {}

    def add(self, table: pa.Table | pa.RecordBatch) -> None:
        for name in table.schema.names:
            column = table[name]
            for chunk in getattr(column, "chunks", [column]):
                for number, data in enumerate(_parts_of(chunk)):
                    self._sums[name, number] = zlib.crc32(data, self._sums.get((name, number), 0))

    def __str__(self) -> str:
        return f"{zlib.crc32(repr(sorted(self._sums.items())).encode()):08x}"


def _parts_of(array: pa.Array) -> Iterator[bytes]:
    """Bytes of an array, in parts that can each be joined to those of the array after it."""
    import pyarrow as pa
    import pyarrow.compute as pc

    yield is_null(array).tobytes()
    if pa.types.is_nested(array.type):
        yield np.asarray(pc.list_value_length(array).fill_null(0).to_numpy(zero_copy_only=False), np.int64).tobytes()
        yield from _parts_of(array.flatten())
        return
    texts = array.cast(pa.large_string()) if not pa.types.is_binary(array.type) else array.cast(pa.large_binary())
    yield np.asarray(pc.binary_length(texts).fill_null(0).to_numpy(zero_copy_only=False), np.int64).tobytes()
    yield b"".join(value.as_buffer() for value in texts.drop_null())

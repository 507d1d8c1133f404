"""Files of other formats as Parquet, which alone is read to train, evaluate and predict.

::

    ratings.csv ──formats.read_rows──► out/rows/ratings.csv-5f0c….parquet ──tables.read_blocks──► rows
    clicks.parquet ───────────────────────────────────────────────────────tables.read_blocks──► rows

A converted file is named for what it depends on: the name, size and time of its source, what the spec says of the
file's form and columns, and the version of the rules. One that is there is not made again. A row that cannot be parsed
has its place in the file, and its fault in a column of its own.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from shardrec import DataError
from shardrec.files import replacing
from shardrec.trainer.data.arrays import plain_column
from shardrec.trainer.data.fault import RowFault
from shardrec.trainer.data.formats import file_kind, read_rows, undamaged
from shardrec.trainer.data.spec import FeatureSpec
from shardrec.trainer.data.tables import FAULT, FileInfo, check_file, parquet_info, read_blocks
from shardrec.trainer.data.urls import path_of, stamp

if TYPE_CHECKING:
    import pyarrow as pa

_VERSION = 1
"""Of the form of converted files. Files of another are made again."""

_FORM = ("columns", "delimiter", "quoted", "encoding", "decimal", "missing", "rules", "sources")
"""What of a spec a converted file depends on."""


def counted(
    info: FileInfo, spec: FeatureSpec, folder: Path, progress: Callable[[int], object] = lambda count: None
) -> FileInfo:
    """What is known of a file and its rows, those of another format than Parquet as Parquet in a folder.

    Raises:
        DataError: for a file that is damaged, or changes meanwhile.
    """
    if info.parquet or info.lost or file_kind(info.path) == "kafka":
        return info
    target = folder / _name(info.path, spec)
    if not target.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        convert(info.path, spec, target, keep_faults=True, progress=progress)
        if target != folder / _name(info.path, spec):
            target.unlink()
            raise DataError(f"data file {info.path} has changed while it was read: let nothing write to it")
    kept = {name: getattr(info, name) for name in ("kinds", "partitions", "first_line")}
    return replace(parquet_info(str(target), info.path), **kept)


def _name(path: str, spec: FeatureSpec) -> str:
    form = {name: getattr(spec, name) for name in _FORM}
    digest = sha256(json.dumps([_VERSION, path, *stamp(path), form]).encode()).hexdigest()
    return f"{Path(path_of(path)).name}-{digest[:16]}.parquet"


def convert(
    source: str,
    spec: FeatureSpec,
    target: Path,
    *,
    columns: Sequence[str] = (),
    group_rows: int = 65_536,
    keep_faults: bool = False,
    progress: Callable[[int], object] = lambda count: None,
) -> int:
    """Write a file's rows as Parquet, a row group at a time. Texts stay texts, and rows bit-identical to train on.

    The file appears under its name when it is complete. Its pages have checksums, which readers compare.

    Args:
        source: the file, of any format that is read.
        spec: whose columns are written.
        target: the file to write.
        columns: of the source, to write with those of the spec.
        group_rows: rows of a row group.
        keep_faults: whether a row that cannot be parsed is written with its fault, in place of an error. Columns that
            the names of the source's folders give are then left out.
        progress: is told of bytes that were read.

    Returns:
        The number of rows.

    Raises:
        DataError: for a row or a file that cannot be read.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    info = check_file(source, spec)
    names = [name for name in dict.fromkeys([*spec.sources, *columns]) if name not in info.partitions]
    waiting: list[pa.Table] = []
    rows, writer = 0, None
    with replacing(target) as partial, ExitStack() as stack:
        for table, faults in _tables(info, spec, names, progress):
            for place, fault in faults.items() if not keep_faults else ():
                raise DataError(f"{source}:{rows + place + info.first_line}: {fault}")
            if keep_faults:
                table = _with_faults(table, faults)
            for name, value in info.partitions.items() if not keep_faults else ():  # which the target's folders lack
                table = table.append_column(name, pa.repeat(pa.scalar(value, pa.string()), len(table)))
            if writer is None:
                options = {"compression": "lz4", "dictionary_pagesize_limit": 1 << 18, "write_page_checksum": True}
                writer = stack.enter_context(pq.ParquetWriter(partial, table.schema, **options))
            waiting.append(table)
            rows += len(table)
            count = sum(map(len, waiting))
            if count >= group_rows:
                whole = pa.concat_tables(waiting)
                writer.write_table(whole.slice(0, count - count % group_rows), row_group_size=group_rows)
                waiting = [whole.slice(count - count % group_rows)]
        if writer is None or not (rows or keep_faults):
            raise DataError(f"data file {source} has no rows: leave it out")
        if any(map(len, waiting)):
            writer.write_table(pa.concat_tables(waiting), row_group_size=group_rows)
    return rows


def _tables(
    info: FileInfo, spec: FeatureSpec, names: Sequence[str], progress: Callable[[int], object]
) -> Iterator[tuple[pa.Table, Mapping[int, RowFault]]]:
    import pyarrow as pa

    if not info.parquet:
        with undamaged(info.path):
            yield from read_rows(info.path, spec, names, progress)
        return
    for group in range(len(info.groups)):
        for block in read_blocks(info, spec, group=group, columns=names):
            columns = zip(block.table.schema.names, block.table.columns, strict=True)
            table = pa.table({name: plain_column(column) for name, column in columns})
            yield table, {number - block.first: fault for number, fault in block.faults.items()}


def _with_faults(table: pa.Table, faults: Mapping[int, RowFault]) -> pa.Table:
    """All rows in their order, with the column of their faults. The others' columns are null."""
    import pyarrow as pa

    if not faults:
        return table.append_column(FAULT, pa.nulls(len(table), pa.string()))
    texts = np.full(len(table) + len(faults), None)
    texts[list(faults)] = [json.dumps([fault.where, fault.remedy]) for fault in faults.values()]
    is_good = texts == None  # noqa: E711  # of each value
    table = table.take(pa.array(np.cumsum(is_good) - 1, mask=~is_good))
    return table.append_column(FAULT, pa.array(texts, pa.string()))

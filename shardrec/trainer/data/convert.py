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
from contextlib import closing
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from shardrec import DataError
from shardrec.files import replacing
from shardrec.trainer.data.arrays import finite_numbers, is_text, plain, plain_column, whole_numbers
from shardrec.trainer.data.fault import RowFault
from shardrec.trainer.data.formats import file_kind, read_rows, undamaged
from shardrec.trainer.data.spec import FeatureSpec
from shardrec.trainer.data.tables import FAULT, FileInfo, check_file, parquet_info, read_blocks
from shardrec.trainer.data.urls import path_of, stamp

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

_VERSION = 2
"""Of the form of converted files. Files of another are made again."""

_Cast: TypeAlias = "Callable[[pa.Array], pa.Array | None]"

_CASTS: Mapping[str, Sequence[_Cast]] = {
    "ids": [whole_numbers],
    "numbers": [whole_numbers, finite_numbers],
    "texts": [],
}
"""What a column's texts may become in a converted file, by their form in a spec."""

_FORM = ("columns", "delimiter", "quoted", "encoding", "decimal", "missing", "rules", "forms")
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
    converted = parquet_info(str(target), info.path)
    return replace(
        converted, kinds={**converted.kinds, **info.kinds}, partitions=info.partitions, first_line=info.first_line
    )


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

    info = check_file(source, spec)
    names = [name for name in dict.fromkeys([*spec.sources, *columns]) if name not in info.partitions]
    casts = {name: [*_CASTS[form]] for name, form in spec.forms.items()}
    rows = 0
    with replacing(target) as partial, closing(_RowGroups(partial, group_rows, typed=keep_faults)) as groups:
        for table, faults in _tables(info, spec, names, progress):
            for place, fault in faults.items() if not keep_faults else ():
                raise DataError(f"{source}:{rows + place + info.first_line}: {fault}")
            if keep_faults:
                table = _with_faults(_typed(table, casts), faults)
            for name, value in info.partitions.items() if not keep_faults else ():  # which the target's folders lack
                table = table.append_column(name, pa.repeat(pa.scalar(value, pa.string()), len(table)))
            groups.add(table)
            rows += len(table)
        if not (rows or keep_faults):
            raise DataError(f"data file {source} has no rows: leave it out")
        groups.end()
    return rows


class _RowGroups:
    """Writes tables to a file of Parquet.

    Where a table has texts in a column of numbers, the numbers before them become texts: row groups are written again.

    Args:
        path: the file.
        rows: of a row group.
        typed: whether columns of numbers are written in the form that is read the fastest.
    """

    def __init__(self, path: Path, rows: int, *, typed: bool) -> None:
        self._path, self._rows, self._typed = path, rows, typed
        self._waiting: pa.Table | None = None
        self._writer: pq.ParquetWriter | None = None

    def add(self, table: pa.Table) -> None:
        import pyarrow as pa

        if self._waiting is not None:
            schema = _wider(self._waiting.schema, table.schema)
            table = pa.concat_tables([each.cast(schema, safe=False) for each in (self._waiting, table)])
        whole = len(table) - len(table) % self._rows
        self._waiting = table.slice(whole)
        if whole:
            self._write(table.slice(0, whole))

    def end(self) -> None:
        """Write the rows that are left."""
        if self._waiting is not None:
            self._write(self._waiting)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()

    def _write(self, table: pa.Table) -> None:
        import pyarrow.parquet as pq

        if self._writer is not None and self._writer.schema != table.schema:
            self._writer.close()
            with pq.ParquetFile(self._path) as former:
                self._path.unlink()  # and is read to its end
                self._writer = self._opened(table.schema)
                for group in range(former.num_row_groups):
                    rows = former.read_row_group(group).cast(table.schema, safe=False)
                    self._writer.write_table(rows, row_group_size=self._rows)
        self._writer = self._writer or self._opened(table.schema)
        if len(table):
            self._writer.write_table(table, row_group_size=self._rows)

    def _opened(self, schema: pa.Schema) -> pq.ParquetWriter:
        import pyarrow.parquet as pq

        options: dict[str, Any] = {"compression": "lz4"}
        if self._typed:
            numbers = {"int64": "DELTA_BINARY_PACKED", "double": "PLAIN"}
            encodings = {field.name: numbers[str(field.type)] for field in schema if str(field.type) in numbers}
            others = [leaf for name in schema.names if name not in encodings for leaf in (name, f"{name}.list.element")]
            options = {"compression": dict.fromkeys(others, "lz4"), "use_dictionary": others}
            options["column_encoding"] = encodings
        options |= {"dictionary_pagesize_limit": 1 << 18, "write_page_checksum": True}
        return pq.ParquetWriter(self._path, schema, **options)


def _wider(schema: pa.Schema, other: pa.Schema) -> pa.Schema:
    """The schema with the wider one of two types where they differ."""
    import pyarrow as pa

    order = [pa.int64(), pa.float64(), pa.string()]
    pairs = zip(schema, other, strict=True)
    fields = [one if one == two else max(one, two, key=lambda field: order.index(field.type)) for one, two in pairs]
    return pa.schema(fields)


def _typed(table: pa.Table, casts: Mapping[str, list[_Cast]]) -> pa.Table:
    """The table with numbers in place of their texts. A cast that fails is not tried again for the column."""
    for place, name in enumerate(table.column_names):
        while casts[name] and is_text(table[name].type):
            numbers = casts[name][0](plain(table[name]))
            if numbers is None:
                del casts[name][0]
            else:
                table = table.set_column(place, name, numbers)
    return table


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

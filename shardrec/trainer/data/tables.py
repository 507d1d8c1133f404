"""The rows of one file of Parquet, block by block, as Arrow tables.

A file in a folder such as ``day=2026-11-28/country=de`` has ``day`` and ``country`` as columns, too, if its own do not
include them (Hive's partitions).
"""

from __future__ import annotations

import json
import warnings
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING
from urllib.parse import unquote

import numpy as np
from numpy.typing import NDArray

from shardrec import DataError
from shardrec.files import UnreachableError
from shardrec.trainer.data.arrays import mask, values_of
from shardrec.trainer.data.encode import column_fault
from shardrec.trainer.data.fault import Reason, RowFault
from shardrec.trainer.data.formats import columns_of, file_kind, undamaged
from shardrec.trainer.data.spec import FeatureSpec
from shardrec.trainer.data.urls import open_input, path_of

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

FAULT = "shardrec_fault"
"""The column of a converted file that says why a row could not be parsed, and what to do, as JSON; else null."""

_ROWS_AT_ONCE = 16_384
_BUFFER_BYTES = 1 << 16
_NO_PARTITION = "__HIVE_DEFAULT_PARTITION__"


class _EmptyFileError(DataError):
    """A file has no bytes."""


class MissingColumnsError(DataError):
    """A file lacks columns that are to be read."""


@dataclass(frozen=True, kw_only=True)
class FileInfo:
    """What is known of a file before its rows are read.

    Attributes:
        path: its name.
        size: bytes.
        parquet: the file of Parquet that is read: the same, or what it is converted to; "" while it is not.
        digest: checksum of Parquet's footer; "" while the file is not converted.
        groups: rows of each row group, broken ones included.
        kinds: what the values of each column are, of a file of Parquet; "" for nulls only.
        partitions: columns that the names of its folders give, and their values. None for a missing one.
        missing: nulls per column, as far as the footer tells.
        first_line: the record of row 0; 1 for Parquet and archives, whose rows are counted.
        lost: why none of the rows can be read; "" if they can.
    """

    path: str
    size: int
    parquet: str = ""
    digest: str = ""
    groups: tuple[int, ...] = ()
    kinds: Mapping[str, str]
    partitions: Mapping[str, str | None] = field(default_factory=dict)
    missing: Mapping[str, int] = field(default_factory=dict)
    first_line: int = 1
    lost: str = ""

    def place(self, row: int, group: int = 0) -> str:
        """Where a row is, for a message."""
        many = self.parquet == self.path and len(self.groups) > 1
        return f"{self.path}:" + (f" row group {group}, row " if many else "") + str(row + self.first_line)


@dataclass(frozen=True, kw_only=True, eq=False)
class TableBlock:
    """Rows of a file.

    Attributes:
        table: N rows.
        numbers: int64 (N,), the number of each among the file's rows, from 0. Broken ones are counted too.
        faults: of rows that are not in the table, by their number.
        first: number of the block's first row.
        stop: number of the row after its last one.
    """

    table: pa.Table | pa.RecordBatch
    numbers: NDArray[np.int64]
    faults: dict[int, RowFault]
    first: int
    stop: int


def check_file(path: str, spec: FeatureSpec) -> FileInfo:
    """Check that a file is there and has the columns, from its first bytes or footer only.

    Returns:
        What the first bytes or the footer tell. Only of Parquet the rows.

    Raises:
        DataError: naming all that is wrong.
        UnreachableError: if it cannot be read now.
    """
    kind = file_kind(path)
    try:
        with open_input(path) as file:
            size = file.size()
            file.read(1)  # so that a failure to read is not taken for a damaged file
        if not size:
            raise _EmptyFileError(f"data file {path} is empty: copy or write it again")
        if kind == "parquet":
            info, schema = parquet_info(path, path), _footer(path, _footer_digest(path))[2]
            names = schema.names
        else:
            info = FileInfo(path=path, size=size, kinds={}, first_line=2 if kind == "text" and not spec.columns else 1)
            with undamaged(path):
                names, schema = columns_of(path, spec)
    except OSError as error:
        raise UnreachableError(f"data file {path} cannot be read ({error}): give a file that can") from error
    partitions = {
        name: value for name, value in _partitions(path).items() if name in spec.sources and name not in names
    }
    of_spec = {*spec.label_sources, spec.group, spec.event_time, *spec.feature_sources}
    missing = [name for name in spec.sources if name not in names and name not in partitions]
    faults = []
    for lacks, remedy in (
        (
            [name for name in missing if name in of_spec],
            "name the file's column in the spec (column:), or, for a finished run, rename it in the file",
        ),
        ([name for name in missing if name not in of_spec], "leave it out of the keys (--keys)"),
    ):
        if lacks:
            more = f" and {len(lacks) - 3} more" * (len(lacks) > 3)
            are = "s {} are" if len(lacks) > 1 else " {} is"
            faults.append(f"column{are.format(', '.join(map(repr, lacks[:3])) + more)} missing: {remedy}")
    twice = [name for name in spec.sources if names.count(name) > 1]
    faults += [f"there are several columns {name!r}: rename or remove all but one" for name in twice]
    types = {} if schema is None else {name: schema.field(name).type for name in spec.sources if names.count(name) == 1}
    for name, of_column in types.items():
        if remedy := column_fault(of_column, name, spec):
            faults.append(f"column {name!r} has type {of_column}: {remedy}")
    if faults:
        shown = f" (columns {', '.join(names[:50])}{', ...' * (len(names) > 50)})" * bool(missing)
        text = f"data file {path}{shown}: " + "; ".join(faults)
        raise MissingColumnsError(text) if missing else DataError(text)
    kinds = {name: values_of(of_column) for name, of_column in types.items()} | dict.fromkeys(partitions, "texts")
    return replace(info, kinds=kinds, partitions=partitions)


def check_part(path: str, spec: FeatureSpec) -> FileInfo:
    """:func:`check_file` of one of several files, of which those without bytes have no rows."""
    try:
        return check_file(path, spec)
    except _EmptyFileError:
        warnings.warn(f"data file {path} is empty, and is left out", stacklevel=2)
        return FileInfo(path=path, size=0, parquet=path, kinds={})


def parquet_info(parquet: str, path: str) -> FileInfo:
    """What the footer of a file of Parquet tells, which has the rows of the file ``path``."""
    digest = _footer_digest(parquet)
    metadata, leaves, schema = _footer(parquet, digest)
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    missing = dict.fromkeys((leaf for leaf in leaves if "." not in leaf), 0)
    for group in groups:
        for number, leaf in enumerate(leaves):
            statistics = group.column(number).statistics if leaf in missing else None
            missing[leaf] = missing.get(leaf, 0) + (statistics.null_count or 0 if statistics is not None else 0)
    broken = metadata.num_rows - missing.pop(FAULT, metadata.num_rows)
    return FileInfo(
        path=path,
        size=int(digest.partition("-")[0]),
        parquet=parquet,
        digest=digest if parquet == path else f"{digest}-rows",
        groups=tuple(group.num_rows for group in groups),
        kinds={name: values_of(kind) for name, kind in zip(schema.names, schema.types, strict=True)},
        missing={name: count - broken for name, count in missing.items() if count > broken},
    )


def _partitions(path: str) -> dict[str, str | None]:
    """The columns that the names of a file's folders give."""
    pairs = (name.partition("=") for name in path_of(path).split("/")[:-1])
    return {name: None if value == _NO_PARTITION else unquote(value) for name, mark, value in pairs if mark and name}


def read_blocks(
    info: FileInfo,
    spec: FeatureSpec,
    *,
    group: int = 0,
    start: int = 0,
    part: float = 1.0,
    columns: Sequence[str] | None = None,
    skips: bool = False,
) -> Iterator[TableBlock]:
    """The rows of one row group of a file, in order.

    Args:
        info: of :func:`~shardrec.trainer.data.convert.counted`.
        spec: what the columns are.
        group: number of the row group.
        start: rows of it to leave out, which are decoded.
        part: of the usual size of a block.
        columns: to read. Default: those of the spec.
        skips: whether what follows in a file that is gone, damaged or changed is broken rows, in place of an error.

    Raises:
        DataError: for a file that is damaged, or has changed since it was counted.
    """
    import pyarrow as pa

    first = sum(info.groups[:group])
    seen, stop = first + start, first + info.groups[group]
    at_once, names = max(1, int(_ROWS_AT_ONCE * part)), spec.sources if columns is None else tuple(columns)
    try:
        if info.lost:
            raise DataError(info.lost)
        for table, broken in _row_group(info, spec, group, start, at_once, names):
            end = seen + table.num_rows + len(broken)
            if end > stop:
                raise _changed(info, f"it had {stop:,} rows up to here and now has more")
            faults = {seen + row: fault for row, fault in broken.items()}
            numbers = np.delete(np.arange(seen, end), list(broken))
            yield TableBlock(table=table, numbers=numbers, faults=faults, first=seen, stop=end)
            seen = end
        if seen != stop:
            raise _changed(info, f"it had {stop:,} rows up to here and now has {seen}")
    except DataError as error:
        if not skips or not is_of_file(error):
            raise
        warnings.warn(f"rows of a file are left out: {error}", stacklevel=2)
        fault = RowFault(reason=Reason.DAMAGED, where=str(error), remedy="")
        empty = pa.table({name: pa.array([], pa.string()) for name in names})
        for first in range(seen, stop, _ROWS_AT_ONCE):
            faults = dict.fromkeys(range(first, end := min(first + _ROWS_AT_ONCE, stop)), fault)
            yield TableBlock(table=empty, numbers=np.zeros(0, np.int64), faults=faults, first=first, stop=end)


def rows_between(
    info: FileInfo, spec: FeatureSpec, ranges: Sequence[tuple[int, int]], *, skips: bool = False
) -> Iterator[TableBlock]:
    """A block of exactly the rows ``start`` to ``stop`` (not included), for each of some ascending ranges.

    ``skips`` is as for :func:`read_blocks`.

    Raises:
        DataError: for a file that is damaged, or has changed since it was counted.
    """
    import pyarrow as pa

    blocks = _rows_from(info, spec, ranges[0][0], skips)
    block = next(blocks, None)
    for start, stop in ranges:
        tables, numbers = [], [np.zeros(0, dtype=np.int64)]
        faults: dict[int, RowFault] = {}
        while block is not None:
            first, last = np.searchsorted(block.numbers, [start, stop])
            part = block.table.slice(first, last - first)
            tables.append(pa.Table.from_batches([part]) if isinstance(part, pa.RecordBatch) else part)
            numbers.append(block.numbers[first:last])
            faults |= {number: fault for number, fault in block.faults.items() if start <= number < stop}
            if block.stop >= stop:
                break
            block = next(blocks, None)
        yield TableBlock(
            table=pa.concat_tables([table for table in tables if len(table)] or tables[:1]),
            numbers=np.concatenate(numbers),
            faults=faults,
            first=start,
            stop=stop,
        )


def _rows_from(info: FileInfo, spec: FeatureSpec, first: int, skips: bool) -> Iterator[TableBlock]:
    """The rows of a file from one on, over its row groups."""
    for group, rows in enumerate(info.groups):
        if rows > first:
            yield from read_blocks(info, spec, group=group, start=max(0, first), skips=skips)
        first -= rows


def _row_group(
    info: FileInfo, spec: FeatureSpec, group: int, start: int, at_once: int, columns: Sequence[str]
) -> Iterator[tuple[pa.RecordBatch, dict[int, RowFault]]]:
    """Batches of the rows that could be read, each with the faults of the others by their place among both.

    What fails is read once more, for it may have been a network that did.
    """
    import pyarrow as pa

    of_texts = {feature.source for feature in spec.sparse if info.kinds.get(feature.source, "texts").endswith("texts")}
    has_failed = False
    while True:
        if _footer_digest(info.parquet) != info.digest.removesuffix("-rows"):
            raise _changed(info, "it has another footer")
        # A column of lists has values of a path like tags.list.element.
        footer, leaves, schema = _footer(info.parquet, info.digest.removesuffix("-rows"))
        texts = [leaf for leaf in leaves if leaf in of_texts or leaf.rsplit(".", 2)[0] in of_texts]
        names = [name for name in (*columns, FAULT) if name in schema.names]
        with _parquet(info.parquet, texts, footer) as file:
            stop = 0
            try:
                batches = file.iter_batches(at_once, row_groups=[group], columns=names, use_threads=False)
                for batch in batches:
                    first, stop = stop, stop + batch.num_rows
                    if start < stop:
                        yield _with_partitions(*_unparsed(batch.slice(start - first)), info, columns)
                        start, has_failed = stop, False
                return
            except MemoryError as error:  # which says nothing of the file
                raise DataError(
                    f"data file {info.path}: no memory to read it ({error}): give the ranks more"
                ) from error
            except (pa.ArrowException, OSError) as error:
                if has_failed:
                    row = sum(info.groups[:group]) + start
                    reason = (str(error) or type(error).__name__).splitlines()[0]
                    raise DataError(
                        f"{info.place(row, group)}: the file is damaged from here to the end of its row group "
                        f"({reason}); copy the file again, as it was, or leave such rows out (--on-bad-row skip)"
                    ) from error
                has_failed = True


def _unparsed(batch: pa.RecordBatch) -> tuple[pa.RecordBatch, dict[int, RowFault]]:
    """The rows of a batch of a converted file that could be parsed, and the faults of the others."""
    if FAULT not in batch.schema.names:
        return batch, {}
    texts, batch = batch.column(FAULT), batch.drop_columns(FAULT)
    if texts.null_count == len(texts):
        return batch, {}
    faults = {}
    for row in np.flatnonzero(mask(texts.is_valid())).tolist():
        where, remedy = json.loads(texts[row].as_py())
        faults[row] = RowFault(reason=Reason.COLUMNS, where=where, remedy=remedy)
    return batch.filter(texts.is_null()), faults


def _with_partitions(
    batch: pa.RecordBatch, faults: dict[int, RowFault], info: FileInfo, columns: Sequence[str]
) -> tuple[pa.RecordBatch, dict[int, RowFault]]:
    import pyarrow as pa

    for name in columns:
        if name in info.partitions:
            batch = batch.append_column(name, pa.repeat(pa.scalar(info.partitions[name], pa.string()), len(batch)))
    return batch, faults


def is_of_file(error: DataError) -> bool:
    """Whether the error says something of a file, and not of memory or of the way to the file."""
    of_system = isinstance(error.__cause__, OSError) and error.__cause__.errno is not None  # a decompressor gives none
    return not (of_system or isinstance(error, UnreachableError) or isinstance(error.__cause__, MemoryError))


def _changed(info: FileInfo, how: str) -> DataError:
    return DataError(
        f"data file {info.path} has changed since it was opened ({how}): let nothing write to files that are read, and "
        "go on with the files that the run was started with"
    )


def _footer_digest(path: str) -> str:
    with open_input(path) as file:
        size = file.size()
        file.seek(max(0, size - 8))
        length = int.from_bytes(file.read(4), "little")
        file.seek(max(0, size - 8 - length))
        return f"{size}-{zlib.crc32(file.read()):08x}"


@lru_cache(64)
def _footer(path: str, digest: str) -> tuple[pq.FileMetaData, list[str], pa.Schema]:
    """The footer of a Parquet file, which has this digest, the paths of the columns in its schema, and Arrow's schema.

    To parse it takes as long as it has row groups, each of which is opened anew.
    """
    with _parquet(path) as file:
        leaves = [file.schema.column(index).path for index in range(len(file.schema))]
        return file.metadata, leaves, file.schema_arrow


def _parquet(path: str, texts: Sequence[str] = (), footer: pq.FileMetaData | None = None) -> pq.ParquetFile:
    """The file, of which the columns with these paths are read as dictionaries, through small buffers, for many are
    open. It has this footer, if that was read before."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    file = open_input(path)
    try:
        options = {"read_dictionary": list(texts), "buffer_size": _BUFFER_BYTES, "pre_buffer": False}
        options["page_checksum_verification"] = True  # where pages have checksums
        return pq.ParquetFile(file, metadata=footer, **options)
    except (pa.ArrowException, OSError) as error:
        text = str(error).splitlines()[0]
        raise DataError(f"data file {path} is not a complete Parquet file ({text}): copy or write it again") from error

"""The rows of one file, block by block, as Arrow tables: Parquet, delimited text, archives of NumPy, LIBSVM's text.

Text is cut into blocks of whole lines first, so that each row's line is known whatever pyarrow leaves out of a block. A
quoted field cannot go over a line's end.
"""

from __future__ import annotations

import lzma
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from shardrec import DataError
from shardrec.files import UnreachableError
from shardrec.layout import host_memory
from shardrec.trainer.data import svmlight
from shardrec.trainer.data.arrays import values_of
from shardrec.trainer.data.encode import column_fault
from shardrec.trainer.data.fault import Reason, RowFault, shown
from shardrec.trainer.data.spec import FeatureSpec
from shardrec.trainer.data.urls import open_input, path_of

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

__all__ = [
    "FileInfo",
    "TableBlock",
    "check_file",
    "counted",
    "file_kind",
    "is_of_file",
    "opened_text",
    "read_blocks",
    "rows_between",
    "text_header",
    "usual_delimiter",
]

_ROWS_AT_ONCE = 16_384
_BLOCK_BYTES = 4 << 20
_LONGEST_LINE = 64 << 20
_BUFFER_BYTES = 1 << 16
_COMPRESSED = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd", ".xz": "xz"}
_PARQUET = (".parquet", ".pq")
_SVMLIGHT = (".libsvm", ".svm", ".svmlight", ".libfm")


@dataclass(frozen=True, kw_only=True)
class FileInfo:
    """What is known of a file before its rows are read.

    Attributes:
        path: its name.
        size: bytes.
        digest: checksum of Parquet's footer, or of the bytes of another file; "" while its rows are not counted.
        groups: rows of each row group, broken ones included; a file of another format has one group.
        kinds: what the values of each column of the spec are, of formats with types; "" for nulls only.
        first_line: the line of row 0; 1 for Parquet and archives, of which rows are counted.
        lost: why none of the rows can be read; "" if they can.
    """

    path: str
    size: int
    digest: str = ""
    groups: tuple[int, ...] = ()
    kinds: Mapping[str, str]
    first_line: int = 1
    lost: str = ""

    @property
    def divisible(self) -> bool:
        """Whether the file could have several groups."""
        return file_kind(self.path) == "parquet"


@dataclass(frozen=True, kw_only=True, eq=False)
class TableBlock:
    """Rows of a file.

    Attributes:
        table: N rows.
        numbers: int64 (N,), the number of each among the file's rows, from 0; broken ones are counted too.
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
        What the first bytes or the footer tell; only of Parquet the rows.

    Raises:
        DataError: naming all that is wrong.
        UnreachableError: if it cannot be read now.
    """
    schema, digest, groups, first = None, "", (), 1
    try:
        with open_input(path) as file:
            size = file.size()
            file.read(1)  # so that a failure to read is not taken for a damaged file
        match file_kind(path):
            case "parquet":
                with _parquet(path) as parquet:
                    schema, metadata = parquet.schema_arrow, parquet.metadata
                    groups = tuple(metadata.row_group(group).num_rows for group in range(metadata.num_row_groups))
                digest, names = _footer_digest(path), schema.names
            case "archive":
                schema = _table_of(_arrays(path, spec.sources), 0, 0).schema
                names = schema.names
            case "svmlight":
                with opened_text(path):
                    names = list(svmlight.COLUMNS)
            case _:
                with opened_text(path) as stream, _undamaged(path, size, 1):
                    names = _header(path, stream.read(_BLOCK_BYTES), spec)[0]
                first = 1 if spec.columns is not None else 2
    except OSError as error:
        raise UnreachableError(f"data file {path} cannot be read ({error}): give a file that can") from error
    of_spec = {*spec.label_sources, spec.group, spec.event_time, *spec.feature_sources}
    faults = [
        f"column {name!r} is missing: "
        + ("name the file's column in the spec (column:)" if name in of_spec else "leave it out of the keys (--keys)")
        for name in spec.sources
        if name not in names
    ]
    twice = [name for name in spec.sources if names.count(name) > 1]
    faults += [f"there are several columns {name!r}: rename or remove all but one" for name in twice]
    if schema is not None:
        for name in spec.sources:
            remedy = column_fault(schema.field(name).type, name, spec) if names.count(name) == 1 else ""
            if remedy:
                faults.append(f"column {name!r} has type {schema.field(name).type}: {remedy}")
    if faults:
        shown = f" (columns {', '.join(names[:50])}{', ...' * (len(names) > 50)})" * (
            not set(spec.sources) <= set(names)
        )
        raise DataError(f"data file {path}{shown}: " + "; ".join(faults))
    kinds = {} if schema is None else {name: values_of(schema.field(name).type) for name in spec.sources}
    return FileInfo(path=path, size=size, digest=digest, groups=groups, kinds=kinds, first_line=first)


def counted(info: FileInfo, spec: FeatureSpec) -> FileInfo:
    """The file's info with its rows, broken ones too, and digest: of a text by its lines, which are not parsed.

    Raises:
        DataError: for a file that is damaged.
    """
    kind, lines, end, digest = file_kind(info.path), 0, b"\n", 0
    if kind == "parquet":
        return info
    archive = kind == "archive"
    with _undamaged(info.path, info.size, 1), open_input(info.path) if archive else opened_text(info.path) as stream:
        while data := stream.read(_BLOCK_BYTES):
            digest = zlib.crc32(data, digest)
            lines, end = lines + data.count(b"\n"), data[-1:]
    rows = lines + (end != b"\n") + 1 - info.first_line
    if archive:
        rows = len(next(iter(_arrays(info.path, spec.sources).values())))
    return replace(info, digest=f"{digest:08x}", groups=(rows,))


def read_blocks(
    info: FileInfo,
    spec: FeatureSpec,
    *,
    group: int = 0,
    start: int = 0,
    part: float = 1.0,
    columns: Sequence[str] = (),
) -> Iterator[TableBlock]:
    """The rows of one row group of a file, in order.

    Args:
        info: of :func:`counted`.
        spec: what the columns are.
        group: number of the row group.
        start: rows of it to leave out: decoded in Parquet; neither parsed nor checked in text.
        part: of the usual size of a block.
        columns: to read with those of the spec.

    Raises:
        DataError: for a file that is damaged, or has changed since it was counted.
    """
    seen = sum(info.groups[:group]) + start
    stop = seen - start + info.groups[group]
    blocks = _tables(info, spec, group, start, part, tuple(dict.fromkeys([*spec.sources, *columns])))
    while True:
        with _undamaged(info.path, info.size, seen + info.first_line):
            block = next(blocks, None)
        if block is None:
            break
        table, broken = block
        first, seen = seen, seen + table.num_rows + len(broken)
        if seen > stop:
            break
        faults = {first + row: fault for row, fault in broken.items()}
        numbers = np.delete(np.arange(first, seen), list(broken))
        yield TableBlock(table=table, numbers=numbers, faults=faults, first=first, stop=seen)
    if seen != stop:
        raise _changed(info.path, f"it had {stop:,} rows up to here and now has {'more' if seen > stop else seen}")


def rows_between(info: FileInfo, spec: FeatureSpec, ranges: Sequence[tuple[int, int]]) -> Iterator[TableBlock]:
    """A block of exactly the rows ``start`` to ``stop`` (not included), for each of some ascending ranges.

    Raises:
        DataError: for a file that is damaged, or has changed since it was counted.
    """
    import pyarrow as pa

    blocks = _rows_from(info, spec, ranges[0][0])
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
            table=pa.concat_tables(tables), numbers=np.concatenate(numbers), faults=faults, first=start, stop=stop
        )


def _rows_from(info: FileInfo, spec: FeatureSpec, first: int) -> Iterator[TableBlock]:
    """The rows of a file from one on, over its row groups."""
    for group, rows in enumerate(info.groups):
        if rows > first:
            yield from read_blocks(info, spec, group=group, start=max(0, first))
        first -= rows


def _tables(
    info: FileInfo, spec: FeatureSpec, group: int, start: int, part: float, columns: Sequence[str]
) -> Iterator[tuple[pa.Table | pa.RecordBatch, dict[int, RowFault]]]:
    """Tables of the rows that could be read, each with the faults of the others by their place among both."""
    path, at_once, size = info.path, max(1, int(_ROWS_AT_ONCE * part)), max(1, int(_BLOCK_BYTES * part))
    if info.lost:
        raise DataError(info.lost)
    match file_kind(path):
        case "parquet":
            yield from _row_group(info, spec, group, start, at_once, columns)
        case "archive":
            arrays = _arrays(path, columns)  # an array of an archive is read as a whole
            for first in range(start, len(next(iter(arrays.values()))), at_once):
                yield _table_of(arrays, first, first + at_once), {}
        case "svmlight":
            with opened_text(path) as stream:
                yield from map(svmlight.parse_svmlight, _without(_whole_lines(path, stream, size), start))
        case _:
            with opened_text(path) as stream:
                blocks = _whole_lines(path, stream, size)
                data = next(blocks, b"")
                names, begin = _header(path, data, spec)
                rest = chain([data[begin:]] if len(data) > begin else [], blocks)
                yield from (_parsed(path, lines, names, columns, spec) for lines in _without(rest, start))


def _row_group(
    info: FileInfo, spec: FeatureSpec, group: int, start: int, at_once: int, columns: Sequence[str]
) -> Iterator[tuple[pa.Table | pa.RecordBatch, dict[int, RowFault]]]:
    """:func:`_tables` of Parquet. From a damaged page on, the rows of the group are broken.

    What fails is read once more, for it may have been a network that did.
    """
    import pyarrow as pa

    of_texts = {feature.source for feature in spec.sparse if info.kinds[feature.source] in ("texts", "lists of texts")}
    fault: RowFault | None = None
    while True:
        if _footer_digest(info.path) != info.digest:
            raise _changed(info.path, "it has another footer")
        # A column of lists has values of a path like tags.list.element.
        footer, leaves = _footer(info.path, info.digest)
        texts = [leaf for leaf in leaves if leaf in of_texts or leaf.rsplit(".", 2)[0] in of_texts]
        with _parquet(info.path, texts, footer) as file:
            stop = 0
            try:
                batches = file.iter_batches(at_once, row_groups=[group], columns=list(columns), use_threads=False)
                for batch in batches:
                    first, stop = stop, stop + batch.num_rows
                    if start < stop:
                        yield batch.slice(start - first), {}
                        start, fault = stop, None
                return
            except MemoryError:  # which says nothing of the file
                raise
            except (pa.ArrowException, OSError) as error:
                failed_before = fault is not None
                reason = (str(error) or type(error).__name__).splitlines()[0]
                where = f"the file is damaged from here to the end of its row group ({reason})"
                fault = RowFault(reason=Reason.DAMAGED, where=where, remedy="copy the file again, as it was")
            if failed_before:
                schema, rows = file.schema_arrow, info.groups[group]
                empty = schema.empty_table().select([name for name in schema.names if name in columns])
                for first in range(start, rows, at_once):
                    yield empty, dict.fromkeys(range(min(at_once, rows - first)), fault)
                return


def is_of_file(error: DataError) -> bool:
    """Whether the error says something of a file, and not of memory or of the way to the file."""
    of_system = isinstance(error.__cause__, OSError) and error.__cause__.errno is not None  # a decompressor gives none
    return not (of_system or isinstance(error, UnreachableError) or isinstance(error.__cause__, MemoryError))


@contextmanager
def _undamaged(path: str, size: int, line: int) -> Iterator[None]:
    """Inside, what pyarrow and the decompressors say of a file becomes a DataError; ``size``: its bytes when opened."""
    import pyarrow as pa

    try:
        yield
    except (pa.ArrowException, OSError, EOFError, lzma.LZMAError, zipfile.BadZipFile) as error:
        with open_input(path) as file:
            if file.size() != size:
                raise _changed(path, f"it had {size:,} bytes and now has {file.size():,}") from error
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise DataError(f"{path}:{line}: the file is damaged ({reason}): copy or write it again") from error


def _changed(path: str, how: str) -> DataError:
    return DataError(
        f"data file {path} has changed since it was opened ({how}): let nothing write to files that are read, and go "
        "on with the files that the run was started with"
    )


def _footer_digest(path: str) -> str:
    with open_input(path) as file:
        size = file.size()
        file.seek(max(0, size - 8))
        length = int.from_bytes(file.read(4), "little")
        file.seek(max(0, size - 8 - length))
        return f"{size}-{zlib.crc32(file.read()):08x}"


def file_kind(path: str) -> str:
    """What a file is by its name: ``parquet``, ``archive`` (of NumPy), ``svmlight`` or ``text``."""
    if _suffix(path) in _PARQUET:
        return "parquet"
    if _suffix(path) == ".npz":
        return "archive"
    return "svmlight" if _plain_suffix(path) in _SVMLIGHT else "text"


def _suffix(path: str) -> str:
    return Path(path_of(path)).suffix.lower()


def _plain_suffix(path: str) -> str:
    """The suffix of a name without that of a compression."""
    suffix = _suffix(path)
    return Path(Path(path_of(path)).stem).suffix.lower() if suffix in _COMPRESSED else suffix


@lru_cache(64)
def _footer(path: str, digest: str) -> tuple[pq.FileMetaData, list[str]]:
    """The footer of a Parquet file, which has this digest, and the paths of the columns in its schema.

    To parse it takes as long as it has row groups, each of which is opened anew.
    """
    with _parquet(path) as file:
        return file.metadata, [file.schema.column(index).path for index in range(len(file.schema))]


def _parquet(path: str, texts: Sequence[str] = (), footer: pq.FileMetaData | None = None) -> pq.ParquetFile:
    """The file, of which the columns with these paths are read as dictionaries, through small buffers, for many are
    open; it has this footer, if that was read before."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    file = open_input(path)
    try:
        options = {"read_dictionary": list(texts), "buffer_size": _BUFFER_BYTES, "pre_buffer": False}
        return pq.ParquetFile(file, metadata=footer, **options)
    except (pa.ArrowException, OSError) as error:
        text = str(error).splitlines()[0]
        raise DataError(f"data file {path} is not a complete Parquet file ({text}): copy or write it again") from error


def _table_of(arrays: dict[str, NDArray[np.generic]], start: int, stop: int) -> pa.Table:
    """Some rows of an archive; an array (N, k) is a column of lists of k."""
    import pyarrow as pa

    columns = {}
    for name, array in arrays.items():
        part = array[start:stop]
        flat = pa.array(part.reshape(-1))
        if part.ndim == 2:
            flat = pa.ListArray.from_arrays(np.arange(len(part) + 1, dtype=np.int32) * part.shape[1], flat)
        columns[name] = flat
    return pa.table(columns)


def _arrays(path: str, columns: Sequence[str]) -> dict[str, NDArray[np.generic]]:
    """The columns of an archive, as far as they are there.

    Raises:
        DataError: for what is no such archive, an array of objects or of another shape, or columns of several lengths.
    """
    file = open_input(path)
    try:
        with np.load(file, allow_pickle=False) as archive:
            names = [name for name in columns if name in archive.files]
            size = sum(part.file_size for part in archive.zip.infolist() if part.filename.removesuffix(".npy") in names)
            if size > host_memory() / 2:
                raise DataError(
                    f"data file {path} would take {size / 2**30:,.1f} GiB unpacked, and a host has "
                    f"{host_memory() / 2**30:,.1f} GiB of memory: write Parquet, which is read in parts"
                )
            arrays = {name: archive[name] for name in names}
    except DataError:
        raise
    except (
        *(AttributeError, EOFError, MemoryError, OSError, RuntimeError, TypeError, ValueError),
        *(zipfile.BadZipFile, zlib.error),
    ) as error:
        raise DataError(
            f"data file {path} is not an .npz archive of plain arrays ({error}): write it with numpy.savez, without "
            "objects in it"
        ) from error
    sizes = {name: array.shape[0] if array.ndim else 1 for name, array in arrays.items()}
    faults = [
        f"array {name!r} has shape {array.shape}: give (rows,), or (rows, k) for k ids a row"
        for name, array in arrays.items()
        if array.ndim not in (1, 2)
    ]
    if len(set(sizes.values())) > 1:
        faults.append(f"its arrays have different numbers of rows ({sizes}): give one value per row")
    if faults:
        raise DataError(f"data file {path}: " + "; ".join(faults))
    return arrays


def _parsed(
    path: str, data: bytes, names: Sequence[str], columns: Sequence[str], spec: FeatureSpec
) -> tuple[pa.Table, dict[int, RowFault]]:
    import pyarrow as pa
    from pyarrow import csv

    broken: dict[int, RowFault] = {}
    last = data.count(b"\n") + (not data.endswith(b"\n"))

    def leave_out(row: csv.InvalidRow) -> str:
        remedy = "separate the columns by single delimiters"
        if row.number == last and not data.endswith(b"\n"):
            remedy = "it is the file's end, without a line feed: copy the file again if it is cut short"
        where = f"the line has {row.actual_columns} of {row.expected_columns} columns: {row.text[:60]!r}"
        broken[row.number - 1] = RowFault(reason=Reason.COLUMNS, where=where, remedy=remedy)
        return "skip"

    table = csv.read_csv(
        pa.BufferReader(data),
        read_options=csv.ReadOptions(column_names=list(names), use_threads=False, block_size=len(data) + 1),
        parse_options=csv.ParseOptions(
            delimiter=spec.delimiter or usual_delimiter(path),
            quote_char='"' if spec.quoted else False,
            ignore_empty_lines=False,
            invalid_row_handler=leave_out,
        ),
        convert_options=csv.ConvertOptions(
            column_types=dict.fromkeys(columns, pa.string()),
            include_columns=list(columns),
            check_utf8=False,
            strings_can_be_null=False,
        ),
    )
    if table.num_rows + len(broken) < last:  # a quote without its end, which took the lines after it
        middle = 0
        for _ in range(last // 2):
            middle = data.index(b"\n", middle) + 1
        (table, broken), (rest, more) = (
            _parsed(path, half, names, columns, spec) for half in (data[:middle], data[middle:])
        )
        table = pa.concat_tables([table, rest])
        broken |= {last // 2 + row: fault for row, fault in more.items()}
    elif table.num_rows and any(b"\n" in column[-1].as_buffer().to_pybytes() for column in table.columns):
        table = table.slice(0, table.num_rows - 1)
        where = f"the line has a quote without its end: {shown(data.splitlines()[-1])}"
        broken[last - 1] = RowFault(reason=Reason.COLUMNS, where=where, remedy="write it twice, or set quoted: false")
    return table, broken


def _header(path: str, data: bytes, spec: FeatureSpec) -> tuple[list[str], int]:
    """The names of a text file's columns, and where its rows begin."""
    if spec.columns is not None:
        return list(spec.columns), 0
    return text_header(data, spec.delimiter or usual_delimiter(path)), data.find(b"\n") + 1 or len(data)


def text_header(data: bytes, delimiter: str) -> list[str]:
    """The names of columns in the first line of a text."""
    line = data.partition(b"\n")[0].decode("utf-8-sig", errors="replace").rstrip("\r")
    return [text.strip().strip('"') for text in line.split(delimiter)]


def usual_delimiter(path: str) -> str:
    """What separates the columns of a text file whose spec does not say."""
    return "," if _plain_suffix(path) == ".csv" else "\t"


def _whole_lines(path: str, stream: lzma.LZMAFile | pa.NativeFile, size: int) -> Iterator[bytes]:
    """Blocks that end with a line feed, but perhaps the last one."""
    rest = b""
    while data := stream.read(size):
        end = data.rfind(b"\n") + 1
        if end:
            yield rest + data[:end]
            rest = data[end:]
        else:
            rest += data
        if len(rest) > _LONGEST_LINE:
            raise DataError(f"data file {path} has a line of more than {_LONGEST_LINE >> 20} MiB: give a text file")
    if rest:
        yield rest


def _without(blocks: Iterable[bytes], count: int) -> Iterator[bytes]:
    """The blocks of lines without the first ``count`` lines, which are not parsed."""
    for data in blocks:
        lines = data.count(b"\n") if count else 0
        if lines < count:
            count -= lines
            continue
        place = 0
        for _ in range(count):
            place = data.index(b"\n", place) + 1
        count = 0
        if place < len(data):
            yield data[place:]


def opened_text(path: str) -> lzma.LZMAFile | pa.NativeFile:
    """A stream of the text, decompressed.

    Raises:
        DataError: no such file, a directory, or an unreadable or empty file.
    """
    import pyarrow as pa

    kind, file = _COMPRESSED.get(_suffix(path)), open_input(path)
    if file.size() == 0:
        raise DataError(f"data file {path} is empty: copy or write it again")
    if kind == "xz":
        return lzma.open(file)
    stream: pa.NativeFile = pa.CompressedInputStream(file, kind) if kind else file
    return stream

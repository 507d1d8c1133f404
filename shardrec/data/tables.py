"""The rows of one file, block by block, as Arrow tables: Parquet, delimited text, archives of NumPy, LIBSVM's text.

Text is cut into blocks of whole lines first, so that each row's line is known whatever pyarrow leaves out of a block. A
quoted field cannot go over a line's end.
"""

from __future__ import annotations

import lzma
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardrec.data import svmlight
from shardrec.data.encode import column_fault
from shardrec.data.fault import Reason, RowFault
from shardrec.data.spec import FeatureSpec
from shardrec.data.urls import open_input, path_of
from shardrec.errors import DataError
from shardrec.layout.presets import host_memory

__all__ = ["TableBlock", "check_file", "count_rows", "first_line", "read_blocks", "rows_between"]

_ROWS_AT_ONCE = 16_384
_BLOCK_BYTES = 4 << 20
_LONGEST_LINE = 64 << 20
_COMPRESSED = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd", ".xz": "xz"}
_PARQUET = (".parquet", ".pq")
_SVMLIGHT = (".libsvm", ".svm", ".svmlight", ".libfm")


@dataclass(frozen=True, kw_only=True, eq=False)
class TableBlock:
    """Rows of a file.

    Attributes:
        table: N rows, as a ``pyarrow.Table`` or a ``RecordBatch``.
        numbers: int64 (N,), the number of each among the file's rows, from 0; broken ones are counted too.
        faults: of rows that are not in the table, by their number.
        seen: rows of the file so far.
    """

    table: Any
    numbers: NDArray[np.int64]
    faults: dict[int, RowFault]
    seen: int


def check_file(path: str, spec: FeatureSpec) -> None:
    """Check that a file is there and has the columns, from its first bytes or footer only.

    Raises:
        DataError: naming all that is wrong.
    """
    schema = None
    match _kind(path):
        case "parquet":
            schema = _parquet(path).schema_arrow
            names = schema.names
        case "archive":
            schema = _table_of(_arrays(path, spec), 0, 0).schema
            names = schema.names
        case "svmlight":
            with _opened(path):
                names = list(svmlight.COLUMNS)
        case _:
            with _opened(path) as stream, _undamaged(path, 1):
                names = _header(path, stream.read(_BLOCK_BYTES), spec)[0]
    faults = [
        f"column {name!r} is missing: name the file's column in the spec (column:)"
        for name in spec.sources
        if name not in names
    ]
    if schema is not None:
        for name in spec.sources:
            remedy = column_fault(schema.field(name).type, name, spec) if name in names else ""
            if remedy:
                faults.append(f"column {name!r} has type {schema.field(name).type}: {remedy}")
    if faults:
        shown = f" (columns {', '.join(names[:50])}{', ...' * (len(names) > 50)})" * (
            not set(spec.sources) <= set(names)
        )
        raise DataError(f"data file {path}{shown}: " + "; ".join(faults))


def read_blocks(path: str, spec: FeatureSpec) -> Iterator[TableBlock]:
    """The rows of one file, which :func:`check_file` has passed, in order.

    Raises:
        DataError: for a file that is damaged.
    """
    seen = 0
    blocks = _tables(path, spec)
    while True:
        with _undamaged(path, seen + 1):
            block = next(blocks, None)
        if block is None:
            return
        table, broken = block
        begin, seen = seen, seen + table.num_rows + len(broken)
        faults = {begin + row: fault for row, fault in broken.items()}
        yield TableBlock(table=table, numbers=np.delete(np.arange(begin, seen), list(broken)), faults=faults, seen=seen)


def rows_between(path: str, spec: FeatureSpec, ranges: Iterable[tuple[int, int]]) -> Iterator[TableBlock]:
    """A block of exactly the rows ``start`` to ``stop`` (not included), for each of some ascending ranges.

    Raises:
        DataError: for a file that is damaged, or has fewer rows.
    """
    import pyarrow as pa

    blocks = read_blocks(path, spec)
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
            if block.seen >= stop:
                break
            block = next(blocks, None)
        if block is None:
            raise DataError(f"data file {path} has fewer than {stop:,} rows, and had more: do not change it meanwhile")
        yield TableBlock(table=pa.concat_tables(tables), numbers=np.concatenate(numbers), faults=faults, seen=stop)


def count_rows(path: str, spec: FeatureSpec) -> int:
    """The rows of one file, broken ones too, from Parquet's footer or by the lines of a text, which are not parsed.

    Raises:
        DataError: for a file that is damaged.
    """
    kind, lines, end = _kind(path), 0, b"\n"
    if kind == "parquet":
        with _parquet(path) as file:
            return int(file.metadata.num_rows)
    if kind == "archive":
        return len(next(iter(_arrays(path, spec).values())))
    with _undamaged(path, 1), _opened(path) as stream:
        while data := stream.read(_BLOCK_BYTES):
            lines, end = lines + data.count(b"\n"), data[-1:]
    return lines + (end != b"\n") - (kind == "text" and spec.columns is None)


def first_line(path: str, spec: FeatureSpec) -> int:
    """The line of row 0; 1 for Parquet and archives, of which rows are counted."""
    return 2 if _kind(path) == "text" and spec.columns is None else 1


def _tables(path: str, spec: FeatureSpec) -> Iterator[tuple[Any, dict[int, RowFault]]]:
    """Tables of the file's rows that could be read, each with the faults of the others by their place among both."""
    match _kind(path):
        case "parquet":
            with _parquet(path) as file:
                for batch in file.iter_batches(batch_size=_ROWS_AT_ONCE, columns=list(spec.sources), use_threads=False):
                    yield batch, {}
        case "archive":
            arrays = _arrays(path, spec)  # an array of an archive is read as a whole
            for start in range(0, len(next(iter(arrays.values()))), _ROWS_AT_ONCE):
                yield _table_of(arrays, start, start + _ROWS_AT_ONCE), {}
        case "svmlight":
            with _opened(path) as stream:
                yield from map(svmlight.parse_svmlight, _whole_lines(path, stream))
        case _:
            names: list[str] = []
            with _opened(path) as stream:
                for data in _whole_lines(path, stream):
                    begin = 0
                    if not names:
                        names, begin = _header(path, data, spec)
                    if len(data) > begin:
                        yield _parsed(path, data[begin:], names, spec)


@contextmanager
def _undamaged(path: str, line: int) -> Iterator[None]:
    """Inside, what pyarrow and the decompressors say of a file becomes a DataError."""
    import pyarrow as pa

    try:
        yield
    except (pa.ArrowException, OSError, EOFError, lzma.LZMAError, zipfile.BadZipFile) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise DataError(f"{path}:{line}: the file is damaged ({reason}): copy or write it again") from error


def _kind(path: str) -> str:
    """What a file is by the end of its name: ``parquet``, ``archive`` (of NumPy), ``svmlight`` or ``text``."""
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


def _parquet(path: str) -> Any:
    import pyarrow as pa
    import pyarrow.parquet as pq

    file = open_input(path)
    try:
        return pq.ParquetFile(file)
    except (pa.ArrowException, OSError) as error:
        text = str(error).splitlines()[0]
        raise DataError(f"data file {path} is not a complete Parquet file ({text}): copy or write it again") from error


def _table_of(arrays: dict[str, NDArray[Any]], start: int, stop: int) -> Any:
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


def _arrays(path: str, spec: FeatureSpec) -> dict[str, NDArray[Any]]:
    """The spec's columns in an archive, as far as they are there.

    Raises:
        DataError: for what is no such archive, an array of objects or of another shape, or columns of several lengths.
    """
    file = open_input(path)
    try:
        with np.load(file, allow_pickle=False) as archive:
            names = [name for name in spec.sources if name in archive.files]
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


def _parsed(path: str, data: bytes, names: list[str], spec: FeatureSpec) -> tuple[Any, dict[int, RowFault]]:
    import pyarrow as pa
    from pyarrow import csv

    broken: dict[int, RowFault] = {}
    last = data.count(b"\n") + (not data.endswith(b"\n"))

    def leave_out(row: Any) -> str:
        remedy = "separate the columns by single delimiters"
        if row.number == last and not data.endswith(b"\n"):
            remedy = "it is the file's end, without a line feed: copy the file again if it is cut short"
        where = f"the line has {row.actual_columns} of {row.expected_columns} columns: {row.text[:60]!r}"
        broken[row.number - 1] = RowFault(reason=Reason.COLUMNS, where=where, remedy=remedy)
        return "skip"

    table = csv.read_csv(
        pa.BufferReader(data),
        read_options=csv.ReadOptions(column_names=names, use_threads=False, block_size=len(data) + 1),
        parse_options=csv.ParseOptions(
            delimiter=_delimiter(path, spec),
            quote_char='"' if spec.quoted else False,
            ignore_empty_lines=False,
            invalid_row_handler=leave_out,
        ),
        convert_options=csv.ConvertOptions(
            column_types=dict.fromkeys(spec.sources, pa.binary()),
            include_columns=list(spec.sources),
            check_utf8=False,
            strings_can_be_null=False,
        ),
    )
    return table, broken


def _header(path: str, data: bytes, spec: FeatureSpec) -> tuple[list[str], int]:
    """The names of a text file's columns, and where its rows begin."""
    if spec.columns is not None:
        return list(spec.columns), 0
    line, feed, _ = data.partition(b"\n")
    delimiter = _delimiter(path, spec)
    texts = line.decode("utf-8-sig", errors="replace").rstrip("\r").split(delimiter)
    return [text.strip().strip('"') for text in texts], len(line) + len(feed)


def _delimiter(path: str, spec: FeatureSpec) -> str:
    return spec.delimiter or ("," if _plain_suffix(path) == ".csv" else "\t")


def _whole_lines(path: str, stream: Any) -> Iterator[bytes]:
    """Blocks that end with a line feed, but perhaps the last one."""
    rest = b""
    while data := stream.read(_BLOCK_BYTES):
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


def _opened(path: str) -> AbstractContextManager[Any]:
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
    return pa.CompressedInputStream(file, kind) if kind else file  # type: ignore[no-any-return]

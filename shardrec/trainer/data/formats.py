"""Rows of files that are not Parquet, as Arrow tables to convert: delimited text, archives of NumPy, LIBSVM's text.

Memory is that of a block. Text is parsed by pyarrow's rules, as pandas has them: a quoted field may have delimiters and
line breaks, and empty lines are no rows. All values of a text stay texts.
"""

from __future__ import annotations

import csv as standard_csv
import io
import lzma
import shlex
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shardrec import DataError
from shardrec.trainer.data import svmlight
from shardrec.trainer.data.arrays import is_text
from shardrec.trainer.data.fault import Reason, RowFault
from shardrec.trainer.data.ids import present
from shardrec.trainer.data.spec import FeatureSpec
from shardrec.trainer.data.urls import open_input, path_of

if TYPE_CHECKING:
    import pyarrow as pa
    from pyarrow import csv

_ROWS_AT_ONCE = 16_384
_BLOCK_BYTES = 4 << 20
_COMPRESSED = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd", ".xz": "xz"}
_SVMLIGHT = (".libsvm", ".svm", ".svmlight", ".libfm")
_BLANK = b"\r\n\0 "
_UTF16 = (b"\xff\xfe", b"\xfe\xff")
_UNIT = "\x1f"
"""ASCII's separator of units, which stands for a delimiter of several characters: parsers take one."""

Rows: TypeAlias = "tuple[pa.Table, dict[int, RowFault]]"
"""A table of the rows that could be read, and the faults of the others by their places among both."""


def file_kind(path: str) -> str:
    """What a file is by its name: ``parquet``, ``archive`` (of NumPy), ``svmlight`` or ``text``."""
    if _suffix(path) in (".parquet", ".pq"):
        return "parquet"
    if _suffix(path) == ".npz":
        return "archive"
    return "svmlight" if _plain_suffix(path) in _SVMLIGHT else "text"


def usual_delimiter(path: str) -> str:
    """What separates the columns of a text file whose spec does not say."""
    return "," if _plain_suffix(path) == ".csv" else "\t"


def columns_of(path: str, spec: FeatureSpec) -> tuple[list[str], pa.Schema | None]:
    """The names of a file's columns, and of a file of arrays the types of the spec's.

    Raises:
        DataError: if they cannot be read.
    """
    match file_kind(path):
        case "archive":
            table, _ = next(_archive(path, spec.sources, 0))
            return table.schema.names, table.schema
        case "svmlight":
            return list(svmlight.COLUMNS), None
    return [name.strip(" ") for name in _raw_names(path, spec)], None


def read_rows(
    path: str, spec: FeatureSpec, columns: Sequence[str], progress: Callable[[int], object] = lambda count: None
) -> Iterator[Rows]:
    """The rows of a file, in order.

    Args:
        path: the file.
        spec: what its columns are.
        columns: to read.
        progress: is told of bytes that were read.

    Raises:
        DataError: for a file that cannot be read to its end.
    """
    match file_kind(path):
        case "archive":
            return _archive(path, columns, _ROWS_AT_ONCE)
        case "svmlight":
            parsed = map(svmlight.parse_svmlight, _lines(path, progress))
            return ((table.select(columns), faults) for table, faults in parsed)
    return _parsed(path, spec, columns, progress)


def text_head(path: str, size: int) -> bytes:
    """The first bytes of a text, decompressed."""
    return _Opened(path).read(size)


@contextmanager
def undamaged(path: str) -> Iterator[None]:
    """Inside, what pyarrow and the decompressors say of a file becomes a DataError."""
    import pyarrow as pa

    try:
        yield
    except MemoryError as error:  # which says nothing of the file
        raise DataError(f"data file {path}: no memory to read it ({error}): give the ranks more") from error
    except (pa.ArrowException, EOFError, OSError, UnicodeError, lzma.LZMAError, zipfile.BadZipFile) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        remedy = "the file is damaged ({}): copy or write it again"
        if "straddling" in reason:
            remedy = f"a row has more than {_BLOCK_BYTES:,} bytes, or a quote no end: set quoted: false in the spec"
        elif isinstance(error, UnicodeError):
            remedy = "the file has another encoding ({}): set encoding: NAME in the spec"
        raise DataError(f"data file {path}: {remedy.format(reason)}") from error


class _Opened(io.RawIOBase):
    """A text, decompressed.

    Args:
        path: the file.
        progress: is told of bytes that were read.
        delimiter: of several characters, in whose place there is :data:`_UNIT`.

    Attributes:
        end: the last byte that was read and is not blank.

    Raises:
        DataError: no such file, a directory, or an empty file.
    """

    def __init__(
        self, path: str, progress: Callable[[int], object] = lambda count: None, delimiter: str | None = None
    ) -> None:
        import pyarrow as pa

        kind, file = _COMPRESSED.get(_suffix(path)), open_input(path)
        if file.size() == 0:
            raise DataError(f"data file {path} is empty: copy or write it again")
        self._stream: Any = file
        if kind is not None:
            unpack = lzma.LZMAFile if kind == "xz" else partial(pa.CompressedInputStream, compression=kind)
            self._stream = unpack(file)
        self._progress, self.end = progress, b""
        self._delimiter, self._rest = (delimiter or "").encode(), b""

    def readable(self) -> bool:
        return True

    def read(self, size: int | None = -1, /) -> bytes:
        more = -1 if size is None or size < 0 else max(1, size - len(self._rest))
        data: bytes = self._stream.read() if more < 0 else self._stream.read(more)
        self.end = (data[-64:].rstrip(_BLANK) or data.rstrip(_BLANK))[-1:] or self.end
        self._progress(len(data))
        if len(self._delimiter) < 2:
            return data
        whole = (self._rest + data).replace(self._delimiter, _UNIT.encode())
        # What may be the beginning of a delimiter waits for the bytes after it.
        beginnings = (self._delimiter[:count] for count in range(len(self._delimiter) - 1, 0, -1))
        self._rest = next((some for some in beginnings if data and whole.endswith(some)), b"")
        whole = whole.removesuffix(self._rest)
        return whole if whole or not data else self.read(size)

    def readinto(self, buffer: Any, /) -> int:
        data = self.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)


def _suffix(path: str) -> str:
    return Path(path_of(path)).suffix.lower()


def _plain_suffix(path: str) -> str:
    """The suffix of a name without that of a compression."""
    suffix = _suffix(path)
    return Path(Path(path_of(path)).stem).suffix.lower() if suffix in _COMPRESSED else suffix


def _one_character(path: str, spec: FeatureSpec) -> str:
    delimiter = spec.delimiter or usual_delimiter(path)
    return delimiter if len(delimiter) == 1 else _UNIT


def _raw_names(path: str, spec: FeatureSpec) -> list[str]:
    """The names of a text file's columns, with the spaces around them."""
    head = io.BufferedReader(_Opened(path, delimiter=spec.delimiter), 1 << 16)
    if head.peek(2)[:2] in _UTF16 and not spec.encoding.startswith("utf-16"):
        raise DataError(f"data file {path} is UTF-16: set encoding: utf-16 in the spec (--features)")
    if spec.columns is not None:
        return list(spec.columns)
    # Bytes of another encoding become halves of surrogate pairs. Those after the names are no matter here.
    lines = standard_csv.reader(
        io.TextIOWrapper(head, spec.encoding, errors="surrogateescape", newline=""),
        delimiter=_one_character(path, spec),
        quoting=standard_csv.QUOTE_MINIMAL if spec.quoted else standard_csv.QUOTE_NONE,
    )
    try:
        names = next((line for line in lines if line), [])
    except standard_csv.Error as error:
        raise DataError(
            f"data file {path}: its first line is no header ({error}): give columns: in the spec"
        ) from error
    if any("\udc80" <= character <= "\udcff" for name in names for character in name):
        raise DataError(
            f"data file {path}: the names of its columns are not {spec.encoding}: set encoding: NAME in the spec, such "
            "as latin-1"
        )
    return [names[0].removeprefix("\ufeff"), *names[1:]] if names else []


def _parsed(path: str, spec: FeatureSpec, columns: Sequence[str], progress: Callable[[int], object]) -> Iterator[Rows]:
    import pyarrow as pa
    import pyarrow.compute as pc
    from pyarrow import csv

    raw_names, broken = _raw_names(path, spec), dict[int, RowFault]()
    first = 1 if spec.columns is not None else 2  # the record of row 0
    # In a header such as "a, b" spaces follow the delimiters, and so they do in the rows.
    spaced = any(name.startswith(" ") for name in raw_names)
    raw = {name.strip(" "): name for name in reversed(raw_names)}
    read = [raw[name] for name in columns]

    def leave_out(row: csv.InvalidRow) -> str:
        where = f"the line has {row.actual_columns} of {row.expected_columns} columns: {row.text[:60]!r}"
        remedy = "separate the columns by single delimiters, and end each quote"
        if row.number == 1 and spec.columns is not None:
            proposed = f"shardrec inspect {shlex.quote(path)} --suggest --out proposed"
            remedy = f"if this is a header, propose a spec (--features) with {proposed}; else {remedy}"
        broken[row.number - first] = RowFault(reason=Reason.COLUMNS, where=where, remedy=remedy)
        return "skip"

    opened = _Opened(path, progress, spec.delimiter)
    reader = csv.open_csv(
        opened,
        read_options=csv.ReadOptions(
            column_names=list(spec.columns or ()),
            use_threads=False,  # which also numbers the broken rows
            block_size=_BLOCK_BYTES,
            encoding="utf8" if spec.encoding == "utf-8" else spec.encoding,
        ),
        parse_options=csv.ParseOptions(
            delimiter=_one_character(path, spec),
            quote_char='"' if spec.quoted else False,
            newlines_in_values=spec.quoted,
            invalid_row_handler=leave_out,
        ),
        convert_options=csv.ConvertOptions(
            column_types=dict.fromkeys(raw_names, pa.string()),
            include_columns=[*dict.fromkeys([*read, raw_names[-1]])],
            check_utf8=False,
            strings_can_be_null=True,
            null_values=[""] if spaced or spec.list_sources else ["", *spec.missing],
        ),
    )
    seen, last = 0, None
    for batch in reader:
        table = pa.Table.from_batches([batch])
        if len(table):
            last = table[raw_names[-1]][-1]
        arrays = [table[name] for name in read]
        if spaced:
            arrays = [pc.ascii_ltrim(array, " ") for array in arrays]
        if spaced or spec.list_sources:  # else the parser has left them out
            arrays = [
                array if name in spec.list_sources else present(array, spec.missing)
                for name, array in zip(columns, arrays, strict=True)
            ]
        if spec.decimal == ",":
            numeric = {*spec.label_sources, *spec.number_sources}
            arrays = [
                pc.replace_substring(array, ",", ".") if name in numeric else array
                for name, array in zip(columns, arrays, strict=True)
            ]
        stop = seen + len(table)
        for row in sorted(broken):
            stop += row <= stop
        faults = {row - seen: broken.pop(row) for row in sorted(broken) if row < stop}
        yield pa.table(dict(zip(columns, arrays, strict=True))), faults
        seen = stop
    empty = pa.table({name: pa.array([], pa.string()) for name in columns})
    yield empty, {row - seen: fault for row, fault in broken.items()}
    text = b"" if last is None or not last.is_valid else last.as_buffer().to_pybytes()
    if spec.quoted and b"\n" in text and opened.end != b'"':
        raise DataError(
            f"data file {path} ends inside of a quote, which begins in its last row, {seen + first - 1}: end the "
            "quote, or set quoted: false in the spec"
        )


def _lines(path: str, progress: Callable[[int], object]) -> Iterator[pa.Array]:
    """The lines of a text, in blocks."""
    import pyarrow as pa
    from pyarrow import csv

    blocks = csv.open_csv(
        _Opened(path, progress),
        read_options=csv.ReadOptions(column_names=["line"], use_threads=False, block_size=_BLOCK_BYTES),
        parse_options=csv.ParseOptions(delimiter=_UNIT, quote_char=False, ignore_empty_lines=False),
        convert_options=csv.ConvertOptions(column_types={"line": pa.binary()}),
    )
    return (block.column(0) for block in blocks)


def _archive(path: str, columns: Sequence[str], at_once: int) -> Iterator[Rows]:
    """The columns of an archive, as far as they are there, some rows at a time. A first table without rows if none.

    Raises:
        DataError: for what is no such archive, an array of objects or of another shape, or columns of several lengths.
    """
    import pyarrow as pa

    try:
        with zipfile.ZipFile(open_input(path)) as archive, ExitStack() as files:
            names = [name for name in columns if f"{name}.npy" in archive.namelist()]
            members = {name: files.enter_context(archive.open(f"{name}.npy")) for name in names}
            arrays = {name: _Rows(member) for name, member in members.items()}
            sizes = {name: array.shape[0] if array.shape else 1 for name, array in arrays.items()}
            faults = [f"array {name!r} {array.fault}" for name, array in arrays.items() if array.fault]
            if len(set(sizes.values())) > 1:
                faults.append(f"its arrays have different numbers of rows ({sizes}): give one value per row")
            if faults:
                raise DataError(f"data file {path}: " + "; ".join(faults))
            yield pa.table({name: array.take(0) for name, array in arrays.items()}), {}
            left = max(sizes.values(), default=0) if at_once else 0
            while left:
                count = min(left, at_once)
                yield pa.table({name: array.take(count) for name, array in arrays.items()}), {}
                left -= count
    except (EOFError, OSError, RuntimeError, SyntaxError, TypeError, ValueError, zipfile.BadZipFile) as error:
        raise DataError(
            f"data file {path} is not an .npz archive of plain arrays ({error}): write it with numpy.savez, without "
            "objects in it"
        ) from error


class _Rows:
    """An array of an archive, a few rows at a time.

    Attributes:
        shape: as its header says.
        fault: what is wrong with it. Empty if it can be read.
    """

    def __init__(self, file: IO[bytes]) -> None:
        header = np.lib.format.read_array_header_1_0 if np.lib.format.read_magic(file) == (1, 0) else None
        shape, in_columns, dtype = (header or np.lib.format.read_array_header_2_0)(file)
        self._file, self.shape, self._dtype, self.fault = file, shape, dtype, ""
        if dtype.hasobject:
            raise ValueError("it holds objects")
        if len(shape) not in (1, 2):
            self.fault = f"has shape {shape}: give (rows,), or (rows, k) for k ids a row"
        elif in_columns and min(shape) > 1:
            self.fault = "is in Fortran's order: write numpy.ascontiguousarray of it"

    def take(self, count: int) -> pa.Array:
        """The next rows, of (rows, k) as lists of k."""
        import pyarrow as pa

        width = self.shape[1] if len(self.shape) == 2 else 1
        size = count * width * self._dtype.itemsize
        data = self._file.read(size)
        if len(data) < size:
            raise ValueError("an array is shorter than its header says")
        flat: NDArray[Any] = np.frombuffer(data, self._dtype, count * width)
        values = pa.array(flat.astype(self._dtype.newbyteorder("="), copy=False))
        if len(self.shape) == 1:
            return values
        values = values.cast(pa.large_string()) if is_text(values.type) else values
        return pa.ListArray.from_arrays(np.arange(count + 1, dtype=np.int32) * width, values)

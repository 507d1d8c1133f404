"""Rows of Parquet files; a category column of lists is a multi-hot feature.

| column | types | missing |
|---|---|---|
| label | integer, floating point, boolean; 0 or 1 | not allowed |
| dense | integer, floating point | null, NaN |
| category | string (8 hexadecimal digits), dictionary of strings, integer | null, empty string → row 0 |
| multi-hot category | list of the above | null list → row 0; an empty list is an empty bag |

A column of which every value is missing may have the type null.

pyarrow is imported by the functions that need it, so that the other readers work and start without it.

Legend: N rows, D dense features, F sparse features, V ids of one feature.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardrec.data.fault import FaultLog, Reason, RowFault
from shardrec.data.fields import ByteFields
from shardrec.data.preprocess import hash_categories, transform_dense
from shardrec.data.rows import ClickRows, NumberedRows
from shardrec.data.schema import ClickSchema
from shardrec.errors import DataError

__all__ = ["check_parquet", "read_parquet"]

_ROWS_AT_ONCE = 16_384


def check_parquet(path: Path, schema: ClickSchema, columns: Mapping[str, str]) -> None:
    """Checks, from the file's footer only, that every column is there and has a type that can be read.

    Args:
        path: the file.
        schema: the names to look for, besides ``label``.
        columns: the file's names where they differ: name in the schema (or ``label``) to name in the file.

    Raises:
        DataError: no complete Parquet file, or with all the faults of its columns.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        found = pq.read_schema(path)
    except (pa.ArrowException, OSError) as error:
        text = str(error).splitlines()[0]
        raise DataError(f"data file {path} is not a complete Parquet file ({text}): copy or write it again") from error
    faults = []
    for name in ("label", *schema.dense_names, *schema.sparse_names):
        column = columns.get(name, name)
        if column not in found.names:
            faults.append(f"column {column!r} is missing: map {name!r} to one of the file's columns with columns=")
            continue
        remedy = _type_fault(found.field(column).type, name, schema)
        if remedy:
            faults.append(f"column {column!r} has type {found.field(column).type}: {remedy}")
    if faults:
        names = ", ".join(found.names[:50]) + (", ..." if len(found.names) > 50 else "")
        raise DataError(f"data file {path} (columns {names}): " + "; ".join(faults))


def read_parquet(path: Path, schema: ClickSchema, log: FaultLog, columns: Mapping[str, str]) -> Iterator[NumberedRows]:
    """Reads one file, 16 384 rows at a time.

    Args:
        path: the file; :func:`check_parquet` has passed it.
        schema: the columns.
        log: takes the faults; in their messages a row number, from 1, stands where a text file has the line.
        columns: as for :func:`check_parquet`.

    Yields:
        The good rows, in file order.

    Raises:
        DataError: a broken row or page, unless ``log`` skips them.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    names = {name: columns.get(name, name) for name in ("label", *schema.dense_names, *schema.sparse_names)}
    seen = 0
    with pq.ParquetFile(path) as file:
        batches = file.iter_batches(batch_size=_ROWS_AT_ONCE, columns=list(names.values()))
        while True:
            try:
                batch = next(batches, None)
            except (pa.ArrowException, OSError) as error:
                where = f"the page is damaged ({str(error).splitlines()[0]})"
                fault = RowFault(reason=Reason.CUT_STREAM, where=where, remedy="copy or write the file again")
                log.report(path, seen + 1, fault)
                return
            if batch is None:
                return
            numbered = _decode(path, batch, schema, names, log, seen)
            seen = numbered.seen
            yield numbered


@dataclass(frozen=True, kw_only=True, eq=False)
class _Bags:
    """One sparse feature: ``ids`` int64 (V,), ``lengths`` int64 (N,) or None for ones, ``bad`` bool (N,)."""

    ids: NDArray[np.int64]
    lengths: NDArray[np.int64] | None
    bad: NDArray[np.bool_]


def _decode(
    path: Path, batch: Any, schema: ClickSchema, names: Mapping[str, str], log: FaultLog, seen: int
) -> NumberedRows:
    count = int(batch.num_rows)
    labels = _numbers(batch.column(names["label"]))
    dense = np.empty((count, len(schema.dense_names)))
    for index, name in enumerate(schema.dense_names):
        dense[:, index] = _numbers(batch.column(names[name]))
    bags = [
        _bags(batch.column(names[name]), size)
        for name, size in zip(schema.sparse_names, schema.num_embeddings, strict=True)
    ]
    bad = np.column_stack([(labels != 0) & (labels != 1), np.isinf(dense), *(feature.bad for feature in bags)])
    good: NDArray[np.bool_] = np.logical_not(bad.any(axis=1))
    for row in np.flatnonzero(~good):
        column = int(np.argmax(bad[row]))
        field = list(names.values())[column]
        log.report(path, seen + int(row) + 1, _fault(field, column, batch.column(field)[int(row)].as_py(), schema))
    ids, lengths = _interleave(bags, count)
    missing = np.isnan(dense)
    rows = ClickRows(
        labels=labels.astype(np.float32),
        dense=transform_dense(np.where(good[:, None], dense, 0.0), missing),
        ids=ids,
        lengths=lengths,
    )
    return NumberedRows(rows=rows.where(good), numbers=seen + np.flatnonzero(good), seen=seen + count)


def _numbers(array: Any) -> NDArray[np.float64]:
    """A numeric or boolean column as float64 (N,), null as NaN."""
    import pyarrow as pa

    return np.asarray(array.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False), dtype=np.float64)


def _bags(array: Any, num_embeddings: int) -> _Bags:
    """A category column, one-hot or multi-hot."""
    if not _is_list(array.type):
        ids, bad = _ids(array, num_embeddings)
        return _Bags(ids=ids, lengths=None, bad=bad)
    null_N = np.asarray(array.is_null().to_numpy(zero_copy_only=False))
    values, bad_value = _ids(array.flatten(), num_embeddings)  # the values of the lists that are not null
    lengths = np.asarray(array.value_lengths().fill_null(1).to_numpy(zero_copy_only=False)).astype(np.int64)
    present_V = np.repeat(~null_N, lengths)
    ids = np.zeros(len(present_V), dtype=np.int64)
    ids[present_V] = values
    row_V = np.repeat(np.arange(len(lengths)), lengths)[present_V]
    bad = np.bincount(row_V[bad_value], minlength=len(lengths)) > 0
    return _Bags(ids=ids, lengths=lengths, bad=bad)


def _ids(array: Any, num_embeddings: int) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Embedding rows (V,) of categories, and which categories are bad."""
    import pyarrow as pa

    null = np.asarray(array.is_null().to_numpy(zero_copy_only=False))
    if pa.types.is_integer(array.type):
        raw = np.asarray(array.fill_null(0).to_numpy(zero_copy_only=False)).astype(np.uint64)
        missing, bad = null, np.zeros(len(raw), dtype=np.bool_)
    else:
        text = array.cast(pa.large_string())
        _, offsets_buffer, data_buffer = text.buffers()
        offsets = np.frombuffer(offsets_buffer, dtype=np.int64, count=text.offset + len(text) + 1)[text.offset :]
        data = data_buffer[int(offsets[0]) : int(offsets[-1])].to_pybytes() if data_buffer is not None else b""
        starts = offsets - offsets[0]
        raw, missing, bad = ByteFields(data).categories(starts[:-1], np.diff(starts))
        missing, bad = missing | null, bad & ~null
    return hash_categories(raw, missing, np.asarray(num_embeddings, dtype=np.uint64)), bad


def _interleave(bags: list[_Bags], count: int) -> tuple[NDArray[np.int64], NDArray[np.int64] | None]:
    """Row-major ids and lengths (N, F) of features that come one after the other."""
    if all(feature.lengths is None for feature in bags):
        return np.column_stack([feature.ids for feature in bags]).reshape(-1), None
    one = np.ones(count, dtype=np.int64)
    lengths_NF = np.column_stack([one if feature.lengths is None else feature.lengths for feature in bags])
    ends = np.cumsum(lengths_NF.reshape(-1)).reshape(lengths_NF.shape)
    ids = np.empty(int(lengths_NF.sum()), dtype=np.int64)
    for index, feature in enumerate(bags):
        lengths = lengths_NF[:, index]
        # bag n of the feature moves from where the feature's own bags before it end to its place in row n
        shift = ends[:, index] - np.cumsum(lengths)
        ids[np.arange(len(feature.ids)) + np.repeat(shift, lengths)] = feature.ids
    return ids, lengths_NF


def _is_list(kind: Any) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind))


def _type_fault(kind: Any, name: str, schema: ClickSchema) -> str:
    """What to give instead of a column of this type; empty when it can be read."""
    import pyarrow as pa

    numeric = pa.types.is_integer(kind) or pa.types.is_floating(kind)
    if name == "label":
        return "" if numeric or pa.types.is_boolean(kind) else "write 0 and 1 as integers"
    if name in schema.dense_names:
        return "" if numeric or pa.types.is_null(kind) else "write numbers as integers or floating point"
    inner = kind.value_type if _is_list(kind) else kind
    inner = inner.value_type if pa.types.is_dictionary(inner) else inner
    readable = (pa.types.is_integer, pa.types.is_string, pa.types.is_large_string, pa.types.is_null)
    if any(is_kind(inner) for is_kind in readable):
        return ""
    return "write categories as strings of 8 hexadecimal digits, integers, or lists of either"


def _fault(field: str, column: int, value: object, schema: ClickSchema) -> RowFault:
    shown = repr(value)
    where = f"field {field!r}: value {shown if len(shown) <= 60 else shown[:57] + '...'}"
    if column == 0:
        return RowFault(reason=Reason.LABEL, where=f"{where} is not 0 or 1", remedy="correct it")
    if column <= len(schema.dense_names):
        return RowFault(
            reason=Reason.INTEGER,
            where=f"{where} is not a finite number",
            remedy="correct it or write null for a missing value",
        )
    return RowFault(
        reason=Reason.CATEGORY,
        where=f"{where} is not 8 hexadecimal digits",
        remedy="correct it or write null for a missing value",
    )

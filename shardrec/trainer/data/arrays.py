"""Columns of Arrow: one array of each, masks of its values as NumPy has them, and what their types are.

pyarrow is imported by the functions that need it, here and in the files beside: generated data do without, and it
starts threads, after which ranks could not be forked (``benchmarks/harness/template.py``). It has no type information,
so that its names in signatures are for readers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import pyarrow as pa


def plain(array: pa.Array | pa.ChunkedArray) -> pa.Array:
    """One array of values, without a dictionary."""
    import pyarrow as pa

    array = whole(array)
    return array.dictionary_decode() if pa.types.is_dictionary(array.type) else array


def whole(array: pa.Array | pa.ChunkedArray) -> pa.Array:
    """One array, of values, a dictionary, or lists of any length. Views, which Polars and DuckDB write, are copied."""
    import pyarrow as pa

    if isinstance(array, pa.ChunkedArray):
        array = array.combine_chunks()
    kind = _without_views(array.type)
    if kind != array.type:
        array = array.cast(kind)
    if pa.types.is_fixed_size_list(array.type):
        array = array.cast(pa.large_list(array.type.value_type))
    return array


def _without_views(kind: pa.DataType) -> pa.DataType:
    """The type of the same values in which all of Arrow's functions take them."""
    import pyarrow as pa

    types = pa.types
    if types.is_string_view(kind):
        return pa.large_string()
    if types.is_binary_view(kind):
        return pa.large_binary()
    if types.is_list_view(kind) or types.is_large_list_view(kind):
        return pa.large_list(_without_views(kind.value_type))
    if is_list(kind) and (inner := _without_views(kind.value_type)) != kind.value_type:
        return pa.large_list(inner)
    return kind


def plain_column(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """The column, of values or lists of them, without a dictionary, which could differ from block to block."""
    import pyarrow as pa

    kind, types = column.type, pa.types
    if types.is_dictionary(kind):
        return column.cast(kind.value_type)
    if not is_list(kind) or not types.is_dictionary(kind.value_type):
        return column
    values = kind.value_type.value_type
    if types.is_large_list(kind):
        return column.cast(pa.large_list(values))
    return column.cast(pa.list_(values, kind.list_size if types.is_fixed_size_list(kind) else -1))


def whole_numbers(texts: pa.Array) -> pa.Array | None:
    """Texts as int64 if each but nulls is how a whole number is written: ``7``, not ``07`` or ``7.0``. Else None."""
    import pyarrow as pa
    import pyarrow.compute as pc

    try:
        numbers = texts.cast(pa.int64())
    except pa.ArrowException:
        return None
    # pyarrow also takes 07 and -0, which are longer than what the number is written as, and 0x7.
    values = numbers.drop_null().to_numpy()
    sizes = np.abs(values).view(np.uint64)
    most, digits = int(sizes.max(initial=0)), len(values) + np.count_nonzero(values < 0)
    digits += sum(np.count_nonzero(sizes >= 10**place) for place in range(1, len(str(most))))
    content = b"" if texts.buffers()[2] is None else texts.buffers()[2].to_pybytes()
    is_short = digits == (pc.sum(pc.binary_length(texts)).as_py() or 0)
    return numbers if is_short and b"x" not in content and b"X" not in content else None


def finite_numbers(texts: pa.Array) -> pa.Array | None:
    """Texts as float64 if each but nulls is a finite number. Else None."""
    import pyarrow as pa
    import pyarrow.compute as pc

    try:
        numbers = texts.cast(pa.float64())
    except pa.ArrowException:
        return None
    return None if pc.all(pc.is_finite(numbers)).as_py() is False else numbers


def mask(array: pa.BooleanArray) -> NDArray[np.bool_]:
    """Truth values (N,), none of them null."""
    return np.asarray(array.to_numpy(zero_copy_only=False), dtype=np.bool_)


def is_null(array: pa.Array) -> NDArray[np.bool_]:
    """Which values, (N,), are null."""
    return mask(array.is_null()) if array.null_count else np.zeros(len(array), dtype=np.bool_)


def is_list(kind: pa.DataType) -> bool:
    """Whether a type is one of lists."""
    import pyarrow as pa

    types = pa.types
    of_offsets = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
    return bool(of_offsets or types.is_list_view(kind) or types.is_large_list_view(kind))


def is_number(kind: pa.DataType) -> bool:
    """Whether a type is one of numbers or truth values."""
    import pyarrow as pa

    types = pa.types
    return bool(types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind) or types.is_decimal(kind))


def is_text(kind: pa.DataType) -> bool:
    """Whether a type is one of texts or bytes."""
    return str(kind) in ("string", "large_string", "binary", "large_binary", "string_view", "binary_view")


def values_of(kind: pa.DataType) -> str:
    """What values of a type are, where two files may not differ. Whole and broken numbers are the same."""
    import pyarrow as pa

    if is_list(kind):
        inner = values_of(kind.value_type)
        return f"lists of {inner}" if inner else ""
    if pa.types.is_dictionary(kind):
        return values_of(kind.value_type)
    if pa.types.is_null(kind):
        return ""
    return "dates" if pa.types.is_temporal(kind) else "numbers" if is_number(kind) else "texts"

"""What columns of Arrow are made of."""

from __future__ import annotations

from typing import Any

__all__ = ["is_fraction", "is_list", "is_text", "plain", "whole"]


def plain(array: Any) -> Any:
    """One array of values, without a dictionary."""
    import pyarrow as pa

    array = whole(array)
    return array.dictionary_decode() if pa.types.is_dictionary(array.type) else array


def whole(array: Any) -> Any:
    """One array, of values, a dictionary, or lists of any length."""
    import pyarrow as pa

    if isinstance(array, pa.ChunkedArray):
        array = array.combine_chunks()
    if pa.types.is_fixed_size_list(array.type):
        array = array.cast(pa.large_list(array.type.value_type))
    return array


def is_list(kind: Any) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def is_fraction(kind: Any) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_floating(kind) or pa.types.is_decimal(kind))


def is_text(kind: Any) -> bool:
    import pyarrow as pa

    checks = (pa.types.is_string, pa.types.is_large_string, pa.types.is_binary, pa.types.is_large_binary)
    return any(check(kind) for check in checks)

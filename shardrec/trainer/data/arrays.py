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
    """Whether a type is one of lists."""
    import pyarrow as pa

    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def is_fraction(kind: Any) -> bool:
    """Whether a type has numbers that are not whole."""
    import pyarrow as pa

    return bool(pa.types.is_floating(kind) or pa.types.is_decimal(kind))


def is_text(kind: Any) -> bool:
    """Whether a type is one of texts or bytes."""
    return str(kind) in ("string", "large_string", "binary", "large_binary")

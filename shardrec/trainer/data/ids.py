"""Which id a value is, in files, requests, records and vocabularies alike.

A table's values are spelled as *numbers* if every training value is a whole number, and else as *texts*, such as
versions (:mod:`shardrec.trainer.data.spelling`). A run records which.

| value | spelled as numbers | spelled as texts |
|---|---|---|
| integer, boolean, whole decimal or float. Text such as ``7`` | the number | the number |
| text such as ``7.`` or ``7.00`` | the number | the text |
| text of a float that may have lost digits: 2^53 or more, or ``1.2e+17`` | none | the text |
| another text (``07``, ``+7``, ``-0``, ``1.10``) | the text | the text |
| decimal or float with a fraction | none; in a vocabulary its text | |
| float that may have lost digits: 2^53 or more (float32: 2^24) | none | none |

Of a feed, whose values are never all known, each value counts as spelled as a number.

Legend: V values of one column.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from shardrec.launch import has_operators
from shardrec.trainer.data.arrays import is_null, is_text, mask, plain, whole_numbers
from shardrec.trainer.data.preprocess import mixed

if TYPE_CHECKING:
    import pyarrow as pa

ID_WORDS = "give a text in UTF-8, or a whole number; as a float one below 2^53 (float32: 2^24), where it is exact"
_OF_FLOATS = r"^-?(0|[1-9][0-9]*)(\.0*|\.[0-9]+[eE][+]?[0-9]+)$"
_WHOLE = r"^-?(0|[1-9][0-9]*)(\.0*|\.[0-9]+[eE][+]?[0-9]+)?$"


def present(array: pa.Array | pa.ChunkedArray, missing: Sequence[str]) -> pa.Array | pa.ChunkedArray:
    """An array of values (V,) without a dictionary, with a null for each text that means a missing value."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if not is_text(array.type) or not len(array):
        return array
    is_missing = pc.is_in(array, value_set=pa.array(["", *missing], pa.string()).cast(array.type), skip_nulls=True)
    return pc.if_else(is_missing, None, array) if pc.any(is_missing).as_py() else array


def are_whole(array: pa.Array) -> bool:
    """Whether an array (V,) is of numbers, or of texts that are whole numbers, but for nulls."""
    import pyarrow.compute as pc

    if not is_text(array.type) or whole_numbers(array) is not None:  # most columns, without a pattern
        return True
    return pc.all(pc.match_substring_regex(array, _WHOLE)).as_py() is not False


def id_keys(
    array: pa.Array | pa.ChunkedArray, *, as_texts: bool = False, spread: bool = True
) -> tuple[NDArray[np.uint64], NDArray[np.bool_], NDArray[np.bool_]]:
    """A column of ids as 64-bit keys (V,), which are missing, and which are bad.

    Args:
        array: texts or numbers.
        as_texts: whether texts are ids as they are written.
        spread: spread numbers over all 64 bits, as texts are; else a number is its own key.
    """
    import pyarrow as pa

    values, fraction, bad = _ids(plain(array), as_texts)
    null = is_null(values)
    if pa.types.is_null(values.type):
        return np.zeros(len(null), dtype=np.uint64), null, bad
    if is_text(values.type):
        raw, empty, _ = text_keys(values, spread=spread)
        return raw, null | empty, bad | fraction
    whole = np.asarray((values.fill_null(0) if values.null_count else values).to_numpy(zero_copy_only=False))
    raw = whole.astype(np.int64, copy=False).astype(np.uint64)  # of unsigned ones the same bits
    return (mixed(raw) if spread else raw), null, bad | fraction


def vocabulary_places(
    array: pa.Array | pa.ChunkedArray, vocabulary: Sequence[str], *, as_texts: bool = False
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """The place of each value (V,) in a vocabulary, -1 for another value; and which are bad.

    A value as its column writes it (``false``, ``7.0``), which vocabularies of older versions have, goes before its id.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    written, ids, bad = id_texts(array, as_texts=as_texts)
    known_written, known, _ = id_texts(pa.array(vocabulary, pa.string()), as_texts=as_texts)
    places = pc.index_in(written, value_set=known_written)
    if places.null_count and not (ids.equals(written) and known.equals(known_written)):
        places = pc.coalesce(places, pc.index_in(ids, value_set=known))
    numbers = np.asarray(places.fill_null(-1).to_numpy(zero_copy_only=False)).astype(np.int64)
    return numbers, bad & (numbers < 0)


def id_texts(
    array: pa.Array | pa.ChunkedArray, *, as_texts: bool = False
) -> tuple[pa.Array, pa.Array, NDArray[np.bool_]]:
    """Values as written and their ids, null for missing ones, as large_binary arrays (V,); and which are bad."""
    import pyarrow as pa
    import pyarrow.compute as pc

    def as_binary(array: pa.Array) -> pa.Array:
        return (array if is_text(array.type) else array.cast(pa.string())).cast(pa.large_binary())

    array = plain(array)
    if is_text(array.type):  # which is to be UTF-8 here, whatever its type says
        array = array.cast(pa.large_binary()).view(pa.large_string())
    (values, fraction, bad), written = _ids(array, as_texts), as_binary(array)
    ids = written if values is array else as_binary(values)
    return written, pc.if_else(pa.array(fraction), written, ids) if fraction.any() else ids, bad


def exact_below(kind: pa.DataType) -> float:
    """The number below which floats of an Arrow type tell whole numbers apart. Infinite for other types."""
    import pyarrow as pa

    return {16: 2.0**11, 32: 2.0**24, 64: 2.0**53}[kind.bit_width] if pa.types.is_floating(kind) else np.inf


def _ids(array: pa.Array, as_texts: bool) -> tuple[pa.Array, NDArray[np.bool_], NDArray[np.bool_]]:
    """The ids of an Arrow array (V,), integers or texts; which have a fraction, and which others are none."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if is_text(array.type):
        return _text_ids(array, as_texts)
    fraction, bad = np.zeros((2, len(array)), dtype=np.bool_)
    if pa.types.is_boolean(array.type):
        array = array.cast(pa.int8())
    elif pa.types.is_decimal(array.type):  # which floats would round
        whole = array.cast(pa.decimal256(76, 0), safe=False)
        fraction = ~mask(pc.equal(whole.cast(array.type, safe=False), array).fill_null(True))
        array = whole.cast(pa.string())
    elif pa.types.is_floating(array.type):
        numbers = np.asarray(array.cast(pa.float64()).to_numpy(zero_copy_only=False))  # NaN for a null
        bad = np.abs(numbers) >= exact_below(array.type)
        lacks = bad | (numbers != np.floor(numbers))
        fraction = lacks & ~bad & ~np.isnan(numbers)
        array = pa.array(np.where(lacks, 0, numbers).astype(np.int64), mask=lacks)
    return array, fraction, bad


def _text_ids(array: pa.Array, as_texts: bool) -> tuple[pa.Array, NDArray[np.bool_], NDArray[np.bool_]]:
    """:func:`_ids` of texts, most columns of which are looked through once, for a '.'."""
    import pyarrow as pa
    import pyarrow.compute as pc

    fraction, bad = np.zeros((2, len(array)), dtype=np.bool_)
    buffer, texts = array.buffers()[2], array.cast(pa.large_binary())
    content = b"" if buffer is None else buffer.to_pybytes()
    if not content.isascii() and (pa.types.is_string(array.type) or pa.types.is_large_string(array.type)):
        try:
            array.validate(full=True)
        except pa.ArrowInvalid:  # which names the first one only
            bad[:] = [text is not None and text.decode(errors="ignore").encode() != text for text in texts.to_pylist()]
    if as_texts or b"." not in content:
        return array, fraction, bad
    data, starts, lengths = _bytes(texts)
    last = data.take(starts + lengths - 1, mode="clip")  # of most names of sites and files a letter
    ends_so = (last == ord(".")) | ((last >= ord("0")) & (last <= ord("9")))
    matches = mask(pc.match_substring_regex(texts.filter(pa.array(ends_so)), _OF_FLOATS).fill_null(False))
    places = np.flatnonzero(ends_so)[matches]
    if not len(places):
        return array, fraction, bad
    floats = texts.take(pa.array(places)).cast(pa.large_string())
    numbers = np.asarray(floats.cast(pa.float64()).to_numpy(zero_copy_only=False))
    has_exponent = mask(pc.match_substring(floats, "e", ignore_case=True))
    inexact = has_exponent | (np.abs(numbers) >= exact_below(pa.float64()))
    bad[places[inexact]], is_whole = True, np.zeros(len(array), dtype=np.bool_)
    is_whole[places[~inexact]] = True
    whole = pa.array(numbers[~inexact].astype(np.int64)).cast(pa.string()).cast(pa.large_binary())
    return pc.replace_with_mask(texts, pa.array(is_whole), whole), fraction, bad


def text_keys(
    array: pa.Array, *, hexadecimal: bool = False, spread: bool = False
) -> tuple[NDArray[np.uint64], NDArray[np.bool_], NDArray[np.bool_]]:
    """Texts as 64-bit keys (N,), which are empty, and which are no hexadecimal numbers although they are to be."""
    import pyarrow as pa
    import pyarrow.compute as pc

    def matches(texts: pa.LargeBinaryArray, pattern: str) -> NDArray[np.bool_]:
        return mask(pc.match_substring_regex(texts, pattern).fill_null(False))

    if has_operators() and len(array):  # an empty column may have no offsets
        is_large = pa.types.is_large_string(array.type) or pa.types.is_large_binary(array.type)
        _, offsets_buffer, data_buffer = array.buffers()
        kind, count = pa.int64() if is_large else pa.int32(), array.offset + len(array) + 1
        offsets = torch.from_dlpack(pa.Array.from_buffers(kind, count, [None, offsets_buffer]))[array.offset :]
        content = torch.empty(0, dtype=torch.uint8)
        if data_buffer is not None and data_buffer.size:
            content = torch.from_dlpack(pa.Array.from_buffers(pa.uint8(), data_buffer.size, [None, data_buffer]))
        keys, bad = torch.ops.shardrec.text_keys(content, offsets, hexadecimal, spread)
        return keys.numpy().view(np.uint64), (offsets[1:] == offsets[:-1]).numpy(), bad.numpy()
    texts = array.cast(pa.large_binary())
    data, starts, lengths = _bytes(texts)
    raw, missing = np.zeros(len(texts), dtype=np.uint64), lengths == 0
    if hexadecimal:
        is_number = matches(texts, r"^[0-9a-fA-F]{1,16}$")
        digits = texts.filter(pa.array(is_number)).cast(pa.string())
        raw[is_number] = pc.binary_join_element_wise("0x", digits, "").cast(pa.uint64()).to_numpy()
        return raw, missing, ~(is_number | missing)
    is_short, is_long = matches(texts, r"^(0|-?[1-9][0-9]{0,17})$"), matches(texts, r"^-?[1-9][0-9]{18,19}$")
    small = texts.filter(pa.array(is_short)).cast(pa.large_string()).cast(pa.int64())
    raw[is_short] = small.to_numpy().view(np.uint64)
    large = [int(text) for text in texts.filter(pa.array(is_long)).to_pylist()]
    fits = np.array([-(2**63) <= number < 2**64 for number in large], dtype=np.bool_)
    raw[is_long] = np.array([number % 2**64 for number in large], dtype=np.uint64)
    raw = mixed(raw) if spread else raw
    is_long[is_long] = fits
    text = np.flatnonzero(~(is_short | is_long))
    raw[text] = hash_texts(data, starts[text], lengths[text])
    return raw, missing, np.zeros(len(raw), dtype=np.bool_)


def hash_texts(data: NDArray[np.uint8], starts: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[np.uint64]:
    """64-bit hashes of texts, the same on every machine: a polynomial of the bytes, then mixed.

    Args:
        data: the bytes of all of them.
        starts: (V,) first byte of each.
        lengths: (V,) bytes of each.
    """
    total = int(lengths.sum())
    ends = np.cumsum(lengths)
    place = np.arange(total) - np.repeat(ends - lengths, lengths)
    most = int(lengths.max()) if len(lengths) else 0
    powers = np.cumprod(np.full(most + 1, 0x9E3779B97F4A7C15, dtype=np.uint64))
    terms = (data[np.repeat(starts, lengths) + place].astype(np.uint64) + np.uint64(1)) * powers[place]
    sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(terms)])
    return mixed(sums[ends] - sums[ends - lengths])


def _bytes(array: pa.LargeBinaryArray) -> tuple[NDArray[np.uint8], NDArray[np.int64], NDArray[np.int64]]:
    """The bytes of a large_binary column, and the first of each value and how many it has (none of a null)."""
    _, offsets_buffer, data_buffer = array.buffers()
    offsets = np.frombuffer(offsets_buffer, dtype=np.int64, count=array.offset + len(array) + 1)[array.offset :]
    data = np.zeros(1, dtype=np.uint8)
    if data_buffer is not None and data_buffer.size:
        data = np.frombuffer(data_buffer, dtype=np.uint8)
    return data, offsets[:-1], np.diff(offsets)

"""Columns of an Arrow table as a model's input, by a :class:`~shardrec.data.spec.FeatureSpec`.

What is wrong with a row is found by vectorised checks, which say *that* it is; a message is made of its value then.

pyarrow is imported by the functions that need it: generated data do without, and it starts threads, after which ranks
could not be forked (``benchmarks/harness/template.py``).

Legend: N rows, D dense features, F sparse features, V ids of one feature.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from shardrec import native
from shardrec.data.fault import Reason, RowFault, shown_scalar
from shardrec.data.preprocess import days, hash_categories, mixed, transform_dense
from shardrec.data.rows import NO_TIME, ClickRows, bags_at
from shardrec.data.spec import Feature, FeatureSpec
from shardrec.data.tasks import Task

__all__ = ["Dictionary", "Encoded", "column_fault", "count_values", "encode", "group_keys", "hash_texts", "row_numbers"]

_NO_NUMBER = "is not a finite number among numbers, nor a date among dates"
_MAX = float(np.finfo(np.float32).max)
_TOO_LARGE = "is too large for a float32"
_NUMBER = r"^[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?$"
_NIBBLES = np.full(256, 255, dtype=np.uint8)
for _digits in (b"0123456789abcdef", b"0123456789ABCDEF"):
    _NIBBLES[np.frombuffer(_digits, dtype=np.uint8)] = np.arange(16)


@dataclass(frozen=True, kw_only=True, eq=False)
class Encoded:
    """N rows of a table.

    Attributes:
        rows: all of them; what a bad one has is not to be used.
        faults: of bad rows, by their number from 0.
    """

    rows: ClickRows
    faults: dict[int, RowFault]


@dataclass(frozen=True, kw_only=True, eq=False)
class Dictionary:
    """The distinct values of a column, an Arrow array (D,), and what they are with a null after them.

    Attributes:
        values: without the null.
        ids: int64 (D + 1,).
        bad: bool (D + 1,), which are no ids.
    """

    values: Any
    ids: NDArray[np.int64]
    bad: NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True, eq=False)
class _Bags:
    """One feature: ``ids`` int64 (V,), ``lengths`` int64 (N,) or None for ones, ``weights`` float32 (V,) or None."""

    ids: NDArray[np.int64]
    lengths: NDArray[np.int64] | None
    weights: NDArray[np.float32] | None
    bad: NDArray[np.bool_]
    bad_weights: NDArray[np.bool_] | None = None


def encode(
    table: Any, spec: FeatureSpec, *, labelled: bool = True, dictionaries: dict[str, Dictionary] | None = None
) -> Encoded:
    """The rows of a table (N rows) that has the spec's columns.

    Args:
        table: a ``pyarrow.Table`` or ``RecordBatch``.
        spec: what the columns are.
        labelled: whether the columns of label, group and event time are there; without, labels are 0.
        dictionaries: by name of the feature, those of the table before, whose ids are not made again where a column
            has the same values; replaced by this table's, but for a dictionary that is larger than the table.
    """
    count = int(table.num_rows)
    bads: list[tuple[str, Reason, str, NDArray[np.bool_]]] = []
    labels, groups, row_weights, times = np.zeros(count, dtype=np.float32), None, None, None
    if labelled and spec.labels:
        labels = np.column_stack([_task_labels(table, task, bads) for task in spec.labels])
        if spec.weight is not None:
            values, missing, bad = _numbers(table[spec.weight])
            bad |= missing | (values < 0) | (values > _MAX)
            row_weights = np.where(bad, 0, values).astype(np.float32)
            bads.append((spec.weight, Reason.NUMBER, "is no weight, a number of at least 0", bad))
    elif labelled:
        label, missing, bad = _numbers(table[spec.label.column])
        bad = bad | missing
        if spec.label.above is None:
            bad |= (label != 0) & (label != 1)
            words = "is not 0 or 1"
        else:
            label = (label > spec.label.above).astype(np.float64)
            words = "is not a number"
        labels = np.where(bad, 0, label).astype(np.float32)
        bads.append((spec.label.column, Reason.LABEL, words, bad))
    if labelled and spec.group is not None:
        groups, missing, bad = _keys(table[spec.group])
        bads.append((spec.group, Reason.ID, "is no id of a group", bad | missing))
    if labelled and spec.event_time is not None:
        times, bad = _event_times(table[spec.event_time])
        bads.append((spec.event_time, Reason.TIME, "is no date and time, nor seconds or milliseconds since 1970", bad))
    dense = np.ones((count, len(spec.dense) or 1), dtype=np.float32)
    for index, feature in enumerate(spec.dense):
        values, missing, bad = _numbers(table[feature.source])
        transformed = _transformed(feature, np.where(bad, 0.0, values) if bad.any() else values, missing)
        large = np.abs(transformed) > _MAX
        dense[:, index] = np.where(large, 0.0, transformed) if large.any() else transformed
        bads += [(feature.source, Reason.NUMBER, _NO_NUMBER, bad), (feature.source, Reason.NUMBER, _TOO_LARGE, large)]
    bags = [_bags(table, feature, dictionaries) for feature in spec.sparse]
    for feature, bag in zip(spec.sparse, bags, strict=True):
        bads.append((feature.source, Reason.ID, _id_words(feature), bag.bad))
        if bag.bad_weights is not None:
            words = f"has not a finite weight for each id of {feature.source!r}"
            bads.append((str(feature.weights), Reason.NUMBER, words, bag.bad_weights))
    ids, lengths, weights = _interleave(bags, count, weighted=spec.schema_.weighted)
    rows = ClickRows(
        labels=labels,
        dense=dense,
        ids=ids,
        lengths=lengths,
        weights=weights,
        groups=groups,
        row_weights=row_weights,
        times=times,
    )
    return Encoded(rows=rows, faults=_faults(table, bads))


def _task_labels(table: Any, task: Task, bads: list[tuple[str, Reason, str, NDArray[np.bool_]]]) -> NDArray[np.float32]:
    """The labels of a task, NaN where rows may lack it and do; adds to ``bads`` which values are none."""
    array = _plain(table[task.source])
    values, missing, bad = _numbers(array)
    if not _is_text(array.type):  # of which a NaN counts as missing
        bad = bad | (missing & ~np.asarray(array.is_null().to_numpy(zero_copy_only=False)))
    bad = bad | (~missing & ~task.takes(values))
    bads.append((task.source, Reason.LABEL, task.words, bad))
    if not task.optional:
        words = "is missing: give the label, or optional: true in labels"
        bads.append((task.source, Reason.LABEL, words, missing))
    labels = values if task.above is None else values > task.above
    return np.where(missing, np.nan, np.where(bad, 0, labels)).astype(np.float32)


def _faults(table: Any, bads: Sequence[tuple[str, Reason, str, NDArray[np.bool_]]]) -> dict[int, RowFault]:
    """The first fault of each bad row, in the order of the rows."""
    faults: dict[int, RowFault] = {}
    for column, reason, words, bad in bads:
        for row in np.flatnonzero(bad).tolist():
            if row not in faults:
                where = f"field {column!r}: value {shown_scalar(table[column][row])} {words}"
                faults[row] = RowFault(reason=reason, where=where, remedy="correct it")
    return dict(sorted(faults.items()))


def column_fault(kind: Any, name: str, spec: FeatureSpec) -> str:
    """What to give instead of a column of this type; empty when it can be read."""
    import pyarrow as pa

    numeric = {*spec.label_sources, *(feature.source for feature in spec.dense)}
    inner = kind.value_type if _is_list(kind) else kind
    inner = inner.value_type if pa.types.is_dictionary(inner) else inner
    number = pa.types.is_integer(inner) or _is_fraction(inner) or pa.types.is_boolean(inner)
    readable = number or _is_text(inner) or pa.types.is_null(inner)
    if pa.types.is_date(kind) or pa.types.is_timestamp(kind):
        as_ids = {spec.group, *(feature.source for feature in spec.sparse if feature.coding != "buckets")}
        return "a date is read as a number of days: give boundaries, or kind: dense" if name in as_ids else ""
    if name in numeric and (_is_list(kind) or not readable):
        return "write numbers"
    if name == spec.event_time and (_is_list(kind) or pa.types.is_boolean(inner) or not readable):
        return "write timestamps, seconds or milliseconds since 1970, or texts in ISO 8601"
    if name == spec.group and _is_list(kind):
        return "write one text or whole number for each row"
    return "" if readable else "write ids as texts or numbers, or lists of either"


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


def _numbers(array: Any) -> tuple[NDArray[np.float64], NDArray[np.bool_], NDArray[np.bool_]]:
    """A column of numbers or dates, or of texts of them, as float64 (N,): values, which are missing, which are bad.

    A date or time is the days since 1970-01-01.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    array = _plain(array)
    if _is_text(array.type):
        array = array.cast(pa.large_binary())
        missing = np.asarray(pc.equal(array, b"").fill_null(True).to_numpy(zero_copy_only=False))
        bad = np.zeros(len(array), dtype=np.bool_)
        zero = pa.scalar(b"0", pa.large_binary())
        try:
            numbers = pc.if_else(pa.array(missing), zero, array).cast(pa.large_string()).cast(pa.float64())
        except pa.ArrowInvalid:  # which does not say where
            good = pc.match_substring_regex(array, _NUMBER).fill_null(False)
            bad = ~np.asarray(good.to_numpy(zero_copy_only=False)) & ~missing
            numbers = pc.if_else(good, array, zero).cast(pa.large_string()).cast(pa.float64())
        values = np.asarray(numbers.to_numpy(zero_copy_only=False))
        if bad.any():
            values = values.copy()
            values[bad] = [days(text) for text in array.filter(pa.array(bad)).to_pylist()]
            # A date among numbers is a mistake, and so is a number among dates.
            dates, numbers = bad & np.isfinite(values), ~bad & ~missing
            values[numbers if dates.sum() > numbers.sum() else dates] = np.nan
        return np.where(np.isnan(values), 0.0, values), missing, ~np.isfinite(values)
    if pa.types.is_null(array.type):
        return np.zeros(len(array)), np.ones(len(array), np.bool_), np.zeros(len(array), np.bool_)
    if pa.types.is_date(array.type) or pa.types.is_timestamp(array.type):
        zone = array.type.tz if pa.types.is_timestamp(array.type) else None
        array = array.cast(pa.timestamp("us", zone), safe=False)
        array = pc.divide(array.cast(pa.int64()).cast(pa.float64(), safe=False), 86_400e6)
    values = np.asarray(array.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False), dtype=np.float64)
    missing = np.isnan(values)  # as a null is now
    return np.where(missing, 0.0, values), missing, np.isinf(values)


def _event_times(array: Any) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Seconds since 1970 (N,) of dates and times, numbers, or texts of either; and which are none, whose time is 0."""
    import pyarrow as pa
    import pyarrow.compute as pc

    array = _plain(array)
    times, (missing, bad) = np.zeros(len(array)), np.zeros((2, len(array)), dtype=np.bool_)
    is_date = np.full(len(array), pa.types.is_temporal(array.type))
    if _is_text(array.type):
        is_date = ~np.asarray(pc.match_substring_regex(array, _NUMBER).fill_null(False).to_numpy(zero_copy_only=False))
    for kind in (is_date, ~is_date):  # so that what a text is does not depend on those beside it
        times[kind], missing[kind], bad[kind] = _numbers(array.filter(pa.array(kind)))
    times = np.where(is_date, 86_400 * times, np.where(np.abs(times) < 1e11, times, times / 1000))
    bad = bad | missing | (np.abs(times) >= -NO_TIME)
    return np.where(bad, 0, times), bad


def _transformed(feature: Feature, values: NDArray[np.float64], missing: NDArray[np.bool_]) -> NDArray[np.float64]:
    # In float64: of a time, float32 would lose the seconds before the mean is subtracted.
    with np.errstate(over="ignore"):
        transformed = transform_dense(values, missing) if feature.transform == "log" else values
        return np.where(missing, 0.0, (transformed - feature.mean) / feature.std)


def _bags(table: Any, feature: Feature, dictionaries: dict[str, Dictionary] | None) -> _Bags:
    """A feature with a table, one id a row or any number."""
    array, lengths = _flat(table[feature.source], feature)
    ids, bad_V = _ids_by_value(array, feature, dictionaries)
    if lengths is None:
        return _Bags(ids=ids, lengths=None, weights=None, bad=bad_V)
    row_V = np.repeat(np.arange(len(lengths)), lengths)
    bad = np.bincount(row_V[bad_V], minlength=len(lengths)) > 0
    weights = bad_weights = None
    if feature.weights is not None:
        weight_array, of_each = _flat(table[feature.weights], feature)
        assert of_each is not None, "a weighted feature has lists"
        values, missing, bad_W = _numbers(weight_array)
        bad_W |= missing | (np.abs(values) > _MAX)
        bad_weights = np.zeros(len(lengths), dtype=np.bool_)
        bad_weights[np.repeat(np.arange(len(of_each)), of_each)[bad_W]] = True
        weights = np.where(bad_W, 0.0, values).astype(np.float32)
        if not np.array_equal(of_each, lengths):
            fit = of_each == lengths
            bad_weights |= ~fit
            fitting, weights = weights[np.repeat(fit, of_each)], np.zeros(len(ids), dtype=np.float32)
            weights[np.repeat(fit, lengths)] = fitting
    if feature.max_length is not None:
        ends = np.cumsum(lengths)
        keep = np.repeat(ends, lengths) - np.arange(len(ids)) <= feature.max_length
        ids, lengths = ids[keep], np.minimum(lengths, feature.max_length)
        weights = None if weights is None else weights[keep]
    return _Bags(ids=ids, lengths=lengths, weights=weights, bad=bad, bad_weights=bad_weights)


def _flat(array: Any, feature: Feature) -> tuple[Any, NDArray[np.int64] | None]:
    """The values of a column, and how many each row has; None for one each.

    A null is a row without ids, or of a feature with one id a row a missing one.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    array = _whole(array)
    if feature.is_list and pa.types.is_dictionary(array.type):  # of texts with separators
        array = array.dictionary_decode()
    if feature.is_list and _is_text(array.type):
        texts = array.cast(pa.large_binary())
        array = pc.split_pattern(pc.if_else(pc.equal(texts, b""), None, texts), feature.separator)
    if not _is_list(array.type):
        return (array, np.ones(len(array), dtype=np.int64)) if feature.is_list else (array, None)
    counts = array.value_lengths().fill_null(0 if feature.is_list else 1)
    lengths = counts.to_numpy(zero_copy_only=False).astype(np.int64)
    null = np.asarray(array.is_null().to_numpy(zero_copy_only=False))
    values = array.flatten()
    if feature.is_list or not null.any():
        return values, lengths
    present = np.repeat(~null, lengths)
    places = np.cumsum(present) - 1
    return values.take(pa.array(places, mask=~present)), lengths


def _ids_by_value(
    array: Any, feature: Feature, dictionaries: dict[str, Dictionary] | None
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """:func:`_ids`, of a column with a dictionary made for its distinct values and gathered."""
    import pyarrow as pa

    if not pa.types.is_dictionary(array.type):
        return _ids(array, feature)
    values, indices = array.dictionary, array.indices
    distinct = None if dictionaries is None else dictionaries.get(feature.name)
    if distinct is None or not distinct.values.equals(values):
        is_first = dictionaries is not None and distinct is None
        if len(values) >= len(array) and not is_first:  # as one that grows with each block
            return _ids(array.dictionary_decode(), feature)
        ids, bad = _ids(pa.concat_arrays([values, pa.nulls(1, values.type)]), feature)
        distinct = Dictionary(values=values, ids=ids, bad=bad)
        if dictionaries is not None:
            dictionaries[feature.name] = distinct
    places = (indices.fill_null(len(values)) if indices.null_count else indices).to_numpy()
    none = np.zeros(len(places), dtype=np.bool_)
    return distinct.ids.take(places), distinct.bad.take(places) if distinct.bad.any() else none


def _ids(array: Any, feature: Feature) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Embedding rows (V,), or 64-bit ids of a feature with dynamic ids; and which values are bad."""
    import pyarrow as pa
    import pyarrow.compute as pc

    coding = feature.coding
    if coding == "buckets":
        values, missing, bad = _numbers(array)
        assert feature.boundaries is not None, "buckets have boundaries"
        ids = np.searchsorted(np.asarray(feature.boundaries), values, side="right") + 1
        return np.where(missing | bad, 0, ids).astype(np.int64), bad
    if coding == "number":
        values, missing, bad = _numbers(array)
        bad |= ~missing & ((values < 0) | (values >= feature.num_embeddings) | (values != np.floor(values)))
        return np.where(missing | bad, 0, values).astype(np.int64), bad
    if coding == "vocabulary":
        texts = _texts(array)
        places = pc.index_in(texts, value_set=pa.array(feature.values, pa.string()).cast(texts.type)).fill_null(-1)
        return places.to_numpy(zero_copy_only=False).astype(np.int64) + 1, np.zeros(len(array), dtype=np.bool_)
    if coding == "hexadecimal" and _is_text(array.type):
        keys, missing, bad = _text_keys(array, hexadecimal=True)
        null = np.asarray(array.is_null().to_numpy(zero_copy_only=False))  # which may have bytes
        missing, bad = missing | null, bad & ~null
    else:
        keys, missing, bad = _keys(array, spread=coding != "hexadecimal" and feature.dynamic_ids is None)
    if feature.dynamic_ids is not None:
        return np.where(missing, feature.missing_id, keys.view(np.int64)), bad
    return hash_categories(keys, missing, np.asarray(feature.num_embeddings, dtype=np.uint64)), bad


def row_numbers(array: Any, feature: Feature) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """The row of each value of an Arrow array (V,), or its dynamic id, (V,); and which are missing or have none."""
    array = _plain(array)
    rows, bad = _ids(array, feature)
    bad = bad | np.asarray(array.is_null().to_numpy(zero_copy_only=False))
    return rows, bad if feature.coding == "number" else bad | (rows == feature.missing_id)


def _texts(array: Any) -> Any:
    """Values as a vocabulary has them; texts as their bytes, which need not be UTF-8."""
    import pyarrow as pa

    if _is_text(array.type):
        return array.cast(pa.large_binary())
    return array.cast(pa.large_string()) if not pa.types.is_floating(array.type) else array.cast(pa.string())


def count_values(table: Any, feature: Feature) -> dict[str, int]:
    """How often each value of a feature that has a vocabulary occurs in a table, but missing ones and no UTF-8."""
    texts = _texts(_plain(_flat(table[feature.source], feature)[0]))
    pairs = texts.value_counts()
    counts = zip(pairs.field("values").to_pylist(), pairs.field("counts").to_pylist(), strict=True)
    named = ((value.decode(errors="replace") if isinstance(value, bytes) else value, count) for value, count in counts)
    return {value: count for value, count in named if value and "\ufffd" not in value}


def group_keys(table: Any, spec: FeatureSpec) -> NDArray[np.uint64]:
    """The key of each row's group, as :func:`encode` gives it."""
    return _keys(table[spec.group])[0]


def _keys(array: Any, *, spread: bool = True) -> tuple[NDArray[np.uint64], NDArray[np.bool_], NDArray[np.bool_]]:
    """A column of ids as 64-bit keys (N,), which are missing, and which are bad.

    A whole number has one key, whether its column is one of integers, of floats (which pandas makes of integers with
    nulls), of decimals or of texts (as all columns of a CSV file are).

    Args:
        array: texts or numbers.
        spread: spread numbers over all 64 bits, as texts are; else a number is its own key.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    array = _plain(array)
    null = np.asarray(array.is_null().to_numpy(zero_copy_only=False))
    none = np.zeros(len(array), dtype=np.bool_)
    if pa.types.is_null(array.type):
        return np.zeros(len(array), dtype=np.uint64), ~none, none
    if _is_text(array.type):
        raw, missing, _ = _text_keys(array, spread=spread)
        return raw, null | missing, none
    if pa.types.is_decimal(array.type):  # which floats would round
        whole = array.cast(pa.decimal256(76, 0), safe=False)
        is_whole = pc.equal(whole.cast(array.type, safe=False), array).fill_null(True)
        raw, _, _ = _text_keys(whole.cast(pa.string()), spread=spread)
        return raw, null, ~np.asarray(is_whole.to_numpy(zero_copy_only=False))
    if _is_fraction(array.type):
        values, missing, bad = _numbers(array)
        bad |= (values != np.floor(values)) | (values < -(2.0**63)) | (values >= 2.0**64)
        values = np.where(missing | bad, 0, values)
        raw = np.where(values < 2.0**63, values, values - 2.0**64).astype(np.int64).astype(np.uint64)
        return (mixed(raw) if spread else raw), missing, bad
    kept = array.cast(pa.int8()) if pa.types.is_boolean(array.type) else array
    whole = np.asarray(kept.fill_null(0).to_numpy(zero_copy_only=False))
    raw = whole.astype(np.int64, copy=False).astype(np.uint64)  # of unsigned ones the same bits
    return (mixed(raw) if spread else raw), null, none


def _text_keys(
    array: Any, *, hexadecimal: bool = False, spread: bool = False
) -> tuple[NDArray[np.uint64], NDArray[np.bool_], NDArray[np.bool_]]:
    """Texts as 64-bit keys (N,), which are empty, and which are no hexadecimal numbers although they are to be."""
    import pyarrow as pa

    if native.is_loaded() and len(array):  # an empty column may have no offsets
        is_large = pa.types.is_large_string(array.type) or pa.types.is_large_binary(array.type)
        _, offsets_buffer, data_buffer = array.buffers()
        kind, count = pa.int64() if is_large else pa.int32(), array.offset + len(array) + 1
        offsets = torch.from_dlpack(pa.Array.from_buffers(kind, count, [None, offsets_buffer]))[array.offset :]
        content = torch.empty(0, dtype=torch.uint8)
        if data_buffer is not None and data_buffer.size:
            content = torch.from_dlpack(pa.Array.from_buffers(pa.uint8(), data_buffer.size, [None, data_buffer]))
        keys, bad = torch.ops.shardrec.text_keys(content, offsets, hexadecimal, spread)
        return keys.numpy().view(np.uint64), (offsets[1:] == offsets[:-1]).numpy(), bad.numpy()
    data, starts, lengths = _bytes(array.cast(pa.large_binary()))
    missing = lengths == 0
    if hexadecimal:
        raw, bad = _hexadecimal(data, starts, lengths)
        return raw, missing, bad & ~missing
    raw, number = _decimal(data, starts, lengths)
    text = np.flatnonzero(~number)
    raw = mixed(raw) if spread else raw
    raw[text] = hash_texts(data, starts[text], lengths[text])
    return raw, missing, np.zeros(len(raw), dtype=np.bool_)


def _decimal(
    data: NDArray[np.uint8], starts: NDArray[np.int64], lengths: NDArray[np.int64]
) -> tuple[NDArray[np.uint64], NDArray[np.bool_]]:
    """Whole numbers of 64 bits as they are usually written (``7``, ``-7``, not ``07`` or ``+7``), modulo 2^64; and
    which texts are such."""
    raw = np.zeros(len(starts), dtype=np.uint64)
    number = np.zeros(len(starts), dtype=np.bool_)
    at = np.flatnonzero((lengths > 0) & (lengths <= 20))
    first = data[starts[at]]
    at = at[((first >= 48) & (first <= 57)) | (first == 45)]
    if not len(at):
        return raw, number
    minus = data[starts[at]] == 45
    begin, digits = starts[at] + minus, lengths[at] - minus
    good = digits > 0
    leading = data.take(begin, mode="clip")
    good &= (leading != 48) | ((digits == 1) & ~minus)
    value = np.zeros(len(at), dtype=np.uint64)
    tenth, last = np.uint64(2**64 // 10), np.uint64(2**64 % 10 - 1)
    for place in range(int(digits.max(initial=0))):
        inside = place < digits
        digit = (data.take(begin + place, mode="clip") - np.uint8(48)).astype(np.uint64)
        good &= ~inside | (digit <= 9)
        if place == 19:  # the only one that can pass 2^64
            good &= ~inside | (value < tenth) | ((value == tenth) & (digit <= last))
        value = np.where(inside, value * np.uint64(10) + digit, value)
    good &= ~minus | (value <= np.uint64(2**63))
    raw[at] = np.where(minus, np.uint64(0) - value, value)
    number[at] = good
    return raw, number


def _hexadecimal(
    data: NDArray[np.uint8], starts: NDArray[np.int64], lengths: NDArray[np.int64]
) -> tuple[NDArray[np.uint64], NDArray[np.bool_]]:
    """Numbers of 1 to 16 hexadecimal digits, and which texts are not such."""
    raw = np.zeros(len(starts), dtype=np.uint64)
    bad = (lengths < 1) | (lengths > 16)
    for place in range(min(16, int(lengths.max(initial=0)))):
        inside = place < lengths
        nibble = _NIBBLES[data.take(starts + place, mode="clip")]
        bad |= inside & (nibble > 15)
        raw = np.where(inside, raw * np.uint64(16) + nibble, raw)
    return raw, bad


def _bytes(array: Any) -> tuple[NDArray[np.uint8], NDArray[np.int64], NDArray[np.int64]]:
    """The bytes of a large_binary column, and the first of each value and how many it has (none of a null)."""
    _, offsets_buffer, data_buffer = array.buffers()
    offsets = np.frombuffer(offsets_buffer, dtype=np.int64, count=array.offset + len(array) + 1)[array.offset :]
    data = np.zeros(1, dtype=np.uint8)
    if data_buffer is not None and data_buffer.size:
        data = np.frombuffer(data_buffer, dtype=np.uint8)
    return data, offsets[:-1], np.diff(offsets)


def _interleave(
    bags: Sequence[_Bags], count: int, *, weighted: bool
) -> tuple[NDArray[np.int64], NDArray[np.int64] | None, NDArray[np.float32] | None]:
    """Row-major ids, lengths (N, F) and weights of features that come one after the other."""
    if all(bag.lengths is None for bag in bags):
        return np.column_stack([bag.ids for bag in bags]).reshape(-1), None, None
    ones = np.ones(count, dtype=np.int64)
    lengths_T = np.concatenate([ones if bag.lengths is None else bag.lengths for bag in bags])
    of_bags = (np.ones(len(bag.ids), np.float32) if bag.weights is None else bag.weights for bag in bags)
    weights = np.concatenate(list(of_bags)) if weighted else None
    by_row = np.arange(len(lengths_T)).reshape(len(bags), count).T.reshape(-1)
    lengths, ids, of_ids = bags_at(by_row, lengths_T, np.concatenate([bag.ids for bag in bags]), weights)
    return ids.numpy(), lengths.view(count, len(bags)).numpy(), None if of_ids is None else of_ids.numpy()


def _plain(array: Any) -> Any:
    """One array of values, without a dictionary."""
    import pyarrow as pa

    array = _whole(array)
    return array.dictionary_decode() if pa.types.is_dictionary(array.type) else array


def _whole(array: Any) -> Any:
    """One array, of values, a dictionary, or lists of any length."""
    import pyarrow as pa

    if isinstance(array, pa.ChunkedArray):
        array = array.combine_chunks()
    if pa.types.is_fixed_size_list(array.type):
        array = array.cast(pa.large_list(array.type.value_type))
    return array


def _is_list(kind: Any) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def _is_fraction(kind: Any) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_floating(kind) or pa.types.is_decimal(kind))


def _is_text(kind: Any) -> bool:
    import pyarrow as pa

    checks = (pa.types.is_string, pa.types.is_large_string, pa.types.is_binary, pa.types.is_large_binary)
    return any(check(kind) for check in checks)


def _id_words(feature: Feature) -> str:
    match feature.coding:
        case "hexadecimal":
            return "is not a number of 1 to 16 hexadecimal digits"
        case "number":
            return f"is no whole number from 0 to {feature.num_embeddings - 1}"
        case "buckets":
            return _NO_NUMBER
    return "is no id"

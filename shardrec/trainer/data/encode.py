"""Columns of an Arrow table as a model's input, by a :class:`~shardrec.trainer.data.spec.FeatureSpec`.

What is wrong with a row is found by vectorised checks, which say *that* it is. A message is made of its value then.

Legend: N rows, D dense features, F sparse features, V ids of one feature.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from shardrec.trainer.data.arrays import finite_numbers, is_list, is_null, is_number, is_text, mask, plain, whole
from shardrec.trainer.data.fault import Reason, RowFault, shown_scalar
from shardrec.trainer.data.ids import (
    ID_WORDS,
    are_whole,
    exact_below,
    id_keys,
    id_texts,
    present,
    text_keys,
    vocabulary_places,
)
from shardrec.trainer.data.preprocess import days, hash_categories, transform_dense
from shardrec.trainer.data.rows import NO_TIME, ClickRows, bags_at
from shardrec.trainer.data.spec import Feature, FeatureSpec
from shardrec.trainer.data.tasks import Task

if TYPE_CHECKING:
    import pyarrow as pa

_Value = TypeVar("_Value", bound=np.generic)

_NO_NUMBER = "is not a finite number among numbers, nor a date among dates"
_MAX = float(np.finfo(np.float32).max)
_TOO_LARGE = "is too large for a float32"
_TRUE, _FALSE = ("true", "True", "TRUE"), ("false", "False", "FALSE")
_NUMBER = r"^[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?$"


@dataclass(frozen=True, kw_only=True, eq=False)
class Encoded:
    """N rows of a table.

    Attributes:
        rows: all of them. What a bad one has is not to be used.
        faults: of bad rows, by their number from 0.
    """

    rows: ClickRows
    faults: dict[int, RowFault]


class _Ids(NamedTuple):
    """Of V values the embedding rows, or 64-bit ids of a feature with dynamic ids; which are missing; which are bad."""

    ids: NDArray[np.int64]
    missing: NDArray[np.bool_]
    bad: NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True, eq=False)
class Dictionary:
    """The distinct values of a column, an Arrow array (D,), and what they are with a null after them.

    Attributes:
        values: without the null.
        ids: what they are.
    """

    values: pa.Array
    ids: _Ids


_Bad: TypeAlias = tuple[str, Reason, str, NDArray[np.bool_]]
"""A column, and why, in which words, which of its rows, (N,), are bad."""


@dataclass(frozen=True, kw_only=True, eq=False)
class _Bags:
    """One feature: ``ids`` int64 (V,), ``lengths`` int64 (N,) or None for ones, ``weights`` float32 (V,) or None."""

    ids: NDArray[np.int64]
    lengths: NDArray[np.int64] | None
    weights: NDArray[np.float32] | None
    bad: NDArray[np.bool_]
    bad_weights: NDArray[np.bool_] | None = None


def encode(
    table: pa.Table | pa.RecordBatch,
    spec: FeatureSpec,
    *,
    labelled: bool = True,
    dictionaries: dict[str, Dictionary] | None = None,
) -> Encoded:
    """The rows of a table (N rows) that has the spec's columns.

    Args:
        spec: what the columns are.
        labelled: whether the columns of label, group and event time are there; without, labels are 0.
        dictionaries: by name of the feature, those of the table before, whose ids are not made again where a column
            has the same values. Replaced by this table's, but for a dictionary that is larger than the table.
    """
    count = int(table.num_rows)
    bads: list[_Bad] = []
    labels, groups, row_weights, times = np.zeros(count, dtype=np.float32), None, None, None
    if labelled and spec.labels:
        labels = np.column_stack([_task_labels(table, task, spec, bads) for task in spec.labels])
        if spec.weight is not None:
            values, missing, bad = _numbers(table[spec.weight], spec)
            bad |= missing | (values < 0) | (values > _MAX)
            row_weights = np.where(bad, 0, values).astype(np.float32)
            bads.append((spec.weight, Reason.NUMBER, "is no weight, a number of at least 0", bad))
    elif labelled:
        label, missing, bad = _numbers(table[spec.label.column], spec)
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
        groups, missing, bad = group_keys(table, spec)
        bads.append((spec.group, Reason.ID, f"is no id of a group: {ID_WORDS}", bad | missing))
    if labelled and spec.event_time is not None:
        times, bad = _event_times(table[spec.event_time], spec)
        bads.append((spec.event_time, Reason.TIME, "is no date and time, nor seconds or milliseconds since 1970", bad))
    dense = np.ones((count, len(spec.dense) or 1), dtype=np.float32)
    for index, feature in enumerate(spec.dense):
        values, missing, bad = _numbers(table[feature.source], spec)
        transformed = _transformed(feature, np.where(bad, 0.0, values) if bad.any() else values, missing)
        large = np.abs(transformed) > _MAX
        dense[:, index] = np.where(large, 0.0, transformed) if large.any() else transformed
        bads += [(feature.source, Reason.NUMBER, _NO_NUMBER, bad), (feature.source, Reason.NUMBER, _TOO_LARGE, large)]
    bags = [_bags(table, feature, spec, dictionaries) for feature in spec.sparse]
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


def _task_labels(
    table: pa.Table | pa.RecordBatch, task: Task, spec: FeatureSpec, bads: list[_Bad]
) -> NDArray[np.float32]:
    """The labels of a task, NaN where rows may lack it and do. Adds to ``bads`` which values are none."""
    array = plain(table[task.source])
    values, missing, bad = _numbers(array, spec)
    if not is_text(array.type):  # of which a NaN counts as missing
        bad = bad | (missing & ~is_null(array))
    bad = bad | (~missing & ~task.takes(values))
    bads.append((task.source, Reason.LABEL, task.words, bad))
    if not task.optional:
        words = "is missing: give the label, or optional: true in labels"
        bads.append((task.source, Reason.LABEL, words, missing))
    labels = values if task.above is None else values > task.above
    return np.where(missing, np.nan, np.where(bad, 0, labels)).astype(np.float32)


def _faults(table: pa.Table | pa.RecordBatch, bads: Sequence[_Bad]) -> dict[int, RowFault]:
    """The first fault of each bad row, in the order of the rows."""
    faults: dict[int, RowFault] = {}
    for column, reason, words, bad in bads:
        for row in np.flatnonzero(bad).tolist():
            if row not in faults:
                where = f"field {column!r}: value {shown_scalar(table[column][row])} {words}"
                faults[row] = RowFault(reason=reason, where=where, remedy="correct it")
    return dict(sorted(faults.items()))


def column_fault(kind: pa.DataType, name: str, spec: FeatureSpec) -> str:
    """What to give instead of a column of this type. Empty when it can be read."""
    import pyarrow as pa

    numeric = {*spec.label_sources, *(feature.source for feature in spec.dense)}
    inner = kind.value_type if is_list(kind) else kind
    inner = inner.value_type if pa.types.is_dictionary(inner) else inner
    readable = is_number(inner) or is_text(inner) or pa.types.is_null(inner)
    if pa.types.is_date(kind) or pa.types.is_timestamp(kind):
        as_ids = {spec.group, *(feature.source for feature in spec.sparse if feature.coding != "buckets")}
        return "a date is read as a number of days: give boundaries, or kind: dense" if name in as_ids else ""
    if name in numeric and (is_list(kind) or not readable):
        return "write numbers"
    if name == spec.event_time and (is_list(kind) or pa.types.is_boolean(inner) or not readable):
        return "write timestamps, seconds or milliseconds since 1970, or texts in ISO 8601"
    if name == spec.group and is_list(kind):
        return "write one text or whole number for each row"
    return "" if readable else "write ids as texts or numbers, or lists of either"


def _numbers(
    array: pa.Array | pa.ChunkedArray, spec: FeatureSpec
) -> tuple[NDArray[np.float64], NDArray[np.bool_], NDArray[np.bool_]]:
    """A column of numbers or dates, or of texts of them, as float64 (N,): values, which are missing, which are bad.

    A date or time is the days since 1970-01-01.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    array = plain(array)
    if is_text(array.type) and (finite := finite_numbers(array)) is not None:
        array = finite
    if is_text(array.type):
        array = present(array, spec.missing).cast(pa.large_binary())
        missing, zero = is_null(array), pa.scalar(b"0", pa.large_binary())
        for digit, words in ((b"1", _TRUE), (b"0", _FALSE)):
            is_word = pc.is_in(array, value_set=pa.array(words, pa.large_binary()))
            array = pc.if_else(is_word, pa.scalar(digit, pa.large_binary()), array)
        good = pc.match_substring_regex(array, _NUMBER).fill_null(False)
        bad = ~(mask(good) | missing)
        numbers = pc.if_else(good, array, zero).cast(pa.large_string()).cast(pa.float64())
        values = numbers.to_numpy(zero_copy_only=False).copy()
        if bad.any():
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


def _event_times(array: pa.Array | pa.ChunkedArray, spec: FeatureSpec) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Seconds since 1970 (N,) of dates and times, numbers, or texts of either; and which are none, whose time is 0."""
    import pyarrow as pa
    import pyarrow.compute as pc

    array = plain(array)
    times, (missing, bad) = np.zeros(len(array)), np.zeros((2, len(array)), dtype=np.bool_)
    is_date = np.full(len(array), pa.types.is_temporal(array.type))
    if is_text(array.type):
        is_date = ~mask(pc.match_substring_regex(array, _NUMBER).fill_null(False))
    for kind in (is_date, ~is_date):  # so that what a text is does not depend on those beside it
        times[kind], missing[kind], bad[kind] = _numbers(array.filter(pa.array(kind)), spec)
    times = np.where(is_date, 86_400 * times, np.where(np.abs(times) < 1e11, times, times / 1000))
    bad = bad | missing | (np.abs(times) >= -NO_TIME)
    return np.where(bad, 0, times), bad


def _transformed(feature: Feature, values: NDArray[np.float64], missing: NDArray[np.bool_]) -> NDArray[np.float64]:
    # In float64: of a time, float32 would lose the seconds before the mean is subtracted.
    with np.errstate(over="ignore"):
        transformed = transform_dense(values, missing) if feature.transform == "log" else values
        return np.where(missing, 0.0, (transformed - feature.mean) / feature.std)


def _bags(
    table: pa.Table | pa.RecordBatch,
    feature: Feature,
    spec: FeatureSpec,
    dictionaries: dict[str, Dictionary] | None,
) -> _Bags:
    """A feature with a table, one id a row or any number."""
    array, lengths = _flat(table[feature.source], feature, spec)
    ids, missing_V, bad_V = _ids_by_value(array, feature, spec, dictionaries)
    if lengths is None:
        return _Bags(ids=ids, lengths=None, weights=None, bad=bad_V)
    row_V = np.repeat(np.arange(len(lengths)), lengths)
    bad = np.bincount(row_V[bad_V], minlength=len(lengths)) > 0
    weights = bad_weights = None
    if feature.weights is not None:
        weight_array, of_each = _flat(table[feature.weights], feature, spec)
        assert of_each is not None, "a weighted feature has lists"
        values, missing, bad_W = _numbers(weight_array, spec)
        bad_W |= missing | (np.abs(values) > _MAX)
        weights = np.where(bad_W, 0.0, values).astype(np.float32)
        fit = of_each == lengths
        if not fit.all():
            bad_W = _in_rows(bad_W, of_each, fit, lengths)
            weights = _in_rows(weights, of_each, fit, lengths)
        bad_weights = ~fit
    # A row without an id in the range of an ``id`` has a missing one, also beside rows with several.
    drops = spec.rules > 1 and (feature.is_list or feature.between is None)
    keep = ~missing_V if drops else np.ones(len(ids), dtype=np.bool_)
    if bad_weights is not None:
        bad_weights[row_V[bad_W & keep]] = True
    if feature.max_length is not None:
        left = np.cumsum(keep[::-1])[::-1]  # of the kept ids, those from here on
        ends = np.r_[left, 0][np.cumsum(lengths)]
        keep &= left - np.repeat(ends, lengths) <= feature.max_length
    if not keep.all():
        ids, lengths = ids[keep], np.bincount(row_V[keep], minlength=len(lengths))
        weights = None if weights is None else weights[keep]
    return _Bags(ids=ids, lengths=lengths, weights=weights, bad=bad, bad_weights=bad_weights)


def _in_rows(
    values: NDArray[_Value], of_each: NDArray[np.int64], fit: NDArray[np.bool_], lengths: NDArray[np.int64]
) -> NDArray[_Value]:
    """Values with ``of_each`` (N,) in a row as values with ``lengths`` (N,), zeros in the rows that do not fit."""
    placed: NDArray[_Value] = np.zeros(int(lengths.sum()), values.dtype)
    placed[np.repeat(fit, lengths)] = values[np.repeat(fit, of_each)]
    return placed


def _flat(
    array: pa.Array | pa.ChunkedArray, feature: Feature, spec: FeatureSpec
) -> tuple[pa.Array, NDArray[np.int64] | None]:
    """The values of a column, and how many each row has. None for one each.

    A null is a row without ids, or of a feature with one id a row a missing one.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    array = whole(array)
    if feature.is_list and pa.types.is_dictionary(array.type):  # of texts with separators
        array = array.dictionary_decode()
    if feature.is_list and is_text(array.type):
        is_utf8 = pa.types.is_string(array.type) or pa.types.is_large_string(array.type)
        texts = array.cast(pa.large_string() if is_utf8 else pa.large_binary())
        array = pc.split_pattern(pc.if_else(pc.equal(texts, b""), None, texts), feature.separator)
    if not is_list(array.type):
        ones = np.ones(len(array), dtype=np.int64)
        if feature.between is not None:
            return _between(array, ones, feature, spec)
        return (array, ones) if feature.is_list else (array, None)
    counts = array.value_lengths().fill_null(0 if feature.is_list else 1)
    lengths = counts.to_numpy(zero_copy_only=False).astype(np.int64)
    null = is_null(array)
    values = array.flatten()
    if feature.between is not None:
        return _between(values, lengths * ~null, feature, spec)
    if feature.is_list or not null.any():
        return values, lengths
    present = np.repeat(~null, lengths)
    places = np.cumsum(present) - 1
    return values.take(pa.array(places, mask=~present)), lengths


def _between(
    values: pa.Array, lengths: NDArray[np.int64], feature: Feature, spec: FeatureSpec
) -> tuple[pa.Array, NDArray[np.int64] | None]:
    """Of lists with ``lengths`` (N,) the numbers in the feature's range; without any, a missing one of an ``id``."""
    import pyarrow as pa

    assert feature.between is not None, "the caller has looked"
    numbers, missing, bad = _numbers(values, spec)
    kept = ~(missing | bad) & (numbers >= feature.between[0]) & (numbers < feature.between[1])
    counts = np.bincount(np.repeat(np.arange(len(lengths)), lengths)[kept], minlength=len(lengths))
    if feature.is_list:
        return values.filter(pa.array(kept)), counts
    lengths = np.maximum(counts, 1)
    places = np.zeros(int(lengths.sum()), dtype=np.int64)
    there = np.repeat(counts > 0, lengths)
    places[there] = np.flatnonzero(kept)
    return values.take(pa.array(places, mask=~there)), None if counts.max(initial=0) <= 1 else lengths


def _ids_by_value(
    array: pa.Array, feature: Feature, spec: FeatureSpec, dictionaries: dict[str, Dictionary] | None
) -> _Ids:
    """:func:`_ids`, of a column with a dictionary made for its distinct values and gathered."""
    import pyarrow as pa

    if not pa.types.is_dictionary(array.type):
        return _ids(array, feature, spec)
    values, indices = array.dictionary, array.indices
    distinct = None if dictionaries is None else dictionaries.get(feature.name)
    if distinct is None or not distinct.values.equals(values):
        is_first = dictionaries is not None and distinct is None
        if len(values) >= len(array) and not is_first:  # as one that grows with each block
            return _ids(array.dictionary_decode(), feature, spec)
        distinct = Dictionary(
            values=values, ids=_ids(pa.concat_arrays([values, pa.nulls(1, values.type)]), feature, spec)
        )
        if dictionaries is not None:
            dictionaries[feature.name] = distinct
    places = (indices.fill_null(len(values)) if indices.null_count else indices).to_numpy()
    none = np.zeros(len(places), dtype=np.bool_)
    ids, missing, bad = distinct.ids
    missing = missing.take(places) if feature.is_list else none
    return _Ids(ids.take(places), missing, bad.take(places) if bad.any() else none)


def _ids(array: pa.Array, feature: Feature, spec: FeatureSpec) -> _Ids:
    coding = feature.coding
    if coding in ("buckets", "number"):
        values, missing, bad = _numbers(array, spec)
        if coding == "buckets":
            rows = np.searchsorted(np.asarray(feature.boundaries), values, side="right") + 1
            values = rows.astype(np.float64)
        else:
            most = min(feature.num_embeddings, exact_below(array.type))
            bad |= ~missing & ((values < 0) | (values >= most) | (values != np.floor(values)))
        return _Ids(np.where(missing | bad, 0, values).astype(np.int64), missing, bad)
    array = present(plain(array), spec.missing)
    if coding == "vocabulary":
        places, bad = vocabulary_places(array, feature.values, as_texts=spec.as_texts(feature))
        return _Ids(places + 1, is_null(array), bad)
    if coding == "hexadecimal" and is_text(array.type):
        keys, missing, bad = text_keys(array, hexadecimal=True)
        null = is_null(array)  # which may have bytes
        missing, bad = missing | null, bad & ~null
    else:
        spread = coding != "hexadecimal" and feature.dynamic_ids is None
        keys, missing, bad = id_keys(array, as_texts=spec.as_texts(feature), spread=spread)
    if feature.dynamic_ids is not None:
        return _Ids(np.where(missing, feature.missing_id, keys.view(np.int64)), missing, bad)
    return _Ids(hash_categories(keys, missing, np.asarray(feature.num_embeddings, dtype=np.uint64)), missing, bad)


def row_numbers(
    array: pa.Array | pa.ChunkedArray, feature: Feature, spec: FeatureSpec
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """The row of each value (V,), or its dynamic id, (V,); and which are missing or have none."""
    rows, missing, bad = _ids(plain(array), feature, spec)
    bad = bad | missing
    return rows, bad if feature.coding == "number" else bad | (rows == feature.missing_id)


def spells_numbers(table: pa.Table | pa.RecordBatch, feature: Feature, spec: FeatureSpec) -> bool:
    """Whether all ids of a feature in a table are whole numbers or their texts."""
    import pyarrow as pa

    values = _flat(table[feature.source], feature, spec)[0]
    return are_whole(present(values.dictionary if pa.types.is_dictionary(values.type) else values, spec.missing))


def count_values(table: pa.Table, feature: Feature, spec: FeatureSpec) -> dict[str, int]:
    """How often each id of a feature that has a vocabulary occurs in a table."""
    values = present(plain(_flat(table[feature.source], feature, spec)[0]), spec.missing)
    _, texts, bad = id_texts(values, as_texts=spec.as_texts(feature))
    pairs = texts.filter(~bad).value_counts()
    counts = zip(pairs.field("values").to_pylist(), pairs.field("counts").to_pylist(), strict=True)
    return {value.decode(): count for value, count in counts if value}


def group_keys(
    table: pa.Table | pa.RecordBatch, spec: FeatureSpec
) -> tuple[NDArray[np.uint64], NDArray[np.bool_], NDArray[np.bool_]]:
    """The key of each row's group (N,), which rows lack it, and which have none that is an id."""
    return id_keys(present(plain(table[spec.group]), spec.missing))


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


def _id_words(feature: Feature) -> str:
    match feature.coding:
        case "hexadecimal":
            return "is not a number of 1 to 16 hexadecimal digits"
        case "number":
            return f"is not a whole number from 0 to {feature.num_embeddings - 1}"
        case "buckets":
            return _NO_NUMBER
    return f"is no id: {ID_WORDS}"

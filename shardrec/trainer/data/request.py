"""Rows as JSON objects by the features' names, in place of a file's columns: of a request, or of a topic."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, TypeGuard

from shardrec import DataError
from shardrec.trainer.data.fault import Reason, RowFault, shown
from shardrec.trainer.data.spec import Feature, FeatureSpec

if TYPE_CHECKING:
    import pyarrow as pa

    from shardrec.trainer.data.click_data import ClickBatch

_PLAIN = Feature(name="label", kind="dense")
"""How a label, a weight, a group or an event time is written."""


def batch_of_request(
    rows: object, spec: FeatureSpec, *, absent: Collection[str] = (), whole: Collection[str] = ()
) -> ClickBatch:
    """The rows of a request, encoded as those of a file are.

    Each row is an object with exactly the spec's features: an ``id`` is a text or a number. A ``multi_hot`` feature or
    a ``sequence`` a list of these. A ``weighted`` one an object of ids and their weights. A ``dense`` one a number, or
    a date or time in ISO 8601, as in a CSV file. A boolean is 0 or 1. Any may be null, for a missing value.

    Args:
        rows: what ``json.loads`` made of it.
        spec: of the data that the model was trained on.
        absent: features that the rows do not have: their values are missing.
        whole: sequences that the batch also has in full, as :func:`whole_sequences` names them.

    Returns:
        A batch on the CPU. Its labels are 0.

    Raises:
        DataError: naming row, feature and value of the first fault.
    """
    from shardrec.trainer.data.encode import encode  # with torch, which what ingests a topic does without

    if not isinstance(rows, Sequence) or isinstance(rows, (str, bytes)) or not rows:
        raise DataError(f"rows is {shown(rows)}: give a list of at least one object")
    named = named_spec(spec)
    table, faults = table_of(rows, named, labelled=False, absent=absent)
    named = whole_sequences(named, whole)
    encoded = encode(table, named, labelled=False)
    for number, fault in (faults or encoded.faults).items():
        raise DataError(f"row {number}: {fault}")
    return encoded.rows.to_batch(named.schema_)


def whole_sequences(spec: FeatureSpec, names: Collection[str]) -> FeatureSpec:
    """The spec with each of these sequences once more, after its features: all ids, under the name ``all NAME``."""
    sequences = [feature for feature in spec.features if feature.name in names and feature.max_length is not None]
    if not sequences:
        return spec
    whole = [
        feature.model_copy(
            update={
                "name": f"all {feature.name}",
                "column": feature.source,
                "max_length": None,
                "share": feature.share or feature.name,
            }
        )
        for feature in sequences
    ]
    fields = {name: getattr(spec, name) for name in spec.model_fields_set}
    return FeatureSpec(**{**fields, "features": (*spec.features, *whole)})


def named_spec(spec: FeatureSpec) -> FeatureSpec:
    """The spec of a table of :func:`table_of`, whose columns have the features' names."""
    fields = {name: getattr(spec, name) for name in spec.model_fields_set}
    features = []
    for feature in spec.features:
        weights = f"weights of {feature.name}" if feature.weights else None
        features.append(feature.model_copy(update={"column": feature.name, "weights": weights}))
    return FeatureSpec(**{**fields, "features": tuple(features), "columns": None})


def table_of(
    rows: Sequence[object], spec: FeatureSpec, *, labelled: bool, absent: Collection[str] = ()
) -> tuple[pa.Table, dict[int, RowFault]]:
    """Rows as a table of those without faults, and the faults of the others by their numbers.

    Args:
        rows: objects as :func:`batch_of_request` takes them; or, of a row that is none, its fault.
        spec: of :func:`named_spec`.
        labelled: whether each also has the columns of labels, weight, group and event time, and may have other fields.
        absent: features that they do not have, whose columns are null.
    """
    import pyarrow as pa

    features = {feature.name: feature for feature in spec.features}
    if labelled:
        others = (*spec.label_sources, *filter(None, (spec.group, spec.event_time)))
        features = {name: _PLAIN.model_copy(update={"name": name}) for name in others} | features
    texts, faults = pa.string(), dict[int, RowFault]()
    types = {name: pa.list_(texts) if feature.is_list else texts for name, feature in features.items()}
    types |= {feature.weights: pa.list_(pa.float64()) for feature in spec.features if feature.weights}
    columns: dict[str, list[object]] = {name: [] for name in types}
    asked = {name: feature for name, feature in features.items() if name not in absent}
    nothing = dict.fromkeys(absent)
    for number, row in enumerate(rows):
        try:
            values = {} if isinstance(row, RowFault) else nothing | _values(row, asked, spec, more=labelled)
        except DataError as error:
            values, row = {}, RowFault(reason=Reason.OBJECT, where=str(error), remedy="correct it")
        if isinstance(row, RowFault):
            faults[number] = row
        for name, value in values.items():
            columns[name].append(value)
    return pa.table({name: pa.array(column, types[name]) for name, column in columns.items()}), faults


def request_example(
    spec: FeatureSpec, values: Mapping[str, object] | None = None, *, absent: Collection[str] = ()
) -> dict[str, object]:
    """A row of the form that :func:`batch_of_request` takes, with these values where there are any."""
    known = values or {}
    return {
        feature.name: known[feature.name] if feature.name in known else _example(feature)
        for feature in spec.features
        if feature.name not in absent
    }


def _values(row: object, features: Mapping[str, Feature], spec: FeatureSpec, *, more: bool) -> dict[str, object]:
    """What the columns have of a row, which may have more fields or not.

    Raises:
        DataError: for a field that is missing, or a value of another type.
    """
    if not isinstance(row, Mapping):
        raise DataError(f"{shown(row)} is no object with the fields {', '.join(features)}")
    for name in row if not more else ():
        if name not in features:
            raise DataError(f"field {name!r} is no feature: the features are {', '.join(features)}")
    values: dict[str, object] = {}
    for name, feature in features.items():
        if name not in row:
            raise DataError(f"field {name!r} is missing: give it, or null for a missing value")
        values[name] = _value(row[name], feature, spec)
        if feature.weights is not None:
            values[feature.weights] = list(map(float, (row[name] or {}).values()))
    return values


def _value(value: object, feature: Feature, spec: FeatureSpec) -> str | Sequence[str | None] | None:
    """A feature of a row as its column has it.

    Raises:
        DataError: for a value of another type.
    """

    def refused(wanted: str) -> DataError:
        return DataError(f"field {feature.name!r}: value {shown(value)} is not {wanted}")

    as_text = _hexadecimal if feature.coding == "hexadecimal" else _text if spec.rules > 1 else _whole_text
    if not feature.is_list:
        text = None if value is None else as_text(value)
        if value is not None and text is None:
            raise refused("a finite number, a date or null" if feature.kind == "dense" else "a text, a number or null")
        return text
    if feature.weights is not None:
        if value is not None and not (isinstance(value, Mapping) and all(map(_is_number, value.values()))):
            raise refused("an object of ids and their weights, or null")
        texts = [as_text(raw_id) for raw_id in value or ()]
        if None in texts:
            raise refused("an object of ids that are texts")
        return texts
    if value is None:
        return None
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise refused("a list or null")
    texts = [as_text(raw_id) for raw_id in value]
    if None in texts:
        raise refused("a list of texts or numbers")
    return texts


def _is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, (int, float)) and abs(value) <= sys.float_info.max


def _text(value: object) -> str | None:
    """As a CSV file has it, whose ids are those of a Parquet file's numbers and booleans."""
    if isinstance(value, str):
        return value if _is_encodable(value) else None
    if not _is_number(value):
        return None
    if isinstance(value, int):
        return f"{value:d}"
    return f"{value:.1f}" if value.is_integer() else repr(value)  # of a large one without an exponent


def _whole_text(value: object) -> str | None:
    """As version 1 of the rules has it, for which 7.0 is 7."""
    return _text(int(value) if isinstance(value, float) and value.is_integer() else value)


def _hexadecimal(value: object) -> str | None:
    if isinstance(value, int) and 0 <= value < 2**64:
        return f"{value:x}"
    return value if isinstance(value, str) and _is_encodable(value) else None


def _is_encodable(text: str) -> bool:
    """Whether it is without halves of surrogate pairs, which JSON can spell and UTF-8 cannot."""
    return text.encode(errors="ignore").decode() == text


def _example(feature: Feature) -> object:
    if feature.kind == "dense":
        return feature.mean if feature.mean and feature.transform == "none" else 0.5  # a value that is not extreme
    make: Callable[[int], object] = {
        "vocabulary": lambda place: (feature.values or ("",))[place % len(feature.values or ("",))],
        "buckets": lambda place: (feature.boundaries or (0.0,))[0],
        "number": lambda place: place,
        "hexadecimal": lambda place: f"{place + 10:08x}",
        "hash": lambda place: f"{feature.name} {place + 1}",
    }[feature.coding]
    if feature.weights is not None:
        return {str(make(0)): 1.0, str(make(1)): 0.5}
    return [make(0), make(1)] if feature.is_list else make(0)

"""A row of a data file as a request has it, for examples with values that a model knows."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import date
from decimal import Decimal
from math import isfinite
from typing import TYPE_CHECKING, Any

from shardrec import DataError
from shardrec.trainer.data.formats import file_kind, read_rows, undamaged
from shardrec.trainer.data.request import batch_of_request, request_example
from shardrec.trainer.data.spec import Feature, FeatureSpec
from shardrec.trainer.data.urls import files_of, open_input

if TYPE_CHECKING:
    import pyarrow as pa

_ROWS = 100
_MOST_IDS = 10


def values_of_file(pattern: str, spec: FeatureSpec) -> Mapping[str, object]:
    """The values of a row of the first file, by the features' names. None if the file cannot be read now.

    Of the first rows it is the one with the fewest missing values, with the last ids of a long list.
    """
    try:
        path = files_of(pattern)[0]
        with undamaged(path):
            table = _first_rows(path, spec)
        rows = [
            {feature.name: _value(row, feature) for feature in spec.features}
            for row in table.slice(0, _ROWS).to_pylist()
        ]
        fullest = max(rows, key=lambda row: sum(value not in (None, "", [], {}) for value in row.values()), default={})
        batch_of_request([request_example(spec, fullest)], spec)
    except DataError:
        return {}
    return fullest


def _first_rows(path: str, spec: FeatureSpec) -> pa.Table:
    import pyarrow as pa
    import pyarrow.parquet as pq

    if file_kind(path) != "parquet":
        return next((table for table, _ in read_rows(path, spec, spec.feature_sources) if len(table)), pa.table({}))
    file = pq.ParquetFile(open_input(path))
    names = [name for name in spec.feature_sources if name in file.schema_arrow.names]
    return pa.Table.from_batches([*file.iter_batches(_ROWS, row_groups=[0], columns=names)][:1])


def _value(row: Mapping[str, Any], feature: Feature) -> object:
    value = row.get(feature.source)
    if feature.kind == "dense" and isinstance(value, str):
        return _number(value)
    if not feature.is_list or value is None:
        return _plain(value)
    ids = value.split(feature.separator) if isinstance(value, str) else value
    ids = [_plain(each) for each in ids if each is not None][-_MOST_IDS:]
    if feature.weights is None:
        return ids
    weights = row.get(feature.weights)
    weights = weights.split(feature.separator) if isinstance(weights, str) else weights or []
    return {str(each): float(weight) for each, weight in zip(ids, weights[-_MOST_IDS:], strict=False)}


def _number(text: str) -> float | str:
    """The number in a text file's field. Other texts, such as dates, as they are."""
    try:
        number = float(text)
    except ValueError:
        return text
    return number if isfinite(number) else text


def _plain(value: Any) -> object:
    """As JSON has it."""
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    if isinstance(value, date):
        return value.isoformat()
    return float(value) if isinstance(value, Decimal) else value

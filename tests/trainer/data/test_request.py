"""Rows of a request are encoded as those of a file, and a fault names row and field."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings

from shardrec.errors import DataError
from shardrec.trainer.data import (
    ClickBatch,
    Feature,
    FeatureSpec,
    batch_of_request,
    criteo_spec,
    open_click_data,
    request_example,
)
from tests.trainer.data.drawn import SPECS, rows_of, save, score


def as_request(row: dict[str, Any]) -> dict[str, Any]:
    found = {feature.name: row.get(feature.source) for feature in SPECS.features}
    return json.loads(json.dumps({**found, "tags": {tag: score(tag) for tag in row["tags"]} or None}))


@settings(max_examples=20, deadline=None)
@given(rows=rows_of)
def test_a_request_is_what_a_file_is(tmp_path_factory: pytest.TempPathFactory, rows: list[dict[str, Any]]) -> None:
    rows = [{**row, "tags": list(dict.fromkeys(row["tags"]))} for row in rows]
    path = save(tmp_path_factory.mktemp("request"), rows, "csv")
    (of_file,) = open_click_data(path, SPECS, holdout=0.0).train_batches(0, 1, 10_000)
    found = batch_of_request([as_request(row) for row in rows], SPECS)
    assert_same(found, of_file)


def assert_same(one: ClickBatch, other: ClickBatch) -> None:
    assert one.sparse.keys() == other.sparse.keys()
    torch.testing.assert_close(one.sparse.values(), other.sparse.values())
    torch.testing.assert_close(one.sparse.lengths(), other.sparse.lengths())
    torch.testing.assert_close(one.sparse.weights(), other.sparse.weights())
    torch.testing.assert_close(one.dense, other.dense)


@pytest.mark.parametrize("spec", [SPECS, criteo_spec()])
def test_the_example_is_a_request(spec: FeatureSpec) -> None:
    batch = batch_of_request(json.loads(json.dumps([request_example(spec)] * 2)), spec)
    assert batch.size == 2
    assert (batch.sparse.values() > 0).any()


def test_hexadecimal_numbers() -> None:
    spec = FeatureSpec(features=(Feature(name="c", kind="id", rows=1000, ids="hexadecimal"),))
    found = batch_of_request([{"c": "ff"}, {"c": 255}, {"c": None}], spec)
    assert found.sparse.values().tolist() == [256, 256, 0]


def test_dates_are_those_of_a_csv_file(tmp_path: Path) -> None:
    since = Feature(name="since", kind="dense", mean=20_000, std=100)
    day = Feature(name="day", kind="id", boundaries=(20_000.0, 20_148.0))
    spec = FeatureSpec(features=(since, day))
    dates = ["2025-03-01", "2025-03-01 12:30:00+01:00", None]
    path = tmp_path / "dates.csv"
    path.write_text("label,since,day\n" + "".join(f"0,{date or ''},{date or ''}\n" for date in dates), encoding="utf-8")
    (of_file,) = open_click_data(path, spec, holdout=0.0).train_batches(0, 1, 10)
    asked = batch_of_request([{"since": date, "day": date} for date in dates], spec)
    torch.testing.assert_close(asked.dense, of_file.dense)
    assert asked.sparse.values().tolist() == of_file.sparse.values().tolist() == [3, 3, 0]
    assert asked.dense[:, 0].tolist() == pytest.approx([1.48, 1.48 + 11.5 / 2400, 0.0])
    (alone,) = batch_of_request([{"since": 20_148.0, "day": 20_148}], spec).dense.tolist()
    assert alone == pytest.approx([1.48])


def test_booleans_are_0_and_1() -> None:
    """As those of Parquet are."""
    spec = FeatureSpec(features=(Feature(name="new", kind="id", rows=9, ids="number"), Feature(name="x", kind="dense")))
    batch = batch_of_request([{"new": True, "x": True}, {"new": False, "x": False}], spec)
    assert (batch.sparse.values().tolist(), batch.dense.tolist()) == ([1, 0], [[1.0], [0.0]])


def test_weights_may_be_integers_that_a_float_rounds() -> None:
    spec = FeatureSpec(features=(Feature(name="tags", kind="weighted", rows=50, weights="w"),))
    batch = batch_of_request([{"tags": {"a": 2**70, "b": 2**53 + 1, "c": 0.5}}], spec)
    assert batch.sparse.weights().tolist() == [2.0**70, 2.0**53, 0.5]


GOOD = {"user": "a", "country": "de", "age": 3, "code": 7, "tags": {}, "history": ["x"], "price": 1, "size": None}


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([], r"rows is \[\]: give a list of at least one object"),
        ("abc", r"rows is 'abc'"),
        ([GOOD, 3], r"row 1: 3 is no object with the fields user, country"),
        ([{**GOOD, "usr": "a"}], r"row 0: field 'usr' is no feature: the features are user, country"),
        ([{"user": "a"}], r"row 0: field 'country' is missing"),
        ([GOOD, {**GOOD, "price": "dear"}], r"row 1: field 'price': value 'dear' is not a finite number among numbers"),
        ([GOOD, {**GOOD, "price": "2025-03-01"}], r"row 1: field 'price': value '2025-03-01' is not .* date among"),
        ([{**GOOD, "price": float("nan")}], r"field 'price': value nan"),
        ([{**GOOD, "price": 10**400}], r"field 'price': value 1000.* is not a finite number"),
        ([{**GOOD, "price": 1e39}], r"field 'price': value '9{15}\d*\.0' is too large for a float32"),
        ([{**GOOD, "user": "\ud800"}], r"field 'user': value '\\ud800' is not a text"),
        ([{**GOOD, "history": ["a", "\udfff"]}], r"field 'history': value .* is not a list of texts"),
        ([{**GOOD, "tags": {"\ud800": 1}}], r"field 'tags': value .* is not an object of ids that are texts"),
        ([{**GOOD, "user": ["a"]}], r"field 'user': value \['a'\] is not a text, a number or null"),
        ([{**GOOD, "history": "a"}], r"field 'history': value 'a' is not a list or null"),
        ([{**GOOD, "history": ["a", None]}], r"field 'history': value .* is not a list of texts or numbers"),
        ([{**GOOD, "tags": ["a"]}], r"field 'tags': value \['a'\] is not an object of ids and their weights"),
        ([{**GOOD, "tags": {"a": "x"}}], r"field 'tags'"),
        ([GOOD, {**GOOD, "code": 50}], r"row 1: field 'code': value '50' is not a whole number from 0 to 49"),
        ([{**GOOD, "age": "old"}], r"row 0: field 'age': value 'old' is not a finite number"),
    ],
)
def test_faults_name_row_and_field(rows: Any, words: str) -> None:
    with pytest.raises(DataError, match=words):
        batch_of_request(rows, SPECS)

"""One id in any spelling, column, kind of feature, file and request; and what a table's values decide."""

from __future__ import annotations

import json
from decimal import Decimal
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardrec.errors import ConfigError, DataError
from shardrec.trainer.data import FeatureSpec, FileClickData, batch_of_request, load_spec
from shardrec.trainer.data.spec import IDS, recorded_ids

CODINGS: dict[str, dict[str, Any]] = {
    "hash": {"rows": 10**6},
    "vocabulary": {"vocabulary": [*map(str, range(10))]},
    "dynamic ids": {"rows": 10**6, "dynamic_ids": {}},
}
TYPES = {
    "int8": pa.int8(),
    "uint64": pa.uint64(),
    "float32": pa.float32(),
    "double": pa.float64(),
    "decimal": pa.decimal128(20, 3),
    "string": pa.string(),
    "large_binary": pa.large_binary(),
    "string_view": pa.string_view(),
}
SPELLED = {"7": "{}", "7.": "{}.", "7.0": "{}.0", "7.00": "{}.00"}
KINDS = ("id", "multi_hot", "sequence", "weighted")
FILES = ("parquet", "csv", "tsv", "npz", "libsvm", "request")


def spec_of(kind: str, coding: dict[str, Any], **more: Any) -> FeatureSpec:
    weights = {"weights": "w"} if kind == "weighted" else {}
    feature = {"name": "f", "kind": kind, "separator": " ", **coding, **weights}
    return FeatureSpec.model_validate({"features": [feature], **more})


def ids_of(data: FileClickData) -> list[list[int]]:
    (batch,) = data.train_batches(0, 1, 10_000)
    return [bag.tolist() for bag in batch.sparse["f"].to_dense()]


def cells(bags: list[list[int]], kind: str, as_type: str, spelling: str) -> Any:
    """A column of one id or a list of ids a row, of an Arrow type, whose texts are spelled so."""
    of_type = TYPES[as_type]
    is_text = as_type in ("string", "large_binary", "string_view")

    def value(number: int) -> Any:
        text = SPELLED[spelling].format(number)
        if as_type == "large_binary":
            return text.encode()
        return text if is_text else Decimal(number) if as_type == "decimal" else number

    if kind == "id":
        return pa.array([value(bag[0]) for bag in bags], of_type)
    return pa.array([[*map(value, bag)] for bag in bags], pa.list_(of_type))


def written(folder: Path, bags: list[list[int]], kind: str, file: str, as_type: str, spelling: str) -> Path:
    path, labels = folder / f"rows.{file}", [number % 2 for number in range(len(bags))]
    texts = [[SPELLED[spelling].format(number) for number in bag] for bag in bags]
    match file:
        case "parquet":
            table = {"label": labels, "f": cells(bags, kind, as_type, spelling)}
            pq.write_table(pa.table({**table, "w": [[0.5] * len(bag) for bag in bags]}), path)
        case "npz":
            width = max(map(len, bags))
            values = np.array([[*bag, *[0] * (width - len(bag))] for bag in bags], float)
            np.savez(path, label=labels, f=values[:, 0] if kind == "id" else values, w=np.full(values.shape, 0.5))
        case "libsvm":
            lines = (
                " ".join([str(label), *(f"{i}:0.5" for i in bag)]) for label, bag in zip(labels, bags, strict=True)
            )
            path.write_text("\n".join(lines) + "\n")
        case _:
            mark = "," if file == "csv" else "\t"
            rows = zip(labels, texts, strict=True)
            lines = (f"{label}{mark}{' '.join(row)}{mark}{' '.join(['0.5'] * len(row))}" for label, row in rows)
            path.write_text("\n".join([f"label{mark}f{mark}w", *lines]) + "\n")
    return path


@given(
    bags=st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=3), min_size=1, max_size=5),
    coding=st.sampled_from(sorted(CODINGS)),
    kind=st.sampled_from(KINDS),
    file=st.sampled_from(FILES),
    as_type=st.sampled_from(sorted(TYPES)),
    spelling=st.sampled_from(sorted(SPELLED)),
)
def test_a_number_is_one_id_however_it_is_spelled(
    tmp_path_factory: pytest.TempPathFactory,
    bags: list[list[int]],
    coding: str,
    kind: str,
    file: str,
    as_type: str,
    spelling: str,
) -> None:
    """As in a Parquet file of integers."""
    folder = tmp_path_factory.mktemp("spelling")
    if kind == "id" or file == "npz":
        bags = [bag[:1] for bag in bags]
    spec = spec_of(kind, CODINGS[coding])
    numbers = FileClickData([written(folder, bags, kind, "parquet", "int8", "7")], spec, holdout=0.0)
    expected = ids_of(numbers)
    assert len({*chain(*expected)}) == len({*chain(*bags)})
    if file == "request":
        as_json: Any = {"int8": int, "double": float}.get(as_type, SPELLED[spelling].format)
        for bag, ids in zip(bags, expected, strict=True):
            if len({*bag}) < len(bag) and kind == "weighted":
                continue  # an object has each name once
            row = [*map(as_json, bag)]
            value = row[0] if kind == "id" else dict.fromkeys(map(str, row), 0.5) if kind == "weighted" else row
            batch = batch_of_request(json.loads(json.dumps([{"f": value}])), numbers.spec)
            assert batch.sparse["f"].values().tolist() == ids
        return
    if file == "libsvm":
        columns = {"column": "ids", **({"weights": "values"} if kind == "weighted" else {})}
        spec = (
            spec_of(kind, CODINGS[coding] | columns)
            if kind != "weighted"
            else FeatureSpec.model_validate({"features": [{"name": "f", "kind": kind, **CODINGS[coding], **columns}]})
        )
        if kind == "id":
            return  # its lines have lists
    data = FileClickData([written(folder, bags, kind, file, as_type, spelling)], spec, holdout=0.0)
    assert ids_of(data) == expected
    assert recorded_ids(data.spec) == {"rules": 2, "spelling": {"f": "numbers"}}


@given(
    texts=st.lists(st.sampled_from(["7", "7.0", "8", "1.10", "1.1", "a", "07"]), min_size=1, max_size=6),
    coding=st.sampled_from(["hash", "dynamic ids"]),
    kind=st.sampled_from(["id", "multi_hot"]),
    file=st.sampled_from(["csv", "parquet"]),
)
def test_all_values_of_a_table_decide(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], coding: str, kind: str, file: str
) -> None:
    """7.0 is a text as soon as another value is not a whole number, in files and then in requests."""
    path = tmp_path_factory.mktemp("decide") / f"rows.{file}"
    if file == "csv":
        path.write_text("label,f\n" + "".join(f"1,{text}\n" for text in texts))
    else:
        pq.write_table(pa.table({"label": [1] * len(texts), "f": texts}), path)
    data = FileClickData([path], spec_of(kind, CODINGS[coding]), holdout=0.0)
    ids = ids_of(data)
    are_numbers = {*texts} <= {"7", "7.0", "8"}
    assert data.spec.sparse[0].spelling == ("numbers" if are_numbers else "texts")
    distinct = {text.removesuffix(".0") if are_numbers else text for text in texts}
    assert len({bag[0] for bag in ids}) == len(distinct)
    for text, bag in zip(texts, ids, strict=True):
        request = batch_of_request([{"f": text if kind == "id" else [text]}], data.spec)
        assert request.sparse["f"].values().tolist() == bag


@given(
    bags=st.lists(st.lists(st.sampled_from(["a", "b", "NA", "", r"\N", "-"]), max_size=4), min_size=1, max_size=5),
    missing=st.sampled_from([None, ["-"], []]),
    kind=st.sampled_from(KINDS),
    file=st.sampled_from(["csv", "parquet", "request"]),
)
def test_words_that_mean_missing(
    tmp_path_factory: pytest.TempPathFactory, bags: list[list[str]], missing: list[str] | None, kind: str, file: str
) -> None:
    """A list is without them, and an id of its own is that of missing values."""
    bags = [["", *bag][-1:] for bag in bags] if kind == "id" else bags
    spec = spec_of(kind, CODINGS["hash"], **({} if missing is None else {"missing": missing}))
    words = {"", *(spec.missing if missing is None else missing)}
    a, b = (
        batch_of_request([{"f": "x"}, {"f": name}], spec_of("id", CODINGS["hash"])).sparse.values()[1] for name in "ab"
    )
    known = {"a": int(a), "b": int(b)}
    path = tmp_path_factory.mktemp("missing") / f"rows.{file}"
    if file == "csv":
        weights = [["1"] * len(bag) if bag != [""] else [] for bag in bags]
        texts = [" ".join(bag) for bag in bags]
        lines = (f'1,"{text}",{" ".join(row)}\n' for text, row in zip(texts, weights, strict=True))
        path.write_text("label,f,w\n" + "".join(lines))
        if kind != "id":  # an empty text has no ids, and one between separators is missing
            bags = [[] if " ".join(bag) in words else bag for bag in bags]
    elif file == "parquet":
        columns = {"label": [1] * len(bags), "w": pa.array([[1.0] * len(bag) for bag in bags], pa.list_(pa.float64()))}
        pq.write_table(pa.table({**columns, "f": [bag[0] for bag in bags] if kind == "id" else bags}), path)
    if file == "request":
        bags = [[*dict.fromkeys(bag)] for bag in bags]
        rows = [bag[0] if kind == "id" else dict.fromkeys(bag, 1.0) if kind == "weighted" else bag for bag in bags]
        batch = batch_of_request([{"f": row} for row in rows], spec)
        found = [bag.tolist() for bag in batch.sparse["f"].to_dense()]
    else:
        found = ids_of(FileClickData([path], spec, holdout=0.0))
    for bag, ids in zip(bags, found, strict=True):
        left = [word for word in bag if word not in words]
        assert len(ids) == (1 if kind == "id" else len(left))
        if kind == "id" and not left:
            assert ids == [0]
        assert all(known.get(word, row) == row != 0 for word, row in zip(left, ids, strict=False))


@given(value=st.sampled_from([float(2**53), 2.0**60]), kind=st.sampled_from(["id", "multi_hot"]))
def test_floats_that_have_lost_digits_are_named(
    tmp_path_factory: pytest.TempPathFactory, value: float, kind: str
) -> None:
    path = tmp_path_factory.mktemp("lost") / "rows.parquet"
    pq.write_table(pa.table({"label": [1], "f": [value if kind == "id" else [value]]}), path)
    data = FileClickData([path], spec_of(kind, CODINGS["hash"]), holdout=0.0)
    with pytest.raises(DataError, match=r"field 'f': value .* is no id: .*below 2\^53"):
        ids_of(data)


def test_a_run_without_recorded_rules_keeps_texts_as_they_are_written() -> None:
    spec = spec_of("multi_hot", CODINGS["hash"]).with_ids({"rules": 1, "spelling": {}})
    ids = batch_of_request([{"f": ["7", "7.0", 7.0, "NA", ""]}], spec).sparse.values().tolist()
    assert ids[0] == ids[2]
    assert len({*ids}) == 4
    assert ids[4] == 0 != ids[3]
    assert not spec.undecided


def test_ids_that_are_recorded_beside_a_spec(tmp_path: Path) -> None:
    (tmp_path / "spec.yaml").write_text(
        "features:\n  - {name: f, kind: id, rows: 9}\n  - {name: g, kind: id, share: f}\n"
    )
    (tmp_path / IDS).write_text(json.dumps({"rules": 2, "spelling": {"f": "texts"}}))
    spec = load_spec(tmp_path / "spec.yaml")
    assert [feature.spelling for feature in spec.features] == ["texts", "texts"]
    (tmp_path / IDS).write_text("{}")
    with pytest.raises(ConfigError, match=r"ids\.json does not say how values become ids"):
        load_spec(tmp_path / "spec.yaml")

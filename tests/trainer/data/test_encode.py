"""Columns of Parquet and text files as a model's input, by a spec; against Python's own reading of the values."""

from __future__ import annotations

import ast
import lzma
import math
import re
from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import shardrec.trainer.data
from shardrec.errors import DataError
from shardrec.trainer.data import ClickBatch, Feature, FeatureSpec, criteo_spec, formats, open_click_data, tables
from shardrec.trainer.data import encode as encode_module
from shardrec.trainer.data.encode import Dictionary, Encoded, encode
from shardrec.trainer.data.ids import hash_texts
from tests.trainer.data.drawn import SPECS, rows_of, save, score
from tests.trainer.data.raw import SPEC, equal, line, lines, read, spread, write


def hashed(value: str | None, rows: int) -> int:
    if not value:
        return 0
    if re.fullmatch("0|-?[1-9][0-9]*", value):
        return spread(int(value)) % (rows - 1) + 1
    data = value.encode()
    digest = hash_texts(np.frombuffer(data, np.uint8), np.array([0]), np.array([len(data)]))[0]
    return int(digest) % (rows - 1) + 1


def expected(row: dict[str, Any]) -> dict[str, list[int]]:
    def of_list(values: list[str]) -> list[int]:
        return [hashed(value, 97) for value in values]

    return {
        "user": [hashed(row["who"], 1000)],
        "country": [{"de": 1, "fr": 2, "1": 3}.get(row["country"], 0)],
        "age": [0 if row["age"] is None else 1 + (row["age"] >= 18) + (row["age"] >= 30.5)],
        "code": [row["code"] or 0],
        "tags": of_list(row["tags"]),
        "history": of_list(row["history"])[-2:],
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("encode")


def bags(batch: ClickBatch, name: str) -> list[list[int]]:
    return [bag.tolist() for bag in batch.sparse[name].to_dense()]


@given(rows=rows_of, kind=st.sampled_from(["parquet", "csv", "tsv"]), block=st.sampled_from([1, 60, 1 << 20]))
def test_every_kind_of_column_from_every_kind_of_file(
    folder: Path, rows: list[dict[str, Any]], kind: str, block: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(formats, "_BLOCK_BYTES", max(block, 500))
        patch.setattr(tables, "_ROWS_AT_ONCE", block)
        batch = read(save(folder, rows, kind), SPECS)
    assert batch.labels.tolist() == [row["stars"] > 2.5 for row in rows]
    for name in SPECS.schema_.sparse_names:
        assert bags(batch, name) == [expected(row)[name] for row in rows], name
    weights = batch.sparse["tags"].weights().tolist()
    assert weights == [score(tag) for row in rows for tag in row["tags"]]
    for row, (price, size) in zip(rows, batch.dense.tolist(), strict=True):
        assert price == pytest.approx(0 if row["price"] is None else math.log(max(row["price"], -1) + 3), abs=1e-5)
        assert size == pytest.approx(0 if row["size"] is None else (row["size"] - 2) / 4, abs=1e-5)


PLAIN = FeatureSpec(features=(Feature(name="id", kind="id", rows=9, ids="number"), Feature(name="x", kind="dense")))


@pytest.mark.parametrize(
    ("broken", "reason", "message"),
    [
        (
            b"1\t2\t3\tab",
            "wrong number of columns",
            r"the line has 4 of 5 columns: '1\\t2\\t3.*; separate",
        ),
        (
            b"1\t2\t3\t0000000a\t\t9\n",
            "wrong number of columns",
            r"the line has 6 of 5 columns: '1\\t2\\t3.*; separate",
        ),
        (
            b"1\tabc\t3\t\t\n",
            "bad number",
            r"field 'int_1': value 'abc' is not a finite number among numbers, nor a date among dates; correct it, "
            "give a column of texts kind: id, or leave such rows out",
        ),
        (b"1\t1e999\t3\t\t\n", "bad number", r"field 'int_1': value '1e999' is not a finite number"),
        (b"1\t1e39\t3\t\t\n", "bad number", r"field 'int_1': value 1e\+39 is too large for a float32"),
        (b"2\t2\t3\t\t\n", "bad label", r"field 'label': value 2 is not 0 or 1"),
        (b"\t1\t\t\t\n", "bad label", r"field 'label': value None is not 0 or 1"),
        (b"1\t2\t3\t0000000g\t\n", "bad id", r"field 'cat_1': value '0000000g' is not a number of 1 to 16 hexadecimal"),
        (b"1\t2\t3\xff\t\t\n", "bad number", r"field 'int_2': value '3\\\\xff' is not a finite number"),
        (b"1\t2\t3\t0000\x00000\t\n", "bad id", r"field 'cat_1': value '0000\\x00000' is not a number"),
    ],
)
def test_a_broken_line(tmp_path: Path, broken: bytes, reason: str, message: str) -> None:
    path = write(tmp_path / "data.tsv", lines(3) + broken + (lines(2) if broken.endswith(b"\n") else b""))
    with pytest.raises(DataError, match=rf"data\.tsv:4: {message}"):
        read(path, SPEC)
    data = open_click_data(path, SPEC, holdout=0.0, on_bad_row="skip")
    assert sum(batch.size for batch in data.train_batches(0, 1, 2)) == (5 if broken.endswith(b"\n") else 3)
    assert data.skipped == {reason: 1}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"label": [0, 2]}, r":2: field 'label': value 2 is not 0 or 1"),
        ({"label": [None, 1]}, r":1: field 'label': value None is not 0 or 1"),
        ({"x": [0.5, float("inf")]}, r":2: field 'x': value inf is not a finite number"),
        ({"x": [0.5, -1e39]}, r":2: field 'x': value -1e\+39 is too large for a float32"),
        ({"id": [9, 1]}, r":1: field 'id': value 9 is not a whole number from 0 to 8"),
        ({"id": [1, -1]}, r":2: field 'id': value -1 is not a whole number"),
        ({"id": [1.5, 1]}, r":1: field 'id': value 1\.5 is not a whole number"),
    ],
)
def test_a_broken_row_of_a_parquet_file(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"label": [0, 1], "x": [0.5, 1.5], "id": [0, 8], **changes}), path)
    with pytest.raises(DataError, match=rf"a\.parquet{message}"):
        read(path, PLAIN)
    assert read(path, PLAIN, on_bad_row="skip").size == 1


@pytest.mark.parametrize("ids", [None, "number"])
@pytest.mark.parametrize("weights", ["1", "1|1e39", "", "1|2|3", "1|x"])
def test_a_row_whose_weights_are_not_those_of_its_ids(tmp_path: Path, weights: str, ids: Any) -> None:
    spec = FeatureSpec(features=(Feature(name="t", kind="weighted", rows=9, weights="w", ids=ids),))
    path = tmp_path / "a.csv"
    path.write_text(f"label,t,w\n1,1|2,.5|.25\n0,1|2,{weights}\n1,,\n0,3,.125\n", encoding="utf-8")
    with pytest.raises(DataError, match=r"a\.csv:3: field 'w': value .* has not a finite weight for each id of 't'"):
        read(path, spec)
    features = read(path, spec, on_bad_row="skip").sparse
    assert features.lengths().tolist() == [2, 0, 1]
    assert features.weights().tolist() == [0.5, 0.25, 0.125]


def test_dictionaries_numbers_and_booleans_are_ids(tmp_path: Path) -> None:
    spec = FeatureSpec(features=tuple(Feature(name=name, kind="id", rows=10**6) for name in "abcd"))
    encoded = pa.array(["x", None, "y"]).dictionary_encode()
    columns = {"a": encoded, "b": [7, None, 7], "c": [7.0, None, 7.0], "d": [True, False, None]}
    pq.write_table(pa.table({"label": [True, False, True], **columns}), tmp_path / "a.parquet")
    batch = read(tmp_path / "a.parquet", spec)
    a, b, c, d = ([bag[0] for bag in bags(batch, name)] for name in "abcd")
    assert a == [hashed("x", 10**6), 0, hashed("y", 10**6)]
    assert b == c
    assert b[0] == b[2] > 0 == b[1]
    assert (d[2], len(set(d))) == (0, 3)
    assert batch.dense.tolist() == [[1.0]] * 3  # a column of ones where there is no dense one


VALUES = st.lists(st.sampled_from(["1", "a", "fe", "", None, "zz"]), min_size=1, max_size=5)


@given(st.lists(VALUES, min_size=1, max_size=4))
def test_blocks_with_and_without_the_dictionary_of_the_block_before(blocks: list[list[str | None]]) -> None:
    """A dictionary that is known already, one that has grown as where a page of values follows, and others."""
    spec = FeatureSpec(
        features=(
            Feature(name="text", column="t", kind="id", rows=10**6),
            Feature(name="hex", column="t", kind="id", rows=10**6, ids="hexadecimal"),
            Feature(name="texts", column="l", kind="multi_hot", rows=10**6),
        )
    )

    def encoded(column: Any, dictionaries: dict[str, Dictionary] | None) -> Encoded:
        ends = [min(3 * row, len(column)) for row in range(len(column) + 1)]
        lists = pa.ListArray.from_arrays(pa.array(ends, pa.int32()), column)
        batch = pa.RecordBatch.from_arrays([column, lists], names=["t", "l"])
        return encode(batch, spec, labelled=False, dictionaries=dictionaries)

    dictionaries: dict[str, Dictionary] = {}
    joined = [value for values in blocks for value in values]
    for values in [*blocks, *blocks, joined, blocks[0]]:
        column = pa.array(values, pa.string())
        plain, known = encoded(column, None), encoded(column.dictionary_encode(), dictionaries)
        assert known.faults == plain.faults
        good = np.array([row for row in range(len(values)) if row not in plain.faults], dtype=np.int64)
        assert known.rows.take(good).ids.tolist() == plain.rows.take(good).ids.tolist()
        if len(values) > len(column.dictionary_encode().dictionary):
            assert dictionaries["hex"].values.equals(column.dictionary_encode().dictionary)


def test_a_dictionary_that_grows_with_each_block_is_not_encoded_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Parquet's is read where most values are distinct: the work must not be that of rows times blocks."""
    encoded_values: list[int] = []
    ids_of = encode_module._ids

    def counted(array: Any, feature: Feature, spec: FeatureSpec) -> Any:
        encoded_values.append(len(array))
        return ids_of(array, feature, spec)

    monkeypatch.setattr(encode_module, "_ids", counted)
    spec = FeatureSpec(features=(Feature(name="user", kind="id", rows=10**6),))
    names = pa.array([f"user {number}" for number in range(1000)])
    dictionaries: dict[str, Dictionary] = {}
    for stop in range(20, 1001, 20):
        column = pa.DictionaryArray.from_arrays(pa.array(range(stop - 20, stop), pa.int32()), names[:stop])
        for known in (dictionaries, None):
            block = encode(pa.table({"user": column}), spec, labelled=False, dictionaries=known)
            plain = encode(pa.table({"user": names[stop - 20 : stop]}), spec, labelled=False)
            assert block.rows.ids.tolist() == plain.rows.ids.tolist()
    assert sum(encoded_values) == 4 * 1000 + 1  # a null is after the first dictionary


def test_decimals_and_lists_of_one_length(tmp_path: Path) -> None:
    """As warehouses and array libraries write them; equal to the same numbers and lists of any length."""
    spec = FeatureSpec(
        features=(
            Feature(name="shop", kind="id", rows=10**6),
            Feature(name="pair", kind="multi_hot", rows=10**6),
            Feature(name="price", kind="dense"),
        )
    )
    label, shop, price = [0, 1, 1], [7, None, 9], [1.25, None, -3.5]
    pairs = [["a", "b"], None, ["c", None]]
    plain = {"label": label, "shop": pa.array(shop), "pair": pa.array(pairs), "price": pa.array(price)}
    other = {
        "label": pa.array(label, pa.int8()).cast(pa.decimal128(5, 0)),
        "shop": pa.array([None if one is None else Decimal(one) for one in shop], pa.decimal128(10, 2)),
        "pair": pa.array(pairs, pa.list_(pa.string(), 2)),
        "price": pa.array([None if one is None else Decimal(str(one)) for one in price], pa.decimal128(10, 2)),
    }
    pq.write_table(pa.table(plain), tmp_path / "plain.parquet")
    pq.write_table(pa.table(other), tmp_path / "other.parquet")
    assert equal(read(tmp_path / "plain.parquet", spec), read(tmp_path / "other.parquet", spec))


def test_dates_and_times_are_days(tmp_path: Path) -> None:
    spec = FeatureSpec(
        features=(
            Feature(name="day", kind="id", boundaries=(-1.0, 365.0, 730.5)),
            Feature(name="day again", column="day", kind="dense"),
            *(Feature(name=unit, kind="dense", mean=1.0, std=2.0) for unit in ("s", "ms", "us", "ns")),
            Feature(name="zone", kind="dense"),
        )
    )
    noon = datetime(1970, 1, 4, 12)
    columns: dict[str, Any] = {unit: pa.array([noon, None], pa.timestamp(unit)) for unit in ("s", "ms", "us", "ns")}
    columns |= {"day": [date(1971, 1, 1), None], "zone": pa.array([noon, None], pa.timestamp("us", "Asia/Tokyo"))}
    pq.write_table(pa.table({"label": [1, 0], **columns}), tmp_path / "a.parquet")
    batch = read(tmp_path / "a.parquet", spec)
    assert batch.dense.tolist() == [[365.0, 1.25, 1.25, 1.25, 1.25, 3.5], [0.0] * 6]
    assert bags(batch, "day") == [[3], [0]]
    words = "1970-01-04 12:00:00,1970-01-04T12:00,1970-01-04 12:00:00.000000,3.5,1971-01-01,1970-01-04 21:00+09:00"
    (tmp_path / "a.csv").write_text(f"label,s,ms,us,ns,day,zone\n1,{words}\n0,,,,,,\n", encoding="utf-8")
    texts = read(tmp_path / "a.csv", spec)
    assert torch.equal(texts.dense, batch.dense)
    assert bags(texts, "day") == [[3], [0]]
    (tmp_path / "a.csv").write_text("label,s,ms,us,ns,day,zone\n1,1970-02-30,1,1,1,1,1\n", encoding="utf-8")
    with pytest.raises(DataError, match=r"a\.csv:2: field 's': value '1970-02-30' is not a finite number"):
        read(tmp_path / "a.csv", spec)
    for column, at, bad in ((["1", "2", "1970-01-02"], 4, "1970-01-02"), (["1970-01-02", "2", "1970-01-02"], 3, "2")):
        rows = [f"1,{one},0,0,0,0,0\n" for one in column]
        (tmp_path / "a.csv").write_text("label,s,ms,us,ns,day,zone\n" + "".join(rows), encoding="utf-8")
        with pytest.raises(DataError, match=rf"a\.csv:{at}: field 's': value '{bad}' is not a finite number"):
            read(tmp_path / "a.csv", spec)


def test_dates_of_a_far_year(tmp_path: Path) -> None:
    """Which many databases have for "no end"; their microseconds are more than a float64 tells apart."""
    spec = FeatureSpec(features=(Feature(name="id", kind="id", rows=9), Feature(name="end", kind="dense")))
    for kind in (pa.date32(), pa.timestamp("us")):
        column = pa.array([date(9999, 12, 31), date(1970, 1, 2)], pa.date32()).cast(kind)
        pq.write_table(pa.table({"label": [1, 0], "id": ["a", "b"], "end": column}), tmp_path / "a.parquet")
        assert read(tmp_path / "a.parquet", spec).dense.tolist() == [[2_932_896.0], [1.0]]


@pytest.mark.parametrize("end", ["\n", ""])
def test_a_quote_without_its_end(tmp_path: Path, end: str) -> None:
    spec, path = FeatureSpec(features=(Feature(name="id", kind="id", rows=10**6),)), tmp_path / "a.csv"
    path.write_text('label,id\n1,a\n1,"b\n1,c' + end, encoding="utf-8")
    with pytest.raises(
        DataError, match=r"a\.csv ends inside of a quote, which begins in its last row, 3: end the quote"
    ):
        read(path, spec)
    plain = spec.model_copy(update={"quoted": False})
    assert read(path, plain).sparse.values().tolist() == [hashed(name, 10**6) for name in ("a", '"b', "c")]


def test_a_bad_value_that_python_cannot_read(tmp_path: Path) -> None:
    texts = pa.array([b"a", b"\xff"]).view(pa.string())
    coded = FeatureSpec(features=(Feature(name="id", kind="id", rows=9, ids="hexadecimal"),))
    timed = FeatureSpec(features=(Feature(name="id", kind="id", rows=9),), event_time="at")
    for spec, columns, words in (
        (coded, {"id": texts}, r"field 'id': value '\\\\xff' is not a number of 1 to 16"),
        (timed, {"id": ["a", "b"], "at": pa.array([0, 2**62], pa.timestamp("us"))}, r"value \(date .*\) is no date"),
    ):
        pq.write_table(pa.table({"label": [1, 0], **columns}), tmp_path / "a.parquet")
        with pytest.raises(DataError, match=words):
            read(tmp_path / "a.parquet", spec)
        assert read(tmp_path / "a.parquet", spec, on_bad_row="skip").size == 1


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_a_column_that_is_there_twice(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a.{suffix}"
    if suffix == "csv":
        path.write_text("label,x,id,id\n1,.5,0,1\n", encoding="utf-8")
    else:
        columns = [pa.array([1]), pa.array([0.5]), pa.array([0]), pa.array([1])]
        pq.write_table(pa.Table.from_arrays(columns, ["label", "x", "id", "id"]), path)
    with pytest.raises(DataError, match=r"there are several columns 'id': rename or remove all but one"):
        read(path, PLAIN)


def test_what_a_file_lacks_is_told_before_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"label": [[1]], "id": [{"k": 1}], "y": [1]}), path)
    with pytest.raises(DataError) as caught:
        read(path, PLAIN)
    text = str(caught.value)
    assert (
        "(columns label, id, y): column 'x' is missing: name the file's column in the spec (column:), or, for a" in text
    )
    assert "column 'label' has type list<element: int64>: write numbers" in text
    assert "column 'id' has type struct<k: int64>: write ids as texts or numbers" in text
    pq.write_table(pa.table({"label": [1], "id": [date(2025, 3, 1)], "x": [1]}), path)
    with pytest.raises(
        DataError, match=r"a\.parquet: column 'id' has type date32\[day\]: a date is read as a number of days: give"
    ):
        read(path, PLAIN)
    (tmp_path / "a.csv").write_text("label,id\n1,2\n", encoding="utf-8")
    with pytest.raises(DataError, match=r"a\.csv \(columns label, id\): column 'x' is missing"):
        read(tmp_path / "a.csv", PLAIN)
    (tmp_path / "b.csv").write_text("", encoding="utf-8")
    with pytest.raises(DataError, match=r"b\.csv is empty"):
        read(tmp_path / "b.csv", PLAIN)


@pytest.mark.parametrize("suffix", [".gz", ".xz", ".parquet"])
def test_a_damaged_file_is_an_error_even_when_skipping(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"data{suffix}"
    if suffix == ".parquet":
        table = pa.table({"label": [1] * 50, **{name: ["1"] * 50 for name in SPEC.sources[1:]}})
        pq.write_table(table, path)
    else:
        write(path, lines(2000))
    packed = path.read_bytes()
    path.write_bytes(packed[: len(packed) * 3 // 5])
    with pytest.raises(DataError, match=r"is damaged|no row could be read|is not a complete Parquet file"):
        for _ in open_click_data(path, SPEC, holdout=0.0, on_bad_row="skip").train_batches(0, 1, 8):
            pass


@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
@pytest.mark.parametrize("ended", [True, False])
def test_line_ends(tmp_path: Path, end: bytes, ended: bool) -> None:
    path = tmp_path / "data.tsv"
    path.write_bytes(end.join(line(number) for number in range(5)) + end * ended)
    assert read(path, SPEC).size == 5


NOON = datetime(2026, 1, 2, 12, 0, 0, 250_000, tzinfo=UTC)
TIMED = FeatureSpec(event_time="at", features=PLAIN.features)


def event_times(values: Any) -> list[float | str]:
    """The event time of each row, or what is wrong with it."""
    columns = {"label": [0] * len(values), "id": [1] * len(values), "x": [0.5] * len(values), "at": values}
    encoded = encode(pa.table(columns), TIMED)
    assert encoded.rows.times is not None
    return [encoded.faults[row].reason if row in encoded.faults else t for row, t in enumerate(encoded.rows.times)]


@pytest.mark.parametrize(
    "values",
    [
        *(pa.array([NOON], pa.timestamp(unit, zone)) for unit in ("ms", "us", "ns") for zone in (None, "Asia/Tokyo")),
        pa.array([NOON], pa.timestamp("us")).dictionary_encode(),
        pa.array([NOON.timestamp()]),
        pa.array([round(1000 * NOON.timestamp())]),
        pa.array([str(NOON.timestamp())]),
        pa.array([str(round(1000 * NOON.timestamp()))], pa.large_binary()),
        pa.array([NOON.isoformat()]).dictionary_encode(),
        pa.array([NOON.astimezone(timezone(timedelta(hours=-5))).isoformat()]),
        pa.array(["2026-01-02 12:00:00.25"]),
    ],
    ids=lambda values: str(values.type),
)
def test_event_times_are_seconds(values: Any) -> None:
    assert event_times(values) == [pytest.approx(NOON.timestamp(), abs=1e-5)]


def test_event_times_of_dates_of_nanoseconds_and_of_texts_among_numbers() -> None:
    """What a text is does not depend on the others, as the values beside it may be others after a resume."""
    assert event_times(pa.array([date(1970, 1, 2)])) == [86_400]
    assert event_times(pa.array([1_700_000_000_123_456_789], pa.timestamp("ns"))) == [pytest.approx(1.700000000123e9)]
    texts = ["1970-01-02", "7", "8.5", "", "noon", "inf", "nan", None, "9e98", "-7", "9999-12-31"]
    bad = "bad event time"
    assert event_times(texts) == [86_400, 7, 8.5, bad, bad, bad, bad, bad, bad, -7, bad]
    assert event_times(pa.nulls(2)) == [bad, bad]
    assert event_times([None, math.inf, 3.0]) == [bad, bad, 3]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([[1], [2]], r"column 'at' has type list<.*: write timestamps, seconds or milliseconds since 1970, or texts"),
        ([True, False], r"column 'at' has type bool: write timestamps"),
        (pa.array([1, 2], pa.time32("ms")), r"column 'at' has type time32\[ms\]: write timestamps"),
        (None, r"column 'at' is missing: name the file's column in the spec"),
    ],
)
def test_columns_that_are_no_event_times(values: Any, message: str, tmp_path: Path) -> None:
    columns = {"label": [0, 1], "id": [1, 2], "x": [0.5, 1.5]} | ({} if values is None else {"at": values})
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=message):
        open_click_data(tmp_path / "a.parquet", TIMED)


def test_real_rows(data_dir: Path) -> None:
    """Every field of Criteo's first rows, against Python's own parsing."""
    path, spec = data_dir / "criteo_raw_sample" / "kaggle_head.tsv.xz", criteo_spec()
    if not path.is_file():
        pytest.skip(f"no {path}: set SHARDREC_DATA to the folder that has it")
    batch = read(path, spec)
    with lzma.open(path, "rt") as file:
        table = [text.rstrip("\n").split("\t") for text in file]
    assert batch.labels.tolist() == [int(row[0]) for row in table]
    ids = batch.sparse.values().view(26, -1).t().tolist()
    for row, dense, found in zip(table, batch.dense.tolist(), ids, strict=True):
        wanted = [math.log(max(int(field), -1) + 3) if field else 0.0 for field in row[1:14]]
        assert dense == pytest.approx(wanted, rel=1e-5)
        sizes = spec.schema_.num_embeddings
        assert found == [int(field, 16) % (n - 1) + 1 if field else 0 for field, n in zip(row[14:], sizes, strict=True)]


def test_pyarrow_is_imported_inside_of_functions_only() -> None:
    for path in Path(shardrec.trainer.data.__file__).parent.glob("*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            names = [alias.name for alias in node.names] if isinstance(node, (ast.Import, ast.ImportFrom)) else []
            assert not any(name.startswith("pyarrow") for name in names)
            assert not (isinstance(node, ast.ImportFrom) and (node.module or "").startswith("pyarrow"))

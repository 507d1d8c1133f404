"""Which id a value is: one for each number, however a file, a request or a vocabulary writes it."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardrec import native
from shardrec.errors import DataError
from shardrec.trainer.data import Feature, FeatureSpec, batch_of_request, open_click_data
from shardrec.trainer.data import ids as ids_module
from shardrec.trainer.data.encode import encode
from shardrec.trainer.data.ids import hash_texts
from tests.trainer.data.raw import read, spread, vocabularies

CODINGS: dict[str, dict[str, Any]] = {
    "hash": {"rows": 10**6},
    "vocabulary": {"vocabulary": ("8", "7", "a.0")},
    "dynamic ids": {"rows": 10**6, "dynamic_ids": {}},
}


def spec_of(kind: str = "id", **coding: Any) -> FeatureSpec:
    more = {"weights": "w"} if kind == "weighted" else {}
    return FeatureSpec.model_validate({"features": [{"name": "f", "kind": kind, **coding, **more}]})


def ids_of(array: pa.Array, spec: FeatureSpec) -> list[int]:
    table = pa.table({"f": array, "w": pa.array([[0.5]] * len(array))})
    encoded = encode(table, spec, labelled=False)
    assert not encoded.faults
    return encoded.rows.ids.tolist()


@pytest.mark.parametrize("coding", CODINGS)
def test_seven_and_eight_are_one_id_each_in_every_spelling(coding: str) -> None:
    texts = [["7", "8"], ["7.0", "8.0"], ["7.", "8.00"]]
    columns = [pa.array(spelled, kind) for spelled in texts for kind in (pa.string(), pa.large_binary())]
    columns += [pa.array([7, 8], kind) for kind in (pa.int8(), pa.uint64(), pa.float32(), pa.float64())]
    columns += [pa.array([Decimal(7), Decimal(8)], kind) for kind in (pa.decimal128(18, 2), pa.decimal256(40, 0))]
    expected = ids_of(pa.array([7, 8]), spec_of(**CODINGS[coding]))
    assert len({0, *expected}) == 3
    for column in columns:
        for array in (column, column.dictionary_encode()):
            assert ids_of(array, spec_of(**CODINGS[coding])) == expected, array.type
        lists = pa.ListArray.from_arrays(pa.array([0, 1, 2], pa.int32()), column)
        for kind in ("multi_hot", "weighted"):
            assert ids_of(lists, spec_of(kind, **CODINGS[coding])) == expected, lists.type
    joined = pa.array(["7.0|8", "8.0|7.00"])
    assert ids_of(joined, spec_of("multi_hot", **CODINGS[coding])) == expected + expected[::-1]


@pytest.mark.parametrize("coding", CODINGS)
def test_requests_spell_numbers_as_files_do(coding: str) -> None:
    spec, listed, weighted = (spec_of(kind, **CODINGS[coding]) for kind in ("id", "sequence", "weighted"))
    expected = ids_of(pa.array([7]), spec)
    for value in (7, 7.0, "7", "7.0"):
        assert batch_of_request([{"f": value}], spec).sparse.values().tolist() == expected
        assert batch_of_request([{"f": [value]}], listed).sparse.values().tolist() == expected
        assert batch_of_request([{"f": {value: 1.0}}], weighted).sparse.values().tolist() == expected


def test_booleans_are_0_and_1() -> None:
    spec = spec_of(vocabulary=("0", "1"))
    assert ids_of(pa.array([False, True, None]), spec) == [1, 2, 0]
    assert batch_of_request([{"f": True}], spec).sparse.values().tolist() == [2]
    older = spec_of(vocabulary=("true", "false"))  # as older versions counted them
    assert ids_of(pa.array([False, True]), older) == [2, 1]


def test_vocabularies_of_older_versions_keep_their_rows() -> None:
    """They have values as the files wrote them."""
    spec = spec_of(vocabulary=("7.0", "7", "1e+16", "0.5", "1.000000000000007e+15", "nan", "9.0"))
    assert ids_of(pa.array(["7.0", "7", "0.5", "9"]), spec) == [1, 2, 4, 7]
    assert ids_of(pa.array([7.0, 1e16, 0.5, 1e15 + 7, float("nan"), 9.0, 0.0]), spec) == [2, 3, 4, 5, 6, 7, 0]


def test_vocabularies_from_data_have_ids(tmp_path: Path) -> None:
    spec = spec_of(vocabulary="from_data")
    columns = {
        "7.0\n7\n7.00\n8\n": ["7", "8"],
        "7.0\n7\n7.00\ncafé\n": ["7", "7.0", "7.00", "café"],
        "1.10\n1.1\n1.0\n": ["1.0", "1.1", "1.10"],
    }
    for lines, expected in columns.items():
        (tmp_path / "a.csv").write_text("f,label\n" + lines.replace("\n", ",0\n"), encoding="utf-8")
        assert vocabularies([tmp_path / "a.csv"], spec) == {"f": expected}
    for array, expected in (
        (pa.array([7.0, None, float("nan"), 0.5, 7.0]), ["7", "0.5"]),
        (pa.array([True, True, False]), ["1", "0"]),
        (pa.array([Decimal("7.00"), Decimal("7.25"), Decimal("7.00")]), ["7", "7.25"]),
    ):
        pq.write_table(pa.table({"f": array, "label": [0] * len(array)}), tmp_path / "a.parquet")
        assert vocabularies([tmp_path / "a.parquet"], spec) == {"f": expected}


@pytest.mark.parametrize("coding", [*CODINGS, "number"])
@pytest.mark.parametrize(
    ("kind", "exact"), [(pa.float16(), 2**11 - 1), (pa.float32(), 2**24 - 1), (pa.float64(), 2**53 - 1)]
)
def test_floats_that_may_have_lost_digits_are_refused(coding: str, kind: pa.DataType, exact: int) -> None:
    if coding == "number" and exact >= 2**31:
        pytest.skip("no table has such rows")
    spec = spec_of(**CODINGS.get(coding, {"rows": 2**31 - 1, "ids": "number"}))
    table = pa.table({"f": pa.array(np.array([exact, exact + 1, -7], kind.to_pandas_dtype()), kind)})
    encoded = encode(table, spec, labelled=False)
    assert [*encoded.faults] == ([1, 2] if coding == "number" else [1])
    assert f"field 'f': value {exact + 1}.0 is no" in encoded.faults[1].where


@pytest.mark.parametrize(
    "value", ["9007199254740992.0", "-9007199254740993.", "1.2345678E7", "1.5e+17", "9" * 400 + ".0"]
)
def test_texts_of_floats_that_may_have_lost_digits_are_refused(value: str) -> None:
    (fault,) = encode(pa.table({"f": ["a.b", value, None]}), spec_of(rows=99), labelled=False).faults.values()
    assert f"field 'f': value '{value[:50]}" in fault.where
    with pytest.raises(DataError, match=r"row 0: field 'f': value .* is no id: give a text in UTF-8, or a whole"):
        batch_of_request([{"f": value}], spec_of(rows=99))


def test_large_numbers_of_requests_are_refused_as_floats_only() -> None:
    spec = spec_of(rows=10**6, dynamic_ids={})
    assert batch_of_request([{"f": 2**53 + 1}], spec).sparse.values().tolist() == [2**53 + 1]
    with pytest.raises(DataError, match=r"field 'f': value '9007199254740992\.0' is no id"):
        batch_of_request([{"f": 2.0**53}], spec)


@pytest.mark.parametrize("features", [{"rows": 99}, {"vocabulary": ("café", "plain")}, {"rows": 99, "dynamic_ids": {}}])
@pytest.mark.parametrize("kind", ["id", "multi_hot"])
def test_a_text_file_that_is_not_utf8(tmp_path: Path, features: dict[str, Any], kind: str) -> None:
    path, spec = tmp_path / "a.csv", spec_of(kind, **features)
    path.write_bytes("label,f\n1,plain\n0,café\n1,été\n".encode("latin-1"))
    with pytest.raises(DataError, match=r"a\.csv:3: field 'f': value 'caf\\\\xe9' is no id: give a text in UTF-8"):
        read(path, spec)
    data = open_click_data(path, spec, holdout=0.0, on_bad_row="skip")
    assert sum(batch.size for batch in data.train_batches(0, 1, 9)) == 1
    assert data.skipped == {"bad id": 2}
    path.write_text("label,f\n1,plain\n0,café\n", encoding="utf-8")
    assert read(path, spec).size == 2


def test_bytes_of_a_binary_column_are_ids_of_a_hash_only(tmp_path: Path) -> None:
    table = pa.table({"f": pa.array([b"\xff\x00", b"a"])})
    assert not encode(table, spec_of(rows=99), labelled=False).faults
    assert [*encode(table, spec_of(vocabulary=("a",)), labelled=False).faults] == [0]


whole = st.integers(-(2**63), 2**64 - 1) | st.sampled_from([0, -1, 2**63 - 1, -(2**63), 2**64 - 1, 10**19])
KEYS = FeatureSpec(features=(Feature(name="id", kind="id", rows=2**31 - 1),))


@given(numbers=st.lists(whole, min_size=1, max_size=8))
def test_a_whole_number_is_one_id_in_every_column(numbers: list[int]) -> None:
    def ids(array: Any) -> list[int]:
        table = pa.table({"label": pa.array([0] * len(array)), "id": array})
        return encode(table, KEYS).rows.ids.tolist()

    expected = [spread(number) % (2**31 - 2) + 1 for number in numbers]
    assert ids(pa.array([str(number) for number in numbers])) == expected
    assert ids(pa.array([np.uint64(number % 2**64) for number in numbers], pa.uint64())) == expected
    assert ids(pa.array([Decimal(number) for number in numbers], pa.decimal128(20, 0))) == expected
    small = [number % 2**31 for number in numbers]
    assert ids(pa.array([float(number) for number in small])) == ids(pa.array(small, pa.int32()))
    assert ids(pa.array([f"{number}.00" for number in small])) == ids(pa.array(small, pa.int32()))


def test_numbers_that_are_no_ids_of_64_bits(tmp_path: Path) -> None:
    numbers = pa.array([1e30, 2.0**53, -1e30, 1.5, 2.0**53 - 1])
    decimals = pa.array(
        [None if number == 1.5 else Decimal("1.5") for number in numbers.to_pylist()], pa.decimal128(3, 1)
    )
    for column, bad in ((numbers, 4), (decimals, 4)):
        pq.write_table(pa.table({"label": [0] * 5, "id": column}), tmp_path / "a.parquet")
        assert read(tmp_path / "a.parquet", KEYS, on_bad_row="skip").size == 5 - bad


@given(numbers=st.lists(st.none() | st.integers(-(2**63) + 1, 2**63 - 1), min_size=1, max_size=9))
def test_a_whole_number_is_its_own_dynamic_id(numbers: list[int | None]) -> None:
    """In a column of numbers or of texts; another text is its hash, and a missing value an id of its own."""
    column = {"name": "f", "kind": "id", "rows": 7, "dynamic_ids": {}}
    spec = FeatureSpec.model_validate({"features": [column]})
    expected = [-(2**63) if one is None else one for one in numbers]
    texts = [None if one is None else str(one) for one in numbers]
    for array in (pa.array(numbers, pa.int64()), pa.array(texts, pa.string())):
        assert encode(pa.table({"f": array}), spec, labelled=False).rows.ids.tolist() == expected
    array = pa.array(["seven", "07", "seven", "", None])
    one, two, again, *missing = encode(pa.table({"f": array}), spec, labelled=False).rows.ids.tolist()
    assert (one == again, one == two, missing) == (True, False, [-(2**63)] * 2)
    hexadecimal = FeatureSpec.model_validate({"features": [{**column, "ids": "hexadecimal"}]})
    table = pa.table({"f": ["ffffffffffffffff", "1f", ""]})
    assert encode(table, hexadecimal, labelled=False).rows.ids.tolist() == [-1, 31, -(2**63)]


def test_texts_of_nulls_and_of_no_rows() -> None:
    """A null may have bytes, and a column without rows no offsets: other libraries write such columns."""
    validity, offsets, letters = (pa.py_buffer(part) for part in (b"\x02", np.array([0, 2, 4], np.int32), b"zz12"))
    array = pa.Array.from_buffers(pa.string(), 2, [validity, offsets, letters])
    empty = pa.Array.from_buffers(pa.string(), 0, [None, pa.py_buffer(b""), pa.py_buffer(b"")])
    for ids, expected in (("hexadecimal", 0x12), ("hash", 12)):
        column = {"name": "f", "kind": "id", "rows": 7, "dynamic_ids": {}, "ids": ids}
        spec = FeatureSpec.model_validate({"features": [column]})
        encoded = encode(pa.table({"f": array}), spec, labelled=False)
        assert (encoded.rows.ids.tolist(), encoded.faults) == ([-(2**63), expected], {})
        assert encode(pa.table({"f": empty}), spec, labelled=False).rows.ids.tolist() == []


@pytest.mark.parametrize(
    "text", ["07", "+7", "-0", "-", "7 ", "1.10", "7.0.0", "07.0", ".0", "18446744073709551616", "-9223372036854775809"]
)
def test_other_texts_are_no_numbers(text: str) -> None:
    data = np.frombuffer(text.encode(), np.uint8)
    table = pa.table({"label": [0], "id": [text]})
    digest = int(hash_texts(data, np.array([0]), np.array([len(data)]))[0])
    assert encode(table, KEYS).rows.ids.tolist() == [digest % (2**31 - 2) + 1]


NUMBERS = st.integers(-(2**64), 2**65).map(str)
TEXTS = st.one_of(NUMBERS, st.text("-0179afFg", max_size=18), st.text(max_size=25), st.just("9" * 20), st.none())


@pytest.mark.skipif(not native.has_operators(), reason="the C++ operators were not compiled")
@given(
    texts=st.lists(TEXTS, max_size=9),
    kind=st.sampled_from([pa.string(), pa.large_string(), pa.binary(), pa.large_binary()]),
    start=st.integers(0, 3),
    hexadecimal=st.booleans(),
    spread=st.booleans(),
)
def test_keys_of_texts_are_those_without_the_operator(
    texts: list[str | None], kind: pa.DataType, start: int, hexadecimal: bool, spread: bool
) -> None:
    encoded = [None if text is None else text.encode() for text in texts]
    array = pa.array(encoded, pa.large_binary()).cast(kind)[start:]
    keys, missing, bad = ids_module.text_keys(array, hexadecimal=hexadecimal, spread=spread)
    with patch.object(ids_module, "has_operators", lambda: False):
        expected_keys, *expected = ids_module.text_keys(array, hexadecimal=hexadecimal, spread=spread)
    assert [missing.tolist(), bad.tolist()] == [each.tolist() for each in expected]
    assert keys[~bad].tolist() == expected_keys[~bad].tolist()


def test_hashes_are_the_same_everywhere_and_spread() -> None:
    data = [f"user-{number}".encode() for number in range(20_000)]
    sizes = np.array([len(one) for one in data])
    found = hash_texts(np.frombuffer(b"".join(data), np.uint8), np.cumsum(sizes) - sizes, sizes)
    assert len(set(found.tolist())) == len(data)
    counts = np.bincount((found % np.uint64(100)).astype(int), minlength=100)
    assert counts.std() < 25  # 14 by chance
    assert (
        hash_texts(np.frombuffer(b"xab", np.uint8), np.array([1]), np.array([2]))[0]
        == hash_texts(np.frombuffer(b"ab", np.uint8), np.array([0]), np.array([2]))[0]
    )

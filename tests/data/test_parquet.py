from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import shardrec.data
from shardrec.data import ClickBatch
from shardrec.data.fault import FaultLog
from shardrec.data.parquet import check_parquet, read_parquet
from shardrec.data.rows import join_rows
from shardrec.errors import DataError
from tests.data.raw import SCHEMA

ONE: dict[str, Any] = {
    "label": [0, 1, 1],
    "int_1": pa.array([1, None, -1], pa.int32()),
    "int_2": [0.5, float("nan"), None],
    "cat_1": ["0000000a", None, ""],
    "cat_2": pa.array([7, None, 1005], pa.int64()),
}


def save(path: Path, **changes: Any) -> Path:
    pq.write_table(pa.table({**ONE, **changes}), path)
    return path


def read(path: Path, log: FaultLog | None = None, columns: dict[str, str] | None = None) -> ClickBatch:
    check_parquet(path, SCHEMA, columns or {})
    blocks = read_parquet(path, SCHEMA, log or FaultLog("raise"), columns or {})
    return join_rows([block.rows for block in blocks]).to_batch(SCHEMA)


def bags(batch: ClickBatch, name: str) -> list[list[int]]:
    return [bag.tolist() for bag in batch.sparse[name].to_dense()]


def test_values_nulls_and_hashes(tmp_path: Path) -> None:
    batch = read(save(tmp_path / "a.parquet"))
    assert batch.labels.tolist() == [0, 1, 1]
    assert batch.dense.exp().round(decimals=3).tolist() == [[4, 3.5], [1, 1], [2, 1]]
    assert bags(batch, "cat_1") == [[1], [0], [0]]  # 10 mod 10 + 1
    assert bags(batch, "cat_2") == [[8], [0], [7]]  # 1005 mod 999 + 1


lists = st.lists(
    st.none() | st.lists(st.none() | st.integers(0, 2**32 - 1), max_size=3), min_size=1, max_size=8
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("parquet")


@settings(max_examples=25)
@given(column=lists, kind=st.sampled_from(["string", "large", "int", "dictionary"]), chunk=st.integers(1, 9))
def test_lists_are_bags(folder: Path, column: list[list[int | None] | None], kind: str, chunk: int) -> None:
    texts = [None if bag is None else [None if v is None else f"{v:08x}" for v in bag] for bag in column]
    array = {
        "string": lambda: pa.array(texts, pa.list_(pa.string())),
        "large": lambda: pa.array(texts, pa.large_list(pa.large_string())),
        "int": lambda: pa.array(column, pa.list_(pa.int64())),
        "dictionary": lambda: pa.array(texts, pa.list_(pa.string())),
    }[kind]()
    if kind == "dictionary":
        values = array.values.dictionary_encode()
        array = pa.ListArray.from_arrays(array.offsets, values, mask=array.is_null())
    count = len(column)
    path = save(
        folder / "lists.parquet",
        label=[1] * count,
        int_1=list(range(count)),
        int_2=[None] * count,
        cat_1=[f"{number:08x}" for number in range(count)],
        cat_2=array,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shardrec.data.parquet._ROWS_AT_ONCE", chunk)
        batch = read(path)
    expected = [[0] if bag is None else [0 if v is None else v % 999 + 1 for v in bag] for bag in column]
    assert bags(batch, "cat_2") == expected
    assert bags(batch, "cat_1") == [[number % 10 + 1] for number in range(count)]


def test_dictionaries_and_booleans(tmp_path: Path) -> None:
    encoded = pa.array(["0000000a", None, "0000000b"]).dictionary_encode()
    batch = read(save(tmp_path / "a.parquet", label=[True, False, True], cat_1=encoded))
    assert batch.labels.tolist() == [1, 0, 1]
    assert bags(batch, "cat_1") == [[1], [0], [2]]


@pytest.mark.parametrize(
    ("changes", "reason", "message"),
    [
        ({"label": [0, 2, 1]}, "bad label", r":2: field 'label': value 2\.?0? is not 0 or 1; correct it"),
        ({"label": [0, 1, None]}, "bad label", r":3: field 'label': value None is not 0 or 1"),
        ({"int_2": [0.5, float("inf"), 1]}, "bad number", r":2: field 'int_2': value inf is not a finite number"),
        ({"cat_1": ["xyz", None, ""]}, "bad category", r":1: field 'cat_1': value 'xyz' is not 8 hexadecimal digits"),
        ({"cat_1": [[], ["0000000a", "q"], None]}, "bad category", r":2: field 'cat_1': value \['0000000a', 'q'\] is"),
    ],
)
def test_a_broken_row(tmp_path: Path, changes: dict[str, Any], reason: str, message: str) -> None:
    path = save(tmp_path / "a.parquet", **changes)
    with pytest.raises(DataError, match=rf"a\.parquet{message}"):
        read(path)
    log = FaultLog("skip")
    assert read(path, log).size == 2
    assert log.skipped == {reason: 1}


def test_columns_under_other_names(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table(ONE).rename_columns(["clicked", "int_1", "int_2", "site", "cat_2"]), path)
    assert read(path, columns={"label": "clicked", "cat_1": "site"}).labels.tolist() == [0, 1, 1]


def test_all_faults_of_the_columns_are_told_together(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    columns = {"label": ["0", "1"], "int_1": [[1], [2]], "cat_1": [0.5, 1.5], "cat_2": ["0000000a", None]}
    pq.write_table(pa.table(columns), path)
    with pytest.raises(DataError) as caught:
        check_parquet(path, SCHEMA, {})
    text = str(caught.value)
    assert "(columns label, int_1, cat_1, cat_2)" in text
    assert "column 'label' has type string: write 0 and 1 as integers" in text
    assert "column 'int_1' has type list" in text
    assert "column 'int_2' is missing: map 'int_2' to one of the file's columns with columns=" in text
    assert "column 'cat_1' has type double: write categories as strings of 8 hexadecimal digits" in text
    assert "'cat_2'" not in text


def test_a_truncated_file(tmp_path: Path) -> None:
    path = save(tmp_path / "a.parquet")
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DataError, match=r"a\.parquet is not a complete Parquet file .*: copy or write it again"):
        check_parquet(path, SCHEMA, {})


def test_a_damaged_page(tmp_path: Path) -> None:
    """The first row group is whole, the second one's data is overwritten."""
    path = tmp_path / "a.parquet"
    count = 16_384
    rng = np.random.default_rng(0)
    texts = [f"{value:08x}" for value in rng.integers(0, 2**32, 2 * count)]
    zeros = np.zeros(2 * count, np.int64)
    table = pa.table({"label": zeros, "int_1": zeros, "int_2": zeros, "cat_1": texts, "cat_2": zeros})
    pq.write_table(table, path, row_group_size=count, compression="zstd")
    place = pq.ParquetFile(path).metadata.row_group(1).column(3)
    data = bytearray(path.read_bytes())
    middle = place.dictionary_page_offset or place.data_page_offset
    data[middle + 200 : middle + 20_000] = bytes(19_800)
    path.write_bytes(data)
    with pytest.raises(DataError, match=rf"a\.parquet:{count + 1}: the page is damaged \("):
        read(path)
    log = FaultLog("skip")
    assert read(path, log).size == count
    assert log.skipped == {"truncated stream": 1}


def test_pyarrow_is_imported_inside_of_functions_only() -> None:
    for path in Path(shardrec.data.__file__).parent.glob("*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            names = [alias.name for alias in node.names] if isinstance(node, (ast.Import, ast.ImportFrom)) else []
            assert not any(name.startswith("pyarrow") for name in names)
            assert not (isinstance(node, ast.ImportFrom) and (node.module or "").startswith("pyarrow"))


def test_columns_without_any_value(tmp_path: Path) -> None:
    nothing = pa.array([[], None, [None]], pa.list_(pa.null()))
    batch = read(save(tmp_path / "a.parquet", int_1=pa.nulls(3), cat_1=pa.nulls(3), cat_2=nothing))
    assert batch.dense[:, 0].tolist() == [0, 0, 0]
    assert bags(batch, "cat_1") == [[0], [0], [0]]
    assert bags(batch, "cat_2") == [[], [0], [0]]

"""NumPy archives and LIBSVM's text are read as the same rows in Parquet are."""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardrec.errors import DataError
from shardrec.trainer.data import Feature, FeatureSpec, FileClickData, formats, open_click_data
from tests.trainer.data.raw import LINES, equal, write

ARRAYS = FeatureSpec(
    features=(
        Feature(name="user", kind="id", rows=1000),
        Feature(name="tags", kind="multi_hot", rows=1000),
        Feature(name="price", kind="dense"),
    )
)
pairs = st.lists(st.tuples(st.integers(0, 999), st.floats(-9, 9, width=32)), max_size=4)
rows_of = st.lists(st.tuples(st.sampled_from([-1, 1]), st.integers(0, 3), pairs), min_size=1, max_size=9)


def batches(path: Path, spec: FeatureSpec, **options: object) -> list:
    return list(open_click_data(path, spec, holdout=0.0, **options).train_batches(0, 1, 4))


@given(rows=rows_of, block=st.sampled_from([300, 1 << 20]), ending=st.sampled_from(["\n", "\r\n", " # why\n"]))
def test_lines_of_pairs(tmp_path_factory: pytest.TempPathFactory, rows: list, block: int, ending: str) -> None:
    folder = tmp_path_factory.mktemp("svm")
    text = "".join(
        f"{label} qid:{query} " + " ".join(f"{index}:{value!r}" for index, value in found) + ending
        for label, query, found in rows
    )
    path = write(folder / "rows.libsvm", text.encode())
    columns = {
        "label": [label for label, _, _ in rows],
        "qid": [query for _, query, _ in rows],
        "ids": pa.array([[index for index, _ in found] for _, _, found in rows], pa.list_(pa.int64())),
        "values": pa.array([[value for _, value in found] for _, _, found in rows], pa.list_(pa.float64())),
    }
    pq.write_table(pa.table(columns), folder / "rows.parquet")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(formats, "_BLOCK_BYTES", block)
        found = batches(path, LINES)
    expected = batches(folder / "rows.parquet", LINES)
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert equal(one, other)
        assert one.groups.tolist() == other.groups.tolist()


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("1 qid:1 7", "word 3: '7' is not index:value with a number; correct it"),
        ("1 qid:1 7:x", "pair 2: '7:x' is not index:value"),
        ("1 qid:1 7:1 8:", "pair 3: '8:' is not index:value"),
        ("", "the line is empty"),
        ("yes qid:1 7:1", "field 'label': value 'yes' is not a number"),
        ("1 7:1", "field 'qid': value None is no id of a group"),
        ("1 qid:1 1000:1", "field 'ids': value .* is not a whole number from 0 to 999"),
    ],
)
def test_a_broken_line_is_named(tmp_path: Path, line: str, words: str) -> None:
    path = write(tmp_path / "rows.svm.gz", f"1 qid:1 3:1\n{line}\n-1 qid:1 4:1\n".encode())
    with pytest.raises(DataError, match=rf"rows\.svm\.gz:2: {words}"):
        batches(path, LINES)
    (batch,) = batches(path, LINES, on_bad_row="skip")
    assert batch.sparse.values().tolist() == [3, 4]


@pytest.mark.parametrize("at_once", [2, 100])
def test_an_archive_of_arrays(tmp_path: Path, at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "_ROWS_AT_ONCE", at_once)
    columns = {
        "label": np.array([0, 1, 1, 0, 1]),
        "user": np.array(["a", "b", "a", "c", "7"]),
        "tags": np.array([[1, 2], [3, 4], [5, 6], [7, 8], [9, 9]]),
        "price": np.array([1, 2, 3, 4, 5], np.float32),
    }
    np.savez_compressed(tmp_path / "rows.npz", **columns, unused=np.zeros(3))
    pq.write_table(pa.table({**columns, "tags": columns["tags"].tolist()}), tmp_path / "rows.parquet")
    found, expected = (batches(tmp_path / f"rows.{kind}", ARRAYS) for kind in ("npz", "parquet"))
    assert all(map(equal, found, expected))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"user": np.array(["a"])}, "different numbers of rows"),
        ({"price": np.zeros((2, 1, 1))}, r"array 'price' has shape \(2, 1, 1\)"),
        ({"user": np.array([{}, {}], object)}, r"not an \.npz archive of plain arrays"),
        ({"price": np.zeros((2, 2))}, "column 'price' has type list<item: double>: write numbers"),
    ],
)
def test_a_bad_archive(tmp_path: Path, changes: dict[str, np.ndarray], words: str) -> None:
    columns = {
        "label": np.array([0, 1]),
        "user": np.array(["a", "b"]),
        "tags": np.ones((2, 1), int),
        "price": np.ones(2),
    }
    np.savez(tmp_path / "rows.npz", **(columns | changes))
    with pytest.raises(DataError, match=words):
        batches(tmp_path / "rows.npz", ARRAYS)


def test_no_archive(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="does not exist"):
        batches(tmp_path / "rows.npz", ARRAYS)
    (tmp_path / "rows.npz").write_bytes(b"PK\x03\x04 but cut short")
    with pytest.raises(DataError, match=r"not an \.npz archive"):
        batches(tmp_path / "rows.npz", ARRAYS)
    np.savez(tmp_path / "rows.npz", label=np.ones(2))
    with pytest.raises(DataError, match="columns 'price', 'user', 'tags' are missing"):
        batches(tmp_path / "rows.npz", ARRAYS)


def test_an_archive_in_the_order_of_columns(tmp_path: Path) -> None:
    np.savez(
        tmp_path / "rows.npz", label=np.ones(2), user=np.ones(2), price=np.ones(2), tags=np.ones((2, 3)).T.copy().T
    )
    with pytest.raises(DataError, match=r"array 'tags' is in Fortran's order: write numpy\.ascontiguousarray of it"):
        batches(tmp_path / "rows.npz", ARRAYS)


def test_an_archive_whose_header_lies(tmp_path: Path) -> None:
    """About the size of an array, which nobody allocates before the values have come."""
    np.save(tmp_path / "a.npy", np.zeros(9))
    data = (tmp_path / "a.npy").read_bytes().replace(b"(9,), }" + b" " * 13, b"(999999999999999,), }")
    with zipfile.ZipFile(tmp_path / "rows.npz", "w") as file:
        for name in ("label", "user"):
            file.writestr(f"{name}.npy", data)
    with pytest.raises(DataError, match=r"rows\.npz is not an \.npz archive of plain arrays"):
        batches(tmp_path / "rows.npz", FeatureSpec(features=(Feature(name="user", kind="id", rows=9),)))


@pytest.mark.parametrize("holdout", [0.0, 0.3])
@pytest.mark.parametrize("name", ["a.csv", "b.csv", "c.csv.gz", "d.parquet", "e.npz", "f.tsv"])
def test_rows_are_counted_as_they_are_read(
    tmp_path: Path, name: str, holdout: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In blocks of a few lines; b.csv ends without a line feed, f.tsv has no header."""
    monkeypatch.setattr(formats, "_BLOCK_BYTES", 50)
    users = [f"user {number}" for number in range(50)]
    spec = FeatureSpec(features=(Feature(name="user", kind="id", rows=1000),))
    path = tmp_path / name
    text = "label,user\n" + "".join(f"{number % 2},{user}\n" for number, user in enumerate(users))
    match path.suffix:
        case ".parquet":
            pq.write_table(pa.table({"label": [number % 2 for number in range(50)], "user": users}), path)
        case ".npz":
            np.savez(path, label=np.arange(50) % 2, user=np.array(users))
        case ".tsv":
            spec = spec.model_copy(update={"columns": ("label", "user"), "delimiter": ","})
            write(path, text.partition("\n")[2].encode())
        case _:
            write(path, (text.removesuffix("\n") if name == "b.csv" else text).encode())
    data = FileClickData([path, path], spec, holdout=holdout)
    assert data.train_rows == (100 if not holdout else pytest.approx(70, abs=10))
    assert sum(batch.size for batch in data.train_batches(0, 1, 16)) == data.train_rows
    assert sum(batch.size for batch in data.holdout_batches(0, 1, 16)) == 100 - data.train_rows


def test_damaged_files_are_not_counted(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.svm.gz", b"1 qid:1 7:1\n" * 30)
    path.write_bytes(path.read_bytes()[:-9])
    data = FileClickData([path], LINES)
    with pytest.raises(DataError, match="the file is damaged"):
        data.count()


def test_no_memory_is_no_damage() -> None:
    with pytest.raises(DataError, match=r"a\.csv: no memory to read it \(malloc"), formats.undamaged("a.csv"):
        raise pa.ArrowMemoryError("malloc of size 9 failed")

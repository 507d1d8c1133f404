from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from shardrec.errors import DataError
from shardrec.trainer.data import Feature, FeatureSpec, criteo_spec, formats, open_click_data, write_criteo_tsv
from shardrec.trainer.data.arrays import plain_column
from shardrec.trainer.data.convert import convert
from tests.trainer.data.raw import LINES, SPEC, equal, lines, write


@pytest.mark.some(1)
@pytest.mark.parametrize("suffix", ["tsv", "tsv.gz"])
def test_text_as_parquet_has_the_same_rows_to_the_bit(
    tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(formats, "_BLOCK_BYTES", 5_000)
    write_criteo_tsv(tmp_path / f"a.{suffix}", 500, seed=1)
    rows = convert(str(tmp_path / f"a.{suffix}"), criteo_spec(), tmp_path / "a.parquet", group_rows=64)
    metadata = pq.read_metadata(tmp_path / "a.parquet")
    assert rows == metadata.num_rows == 500
    assert max(metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)) <= 64
    batches = [
        open_click_data(tmp_path / name, holdout=0.0, streams=1).train_batches(0, 1, 100)
        for name in (f"a.{suffix}", "a.parquet")
    ]
    assert all(equal(left, right) for left, right in zip(*batches, strict=True))


def test_lists_and_missing_values(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.svm", b"1 qid:1 3:1 4:0.5\n-1 qid:2\n1 qid:2 9:2\n")
    assert convert(str(path), LINES, tmp_path / "rows.parquet", group_rows=2) == 3
    batches = [
        list(open_click_data(name, LINES, holdout=0.0, streams=1).train_batches(0, 1, 9))
        for name in (path, tmp_path / "rows.parquet")
    ]
    assert equal(batches[0][0], batches[1][0])


def test_nothing_is_left_of_what_cannot_be_converted(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.tsv", lines(5) + b"x\n")
    with pytest.raises(DataError, match=r"rows\.tsv:6: the line has 1 of 5 columns"):
        convert(str(path), SPEC, tmp_path / "rows.parquet")
    assert [entry.name for entry in tmp_path.iterdir()] == ["rows.tsv"]


@pytest.mark.parametrize("kind", ["parquet", "csv"])
def test_columns_that_folders_give_are_written(tmp_path: Path, kind: str) -> None:
    folder, spec = tmp_path / "day=3", FeatureSpec(features=(Feature(name="day", kind="id", rows=9, ids="number"),))
    folder.mkdir()
    if kind == "csv":
        (folder / "a.csv").write_text("label\n1\n0\n")
    else:
        pq.write_table(pa.table({"label": [1, 0]}), folder / "a.parquet")
    assert convert(str(folder / f"a.{kind}"), spec, tmp_path / "b.parquet") == 2
    (batch,) = open_click_data(tmp_path / "b.parquet", spec, holdout=0.0).train_batches(0, 1, 9)
    assert (batch.sparse.values().tolist(), batch.labels.tolist()) == ([3, 3], [1, 0])


def test_columns_without_their_dictionaries() -> None:
    """And those that have none, such as a key of scores may be."""
    values = pa.array(["a", "b", "a", "b"]).dictionary_encode()
    lists = pa.ListArray.from_arrays(pa.array([0, 1, 4]), values)
    large = pa.LargeListArray.from_arrays(pa.array([0, 1, 4], pa.int64()), values)
    for column in (values, lists, large, pa.FixedSizeListArray.from_arrays(values, 2)):
        plain = plain_column(column)
        assert plain.to_pylist() == column.to_pylist()
        assert "dictionary" not in str(plain.type)
        assert type(plain.type) is type(column.type) or column is values
    for column in (pa.array([{"x": 1}]), pa.array([[("x", 1)]], pa.map_(pa.string(), pa.int64())), pa.array([[["x"]]])):
        assert plain_column(column) is column

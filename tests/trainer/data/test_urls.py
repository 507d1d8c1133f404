"""Data files by URL: fsspec's file system in memory, one that is not installed, and pyarrow's own."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import fs

from shardrec.errors import DataError
from shardrec.trainer.data import open_click_data
from shardrec.trainer.data.urls import files_of
from tests.trainer.data.raw import SPEC, first_integers, lines, write


@pytest.fixture
def memory() -> Iterator[Any]:
    system = fsspec.filesystem("memory")
    yield system
    system.rm("/shop", recursive=True)


def put(memory: Any, name: str, path: Path) -> None:
    memory.pipe_file(f"/shop/{name}", path.read_bytes())


def rows_of(source: str) -> list[int]:
    data = open_click_data(source, SPEC, holdout=0.0)
    return first_integers(list(data.train_batches(0, 1, 16)))


def test_text_parquet_and_archives_of_a_url_are_those_of_the_file(memory: Any, tmp_path: Path) -> None:
    for name in ("rows.tsv", "rows.tsv.gz", "rows.tsv.xz"):
        put(memory, name, write(tmp_path / name, lines(40)))
    numbers = np.arange(40)
    columns = {"label": numbers % 2, "int_1": numbers, "int_2": numbers, "cat_1": numbers, "cat_2": numbers}
    pq.write_table(pa.table(columns), tmp_path / "rows.parquet")
    np.savez(tmp_path / "rows.npz", **columns)
    for name in ("rows.parquet", "rows.npz"):
        put(memory, name, tmp_path / name)
    for name in ("rows.tsv", "rows.tsv.gz", "rows.tsv.xz", "rows.parquet", "rows.npz"):
        assert rows_of(f"memory://shop/{name}") == rows_of(str(tmp_path / name)) == list(range(40)), name


def test_patterns_and_folders_of_a_url(memory: Any, tmp_path: Path) -> None:
    for day in ("2", "1"):
        put(memory, f"week [a]/day_{day}.tsv", write(tmp_path / f"day_{day}.tsv", lines(int(day) * 3)))
    put(memory, "week [a]/_SUCCESS", write(tmp_path / "_SUCCESS", b""))
    put(memory, "notes/read.me", write(tmp_path / "read.me", b"x"))
    days = ["memory://shop/week [a]/day_1.tsv", "memory://shop/week [a]/day_2.tsv"]
    assert files_of("memory://shop/week*/day_*.tsv") == days
    assert files_of("memory://shop/week [a]") == files_of("memory://shop/week [a]/") == days
    assert files_of(days[0]) == days[:1]
    assert rows_of("memory://shop/week*/day_[12].tsv") == [0, 1, 2, 0, 1, 2, 3, 4, 5]
    with pytest.raises(DataError, match=r"no data file is (named|in) /shop/week\*/night"):
        files_of("memory://shop/week*/night_*.tsv")
    with pytest.raises(DataError, match=r"memory://shop/none\.tsv does not exist"):
        rows_of("memory://shop/none.tsv")


def test_pyarrows_own_file_systems(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which need no package; and keep user, host and options of the URL, that others have to know."""
    write(tmp_path / "b 1.tsv", lines(3))
    write(tmp_path / "b 2.tsv", lines(2))
    assert rows_of(f"file://{tmp_path}/b*.tsv") == [0, 1, 2, 0, 1]
    asked = []

    def from_uri(uri: str) -> tuple[fs.FileSystem, str]:
        asked.append(uri)
        return fs.SubTreeFileSystem(str(tmp_path.parent), fs.LocalFileSystem()), tmp_path.name

    monkeypatch.setattr(fs, "FileSystem", SimpleNamespace(from_uri=from_uri))
    url = f"s3://key:secret@{tmp_path.name}/b%s?region=eu-west-1"
    assert files_of(url % "*.tsv") == [url % " 1.tsv", url % " 2.tsv"]
    assert set(asked) == {f"s3://key:secret@{tmp_path.name}/?region=eu-west-1"}


def test_a_file_system_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "adlfs", None)
    with pytest.raises(DataError, match=r"az://box/rows\.tsv cannot be read here: Install adlfs"):
        files_of("az://box/rows.tsv")
    with pytest.raises(DataError, match=r"feed:box: only shardrec train --data takes a feed. Give its files, without"):
        files_of("feed:box")
    with pytest.raises(DataError, match=r"Protocol not known: nowhere\): give a path, or a URL of file, s3"):
        files_of("nowhere://box/rows.tsv")

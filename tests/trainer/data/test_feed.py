"""``Feed``: what of a folder arrives, and when."""

from __future__ import annotations

from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fsspec.implementations.arrow import ArrowFSWrapper
from hypothesis import given
from hypothesis import strategies as st

from shardrec.errors import DataError
from shardrec.files import UnreachableError
from shardrec.trainer.data import feed as feed_module
from shardrec.trainer.data import urls
from shardrec.trainer.data.feed import Feed, _beside, watermark
from shardrec.trainer.data.files import FileClickData
from shardrec.trainer.data.rows import NO_TIME
from tests.trainer.data.raw import SPEC, lines, write

SOURCES = ["{}", "{}/*", "file://{}", "file://{}/*"]


def feed(source: str | Path, **options: Any) -> Feed:
    return Feed(str(source), SPEC, lambda files, known: FileClickData(files, SPEC, holdout=0.0), **options)


def arrived(feed: Feed) -> list[str]:
    """The names of an arrival's files."""
    arrival = feed.poll()
    return [] if arrival is None else [Path(path).name for path in arrival.rows.paths]


@pytest.mark.parametrize("source", SOURCES)
def test_a_file_has_arrived_when_it_has_its_name(source: str, tmp_path: Path) -> None:
    for name in (".a.tsv", "_b.tsv"):
        write(tmp_path / name, b"half a li")
    folder = feed(source.format(tmp_path))
    assert arrived(folder) == []
    write(tmp_path / ".a.tsv", lines(2)).rename(tmp_path / "a.tsv")
    assert arrived(folder) == ["a.tsv"]


def fails(*_: object, **__: object) -> None:
    raise OSError("not now")


@pytest.mark.parametrize("source", SOURCES)
def test_what_cannot_be_reached_is_there_later(source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = feed(source.format(tmp_path / "in"), skips=True)
    (tmp_path / "in").mkdir()
    assert arrived(folder) == []
    with monkeypatch.context() as patched:  # a folder that may not be read
        for module, name in ((urls.os, "scandir"), (ArrowFSWrapper, "ls")):
            patched.setattr(module, name, fails)
        with pytest.raises(UnreachableError, match=r"data files .* cannot be listed \(not now\): check the name"):
            folder.poll()
    for name in ("a.tsv", "b.tsv"):
        write(tmp_path / "in" / name, lines(2))
    with monkeypatch.context() as patched:  # a file
        patched.setattr(pa, "OSFile", fails)
        if "://" not in source:
            with pytest.raises(UnreachableError, match=r"a.tsv cannot be opened \(not now\)"):
                folder.poll()
    (tmp_path / "in").rename(tmp_path / "away")
    if not source.endswith("*"):
        with pytest.raises(UnreachableError, match="is no folder and no pattern"):
            folder.poll()
    assert folder.position() == {"taken": [], "kinds": {}, "files": [], "left_out": 0}
    (tmp_path / "away").rename(tmp_path / "in")
    assert arrived(folder) == ["a.tsv", "b.tsv"]
    # A folder that is not there says nothing of its files.
    (tmp_path / "in").rename(tmp_path / "away")
    with suppress(UnreachableError):
        folder.poll()
    (tmp_path / "away").rename(tmp_path / "in")
    assert arrived(folder) == []


def test_what_another_rank_cannot_open_may_be_replaced(tmp_path: Path) -> None:
    """What was not read is looked for anew: by the next poll, and by a run that goes on from in between."""
    columns = {"label": [1], "int_1": [1], "int_2": [1], "cat_1": ["x"], "cat_2": ["x"]}
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    sees = False

    def gathered(value: Any) -> list[Any]:
        return [value, None if sees or value is not None else UnreachableError("is not seen here")]

    folder = feed(tmp_path, gathered=gathered)
    with pytest.raises(UnreachableError, match="rank 1: is not seen here"):
        folder.poll()
    assert folder.position() == {"taken": [], "kinds": {}, "files": [], "left_out": 0}
    (tmp_path / "a.parquet").unlink()
    pq.write_table(pa.table(columns | {"cat_2": [1]}), tmp_path / "b.parquet")
    sees = True
    assert arrived(folder) == ["b.parquet"]


@pytest.mark.parametrize("name", ["a.tsv", "a.parquet"])
def test_a_read_that_fails_is_made_again(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says nothing of the file, which is not left out."""
    (tmp_path / name).write_bytes(b"x" * 20)
    folder = feed(tmp_path, skips=True)

    class Unread(pa.OSFile):  # type: ignore[misc]
        read = fails

    with monkeypatch.context() as patched:
        patched.setattr(pa, "OSFile", Unread)
        with pytest.raises(UnreachableError, match=r"data file .* cannot be read \(not now\)"):
            folder.poll()
        with pytest.warns(UserWarning, match="a file was left out"):
            assert folder.poll(last=True) is None
    assert folder.left_out == 1


@pytest.mark.parametrize("source", SOURCES)
def test_a_list_that_lacks_files_forgets_those_that_were_removed_alone(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a folder, or a server, cannot be read for a moment: glob and fsspec then give no names."""

    for name in ("a.tsv", "b.tsv"):
        write(tmp_path / name, lines(3))
    folder = feed(source.format(tmp_path))
    assert arrived(folder) == ["a.tsv", "b.tsv"]
    (tmp_path / "a.tsv").unlink()
    with monkeypatch.context() as patched:
        patched.setattr(urls, "glob", lambda path: [])
        patched.setattr(ArrowFSWrapper, "ls", fails)
        with nullcontext() if "://" not in source else pytest.raises(UnreachableError, match=r"listed \(not now\)"):
            assert arrived(folder) == []
    assert arrived(folder) == []
    write(tmp_path / "a.tsv", lines(2))
    assert arrived(folder) == ["a.tsv"]


def test_a_file_that_is_left_out_says_nothing_of_others(tmp_path: Path) -> None:
    """The types of its columns are not what those of later files are compared with; it is looked at once."""
    kinds = {"a": (None, "x"), "b": ("x", 1), "c": (1, "x")}
    for name, (first, second) in kinds.items():
        columns = {"label": [1], "int_1": [1], "int_2": [1], "cat_1": [first], "cat_2": [second]}
        pq.write_table(pa.table(columns), tmp_path / f"{name}.parquet")
    folder = feed(tmp_path, skips=True)
    with pytest.warns(UserWarning, match=r"a file was left out: column 'cat_2' has texts in .*a.parquet and numbers"):
        assert arrived(folder) == ["a.parquet", "c.parquet"]
    other = feed(tmp_path, skips=True)
    other.seek(folder.position())
    assert (folder.left_out, arrived(other), other.left_out) == (1, [], 0)


@pytest.mark.parametrize("root", ["{}", "file://{}", "memory://{}"])
def test_files_of_a_manifest_arrive_in_the_order_of_its_whole_lines(root: str, tmp_path: Path) -> None:
    def add(name: str, data: bytes) -> None:
        with fsspec.open(f"{root.format(tmp_path)}/{name}", "ab") as file:
            file.write(data)

    source = f"{root.format(tmp_path)}/manifest.txt"
    with pytest.raises(DataError, match=r"manifest.txt"):
        feed(source).poll()
    for name in ("c.tsv", "_b.tsv", "a.tsv"):
        add(name, lines(2))
    add("manifest.txt", b"c.tsv\nbroken.tsv\n_b.t")
    add("broken.tsv", b"")
    folder = feed(source, skips=True)
    with pytest.warns(UserWarning, match="a file was left out: data file .*broken.tsv is empty"):
        assert arrived(folder) == ["c.tsv"]
    assert arrived(folder) == []
    other = feed(source, skips=True, most=1)
    other.seek(folder.position())
    add("manifest.txt", b"sv\n" + f"{root.format(tmp_path)}/a.tsv\n".encode())
    assert [arrived(other), arrived(other), arrived(other)] == [["_b.tsv"], ["a.tsv"], []]
    with fsspec.open(source, "wb") as file:
        file.write(b"c.tsv\n")
    with pytest.raises(
        UnreachableError, match=r"manifest.txt has no line that ends at byte \d+, up .*: only add lines"
    ):
        other.poll()


def test_lines_of_a_manifest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As other systems end them, empty ones, ones with spaces, more than are read at once, and what is no file."""
    monkeypatch.setattr(feed_module, "_MANIFEST_BYTES", 32)
    names = ["a.tsv", "b c.tsv", "d.tsv", "e.tsv"]
    for name in names:
        write(tmp_path / name, lines(2))
    manifest = tmp_path / "manifest.txt"
    manifest.write_bytes(b"\na.tsv\r\n\r\n\nb c.tsv\nd.tsv\r\nkafka://host/t\n\ne.tsv\n\n")
    folder = feed(manifest, most=1)
    assert [*arrived(folder), *arrived(folder), *arrived(folder)] == names[:3]
    with pytest.raises(DataError, match=r"data file kafka://host/t cannot be read .*: give a path"):
        folder.poll()
    other = feed(manifest, most=1, skips=True)
    other.seek(folder.position())
    with pytest.warns(UserWarning, match="kafka://host/t cannot be read"):
        assert [arrived(other), arrived(other), other.left_out] == [["e.tsv"], [], 1]
    manifest.write_bytes(b"other names, each of which is long\n" * 4)
    with pytest.raises(UnreachableError, match="has no line that ends at byte"):
        other.poll()
    assert _beside("/manifest.txt", "a.tsv") == "/a.tsv"
    assert _beside("s3://bucket/in/manifest.txt?region=x", "a.tsv") == "s3://bucket/in/a.tsv?region=x"


def test_an_object_store_is_a_feed() -> None:
    """Where folders are names, and a file appears whole."""
    with fsspec.open("memory://feed/a.tsv", "wb") as file:
        file.write(lines(3))
    folder = feed("memory://feed/*.tsv")
    arrival = folder.poll()
    assert arrival is not None
    assert (arrival.rows.paths, arrival.rows.train_rows) == (("memory://feed/a.tsv",), 3)
    with fsspec.open("memory://feed/b.tsv", "wb") as file:
        file.write(lines(2))
    fsspec.filesystem("memory").rm("/feed/a.tsv")
    other = feed("memory://feed/*.tsv")
    other.seek(folder.position())
    assert (arrived(other), arrived(other)) == (["b.tsv"], [])
    assert other.position()["taken"] == ["memory://feed/b.tsv"]


def test_an_empty_folder_may_be_one_that_is_not_mounted(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    write(tmp_path / "in" / "a.tsv", lines(2))
    folder = feed(tmp_path / "in")
    assert arrived(folder) == ["a.tsv"]
    (tmp_path / "in").rename(tmp_path / "away")
    (tmp_path / "in").mkdir()
    assert arrived(folder) == []
    (tmp_path / "in").rmdir()
    (tmp_path / "away").rename(tmp_path / "in")
    assert arrived(folder) == []


times = st.floats(0, 100) | st.just(NO_TIME)


@given(
    rows=st.lists(st.lists(times, min_size=2, max_size=2), max_size=8),
    clocks=st.lists(st.floats(0, 100), min_size=8, max_size=8),
    far=st.floats(100, 1e12),
)
def test_a_watermark_is_behind_each_rank_and_the_clock(
    rows: list[list[float]], clocks: list[float], far: float
) -> None:
    """It never falls, agreeing twice changes nothing, and a time in the future on one rank is that of the others."""
    mark, latest = NO_TIME, [NO_TIME, NO_TIME]
    for each, clock in zip(rows, clocks, strict=False):
        latest = list(map(max, latest, each))
        before, mark = mark, watermark(mark, latest, clock)
        with_rows = [time for time in latest if time != NO_TIME]
        assert mark >= before
        assert mark in (before, min([*with_rows, clock]))
        assert mark == before or mark <= min([*with_rows, clock])
        assert watermark(mark, latest, clock) == mark
        if len(with_rows) == 2:
            assert watermark(before, [far, latest[1]], clock) == max(before, min(latest[1], clock))
        assert watermark(before, [far, NO_TIME], clock) <= max(before, clock)

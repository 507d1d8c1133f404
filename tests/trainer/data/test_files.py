from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardrec.errors import ConfigError, DataError
from shardrec.trainer.data import FileClickData, formats, open_click_data, tables
from shardrec.trainer.data.convert import convert
from shardrec.trainer.data.tables import rows_between
from tests.trainer.data.raw import SPEC, damage, equal, first_integers, line, lines, write


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("files")


@settings(max_examples=20, deadline=None)
@given(
    rows=st.integers(1, 80),
    world_size=st.integers(1, 5),
    batch_size=st.integers(1, 20),
    holdout=st.sampled_from([0.0, 0.1, 0.5]),
    block=st.sampled_from([200, 500, 1 << 20]),
)
def test_ranks_take_disjoint_parts_of_everything_in_as_many_steps(
    folder: Path, rows: int, world_size: int, batch_size: int, holdout: float, block: int
) -> None:
    data = open_click_data(write(folder / "data.tsv", lines(rows)), spec=SPEC, holdout=holdout)
    seen: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(formats, "_BLOCK_BYTES", block)
        for batches in (data.train_batches, data.holdout_batches):
            ranks = [list(batches(rank, world_size, batch_size)) for rank in range(world_size)]
            part = first_integers([batch for step in zip(*ranks, strict=True) for batch in step])
            assert {len(each) for each in ranks} == {-(-len(part) // (world_size * batch_size))}
            assert all(batch.size == batch_size for each in ranks for batch in each[:-1])
            assert part == sorted(part)
            seen += part
    assert sorted(seen) == list(range(rows))


def test_a_row_stays_on_its_side_when_another_is_broken(folder: Path) -> None:
    whole = open_click_data(write(folder / "whole.tsv", lines(300)), spec=SPEC, holdout=0.3)
    broken = b"".join((b"x" if number == 20 else line(number)) + b"\n" for number in range(300))
    other = open_click_data(write(folder / "broken.tsv", broken), spec=SPEC, holdout=0.3, on_bad_row="skip")
    for name in ("train_batches", "holdout_batches"):
        before, after = (first_integers(list(getattr(data, name)(0, 1, 50))) for data in (whole, other))
        assert after == [number for number in before if number != 20]
        assert whole.skipped == {}
        assert other.skipped == ({"wrong number of columns": 1} if 20 in before else {})


def test_a_broken_row_is_told_with_file_line_field_value_and_remedy(folder: Path) -> None:
    path = write(folder / "day_0.tsv", lines(11) + b"7\t1\t\t\t\n")
    with pytest.raises(DataError) as caught:
        list(open_click_data(path, spec=SPEC, holdout=0.0).train_batches(0, 1, 4))
    assert str(caught.value) == (
        f"{path}:12: field 'label': value 7 is not 0 or 1; correct it, or leave such rows out (on_bad_row: skip, "
        "--on-bad-row skip)"
    )


def test_a_damaged_row_group_is_broken_rows_from_there(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On any number of ranks, from any batch on, and in what predict and convert read."""
    monkeypatch.setattr(tables, "_ROWS_AT_ONCE", 20)
    path = folder / "damaged.parquet"
    columns = {"label": [0, 1] * 150, "int_1": [*range(300)], "int_2": [1] * 300}
    table = pa.table({**columns, **{name: [f"{row:x}" for row in range(300)] for name in ("cat_1", "cat_2")}})
    pq.write_table(table, path, row_group_size=100, data_page_size=64, write_batch_size=10, use_dictionary=False)
    damage(path, 1, 3)
    data = open_click_data(path, spec=SPEC, holdout=0.0, on_bad_row="skip")
    whole = list(data.train_batches(0, 1, 24))
    left = sorted(first_integers(whole))
    first = left.index(200)  # the place of the first row that is there after the damaged ones
    assert 100 < first < 180
    assert first % 20 == 0
    assert left == [*range(first), *range(200, 300)]
    assert data.skipped == {"damaged part of a file": 200 - first}
    ranks = [list(data.train_batches(rank, 2, 12, first_batch=3)) for rank in range(2)]
    parts = [first_integers(batches) for batches in zip(*ranks, strict=True)]
    assert list(map(sorted, parts)) == [sorted(first_integers([batch])) for batch in whole[3:]]
    words = rf"{path}: row group 1, row {first + 1}: the file is damaged from here to the end of its row group \(.*\)"
    with pytest.raises(DataError, match=words + r"; copy the file again, as it was, or leave such rows out"):
        list(open_click_data(path, spec=SPEC, holdout=0.0).train_batches(0, 1, 24))
    block = next(rows_between(data.files[0], SPEC, [(90, 290)], skips=True))
    assert block.numbers.tolist() == [*range(90, first), *range(200, 290)]
    assert sorted(block.faults) == [*range(first, 200)]
    with pytest.raises(DataError, match="the file is damaged from here"):
        convert(str(path), SPEC, folder / "converted.parquet")
    grouped = SPEC.model_copy(update={"group": "cat_2"})
    with pytest.raises(DataError, match="the file is damaged from here"):
        list(open_click_data(path, spec=grouped, holdout=0.1, on_bad_row="skip").train_batches(0, 1, 24))


def test_a_read_that_fails_once_is_made_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, failed = folder / "once.parquet", []
    columns = {"label": [0, 1] * 50, "int_1": [*range(100)], "int_2": [1] * 100, "cat_1": ["a"] * 100}
    pq.write_table(pa.table({**columns, "cat_2": ["b"] * 100}), path)
    iter_batches = pq.ParquetFile.iter_batches

    def once(file: pq.ParquetFile, *args: Any, **how: Any) -> Iterator[pa.RecordBatch]:
        for number, batch in enumerate(iter_batches(file, *args, **how)):
            if number == 2 and not failed:
                failed.append(number)
                raise OSError("connection lost")
            yield batch

    monkeypatch.setattr(tables, "_ROWS_AT_ONCE", 30)
    monkeypatch.setattr(pq.ParquetFile, "iter_batches", once)
    batches = list(open_click_data(path, spec=SPEC, holdout=0.0).train_batches(0, 1, 16))
    assert (first_integers(batches), failed) == ([*range(100)], [2])


def test_rows_are_not_left_out_for_want_of_memory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = folder / "memory.parquet"
    columns = {"label": [0, 1], "int_1": [1, 2], "int_2": [1, 1], "cat_1": ["a"] * 2, "cat_2": ["b"] * 2}
    pq.write_table(pa.table(columns), path)

    def fails(*_: object, **__: object) -> None:
        raise pa.ArrowMemoryError("malloc of size 128 failed")

    monkeypatch.setattr(pq.ParquetFile, "iter_batches", fails)
    with pytest.raises(DataError, match="malloc of size 128 failed"):
        list(open_click_data(path, spec=SPEC, holdout=0.0, on_bad_row="skip").train_batches(0, 1, 16))


def test_several_files_are_one_stream(folder: Path) -> None:
    parts = [
        write(folder / "a.tsv.gz", lines(30)),
        write(folder / "b.tsv", b"".join(line(number) + b"\n" for number in range(30, 70))),
    ]
    several = open_click_data(parts, spec=SPEC, holdout=0.2)
    single = open_click_data(write(folder / "all.tsv", lines(70)), spec=SPEC, holdout=0.2)
    for name in ("train_batches", "holdout_batches"):
        pairs = zip(getattr(several, name)(0, 1, 8), getattr(single, name)(0, 1, 8), strict=True)
        assert all(equal(left, right) for left, right in pairs)


def test_going_on_in_the_middle_and_dropping_the_last(folder: Path) -> None:
    data = open_click_data(write(folder / "data.tsv", lines(50)), spec=SPEC, holdout=0.0)
    assert first_integers(list(data.train_batches(1, 2, 8, first_batch=2))) == [40, 41, 42, 43, 44, 45, 46, 47, 49]
    assert [batch.size for batch in data.train_batches(1, 2, 8, drop_last=True)] == [8, 8, 8]
    assert first_integers(list(data.train_batches(0, 1, 50))) == list(range(50))  # each call starts anew


def test_the_rank_whose_row_is_broken_fails_before_its_batch(folder: Path) -> None:
    text = b"".join((b"x" if number == 45 else line(number)) + b"\n" for number in range(60))
    data = open_click_data(write(folder / "data.tsv", text), spec=SPEC, holdout=0.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(formats, "_BLOCK_BYTES", 200)
        for rank in range(3):
            batches = data.train_batches(rank, 3, 4)
            assert first_integers([next(batches) for _ in range(3)])[-1] == 27 + 4 * rank
            if rank != 2:
                assert first_integers(list(batches))[-1] == 51 + 4 * rank
                continue
            with pytest.raises(DataError, match=r"data\.tsv:46: the line has 1 of 5 columns: 'x'; separate"):
                next(batches)


def test_nothing_readable_is_an_error_even_when_skipping(folder: Path) -> None:
    path = write(folder / "data.tsv", b"x\ny\n2\t\t\t\t\n")
    data = open_click_data(path, spec=SPEC, holdout=0.0, on_bad_row="skip")
    message = r"no row could be read \(2 wrong number of columns, 1 bad label\): check that the files have"
    with pytest.raises(DataError, match=message):
        list(data.train_batches(0, 1, 4))


def test_files_by_pattern_folder_and_url(folder: Path) -> None:
    parts = folder / "parts"
    parts.mkdir()
    for day in range(3):
        write(parts / f"day_{day}.tsv", b"".join(line(number) + b"\n" for number in range(10 * day, 10 * day + 10)))
    for names in (f"{parts}/day_*.tsv", parts, [f"file://{parts}/day_{day}.tsv" for day in range(3)]):
        data = open_click_data(names, spec=SPEC, holdout=0.0)
        assert first_integers(list(data.train_batches(0, 1, 30))) == list(range(30))
    with pytest.raises(DataError, match=r"no data file is named .*night_\*\.tsv: check the path"):
        open_click_data(f"{parts}/night_*.tsv", spec=SPEC)


@settings(max_examples=15, deadline=None)
@given(rows=st.integers(1, 60), window=st.integers(1, 70), batch=st.integers(1, 9), skip=st.integers(0, 5))
def test_shuffled_rows_are_all_there_and_in_an_order_that_can_be_found_again(
    folder: Path, rows: int, window: int, batch: int, skip: int
) -> None:
    data = open_click_data(write(folder / "s.tsv", lines(rows)), spec=SPEC, holdout=0.0, shuffle=window, seed=3)
    whole = first_integers(list(data.train_batches(0, 1, batch, epoch=1)))
    assert sorted(whole) == list(range(rows))
    for first in range(0, rows, window):
        assert sorted(whole[first : first + window]) == list(range(first, min(first + window, rows)))
    halves = [list(data.train_batches(rank, 2, batch, epoch=1)) for rank in range(2)]
    assert first_integers([one for step in zip(*halves, strict=True) for one in step]) == whole
    assert first_integers(list(data.train_batches(0, 1, batch, first_batch=skip, epoch=1))) == whole[skip * batch :]
    if rows > 20 and window > 20:
        assert whole != list(range(rows))
        assert whole != first_integers(list(data.train_batches(0, 1, batch, epoch=2)))


def test_describe(folder: Path) -> None:
    path = write(folder / "data.tsv.xz", lines(5))
    text = open_click_data(path, spec=SPEC, holdout=0.25, on_bad_row="skip").describe()
    assert str(path) in text
    assert "1,011 embedding rows" in text
    assert "25.0% of the rows held out; a broken row is left out and counted" in text


def test_options_are_checked_when_opening(folder: Path) -> None:
    path = write(folder / "data.tsv", lines(5))
    with pytest.raises(ConfigError, match=r"holdout is 1: give a share from 0 to 1"):
        open_click_data(path, spec=SPEC, holdout=1)
    with pytest.raises(ConfigError, match="on_bad_row is 'ignore': give 'raise' or 'skip'"):
        open_click_data(path, spec=SPEC, on_bad_row="ignore")
    with pytest.raises(ConfigError, match="paths is empty"):
        FileClickData([], SPEC)
    with pytest.raises(DataError, match="does not exist"):
        open_click_data([path, folder / "nothing.tsv"], spec=SPEC)

"""The canonical order of rows: the same for every number of ranks, from every step, over files of all sizes."""

from __future__ import annotations

import gzip
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardrec.errors import ConfigError, DataError
from shardrec.trainer.data import ClickBatch, Feature, FeatureSpec, FileClickData, formats, order, tables
from shardrec.trainer.data.order import (
    BatchRequest,
    Chunk,
    batch_bounds,
    deal,
    held_out,
    rows_before,
    slices,
    stream_share,
)

NUMBER = Feature(name="number", kind="id", rows=100_000, ids="number")
SPEC = FeatureSpec(features=(NUMBER,))
GROUPED = FeatureSpec(features=(NUMBER,), group="session")

lengths_of = st.lists(st.integers(0, 40) | st.sampled_from([0, 1, 90]), min_size=1, max_size=9)


def by_keys(lengths: Sequence[int]) -> list[int]:
    """The stream of each row in the canonical order, from its definition."""
    keys = [((2 * row + 1) / (2 * rows), stream) for stream, rows in enumerate(lengths) for row in range(rows)]
    return [stream for _, stream in sorted(keys)]


@given(lengths=lengths_of, data=st.data())
def test_rows_before_follow_the_keys(lengths: list[int], data: st.DataObject) -> None:
    streams = by_keys(lengths)
    counts = data.draw(st.lists(st.integers(0, len(streams)), min_size=1, max_size=4))
    expected = [
        np.bincount(np.array(streams[:count], dtype=np.int64), minlength=len(lengths)).tolist() for count in counts
    ]
    assert rows_before(np.array(lengths), np.array(counts)).tolist() == expected


@given(lengths=lengths_of, world_size=st.integers(1, 7), batch=st.integers(1, 70))
def test_slices_cover_each_row_once_and_follow_each_other(lengths: list[int], world_size: int, batch: int) -> None:
    rows, total = np.array(lengths), sum(lengths)
    nexts = [0] * len(lengths)
    for number, before, after in batch_bounds(rows, batch, 0):
        count = min(batch, total - number * batch)
        streams = []
        for rank in range(world_size):
            share = count * rank // world_size, count * (rank + 1) // world_size
            own = list(slices(before, after, share))
            assert sum(part.stop - part.start for part in own) == share[1] - share[0]
            for part in own:
                assert part.start == nexts[part.stream]
                nexts[part.stream] = part.stop
                streams.append(part.stream)
        assert streams == sorted(streams)
    assert nexts == lengths


@given(rows=st.lists(st.integers(1, 50), max_size=40), streams=st.integers(1, 9), seed=st.none() | st.integers(0, 9))
def test_pieces_are_dealt_once_and_evenly(rows: list[int], streams: int, seed: int | None) -> None:
    chunks = [Chunk(file=0, group=group, row=0, rows=size, kept=size) for group, size in enumerate(rows)]
    dealt = deal(chunks, streams, None if seed is None else np.random.default_rng(seed))
    assert sorted(chunk.group for stream in dealt for chunk in stream) == list(range(len(rows)))
    sums = [sum(chunk.kept for chunk in stream) for stream in dealt]
    assert max(sums) - min(sums) <= max(rows, default=0)
    if seed is None:
        assert all([chunk.group for chunk in stream] == sorted(chunk.group for chunk in stream) for stream in dealt)


@pytest.mark.parametrize(
    ("streams", "world_size", "share"), [(64, 4, 1 / 4), (1, 4, 1.0), (3, 2, 2 / 3), (64, 3, 22 / 64)]
)
def test_a_rank_decodes_its_share_and_what_straddles(streams: int, world_size: int, share: float) -> None:
    assert stream_share(np.full(streams, 1000), world_size) == pytest.approx(share)


def write(path: Path, groups: Sequence[int], first: int, broken: Sequence[int] = ()) -> Path:
    """Rows that count on from ``first``, in row groups or, of text, one after the other; some have a bad label."""
    numbers = list(range(first, first + sum(groups)))
    labels = [7 if number in broken else number % 2 for number in numbers]
    sessions = [number // 3 for number in numbers]
    table = pa.table({"label": labels, "number": pa.array(numbers, pa.int64()), "session": sessions})
    if path.suffix == ".parquet":
        with pq.ParquetWriter(path, table.schema) as writer:
            start = 0
            for rows in groups:
                writer.write_table(table.slice(start, rows), row_group_size=max(1, rows))
                start += rows
        return path
    lines = ["label,number,session", *(",".join(map(str, row)) for row in zip(labels, numbers, sessions, strict=True))]
    text = "".join(f"{line}\n" for line in lines).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return path


def numbers(batch: ClickBatch) -> list[int]:
    return batch.sparse.values().tolist()


def steps_of(data: FileClickData, world_size: int, rows: int, **options: int) -> list[list[int]]:
    """Row numbers of each step, rank after rank."""
    ranks = [list(data.train_batches(rank, world_size, 1, global_rows=rows, **options)) for rank in range(world_size)]
    return [[number for batch in step for number in numbers(batch)] for step in zip(*ranks, strict=True)]


files_of = st.lists(
    st.tuples(st.sampled_from([".parquet", ".parquet", ".csv", ".csv.gz"]), st.lists(st.integers(0, 25), max_size=5)),
    min_size=1,
    max_size=5,
)


@settings(max_examples=3, deadline=None)
@given(
    files=files_of,
    streams=st.integers(1, 9),
    rows=st.integers(1, 40),
    holdout=st.sampled_from([0.0, 0.3]),
    shuffle=st.sampled_from([0, 0, 5, 60]),
    grouped=st.booleans(),
    block=st.sampled_from([1, 7, 1000]),
    data=st.data(),
)
def test_each_step_has_the_same_rows_on_every_number_of_ranks_and_after_a_resume(
    tmp_path_factory: pytest.TempPathFactory,
    files: list[tuple[str, list[int]]],
    streams: int,
    rows: int,
    holdout: float,
    shuffle: int,
    grouped: bool,
    block: int,
    data: st.DataObject,
) -> None:
    folder, first, paths = tmp_path_factory.mktemp("order"), 0, []
    for number, (suffix, groups) in enumerate(files):
        paths.append(write(folder / f"{number}{suffix}", groups, first))
        first += sum(groups)
    if not first:
        return
    options = {"holdout": holdout, "shuffle": shuffle, "keep_groups": grouped, "seed": 3, "streams": streams}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(formats, "_BLOCK_BYTES", 100 + 20 * block)
        patch.setattr(tables, "_ROWS_AT_ONCE", block)
        patch.setattr(order, "_MIN_ROWS", 1)
        patch.setattr(order, "_MIN_GROUPED", 1)
        source = FileClickData(paths, GROUPED if grouped else SPEC, **options)
        steps = steps_of(source, 1, rows, epoch=1)
        for world_size in (2, 4):
            assert steps_of(source, world_size, rows, epoch=1) == steps
        begun = data.draw(st.integers(0, len(steps)))
        other = FileClickData(paths, GROUPED if grouped else SPEC, **options)
        assert steps_of(other, data.draw(st.integers(1, 5)), rows, epoch=1, first_batch=begun) == steps[begun:]
        held = [
            number for rank in range(3) for batch in source.holdout_batches(rank, 3, 7) for number in numbers(batch)
        ]
    trained = [number for step in steps for number in step]
    assert [len(step) for step in steps[:-1]] == [rows] * (len(steps) - 1)
    assert sorted(trained + held) == list(range(first))
    assert len(trained) == source.train_rows
    assert bool(held) <= bool(holdout)
    if grouped:
        assert not {number // 3 for number in held} & {number // 3 for number in trained}


def many_groups(folder: Path) -> list[Path]:
    return [write(folder / f"{day}.parquet", [200] * 32, 6400 * day) for day in range(2)]


def test_a_rank_decodes_its_share_of_the_bytes(tmp_path: Path) -> None:
    """64 streams of a row group each, and batches that have as many rows of each."""
    data = FileClickData(many_groups(tmp_path), SPEC, holdout=0.0)
    total = 0
    for world_size in (1, 2, 4):
        for rank in range(world_size):
            read = sum(batch.size for batch in data.train_batches(rank, world_size, 6400 // world_size))
            assert read == 12_800 // world_size
            total = total or data.decoded_bytes
            assert data.decoded_bytes * world_size == total >= 12_800 * 16
        assert data.uneven(world_size, 6400) == ""


def test_a_batch_has_rows_from_all_over_the_files_and_a_shuffle_from_other_places_each_epoch(tmp_path: Path) -> None:
    paths = many_groups(tmp_path)
    ordered = FileClickData(paths, SPEC, holdout=0.0)
    first = numbers(next(ordered.train_batches(0, 1, 2048)))
    assert first == [200 * group + row for group in range(64) for row in range(32)]
    exact = FileClickData(paths, SPEC, holdout=0.0, streams=1)
    assert numbers(next(exact.train_batches(0, 1, 2048))) == list(range(2048))
    shuffled = FileClickData(paths, SPEC, holdout=0.0, shuffle=6400)
    epochs = [numbers(next(shuffled.train_batches(0, 1, 2048, epoch=epoch))) for epoch in (0, 1, 0)]
    assert epochs[0] == epochs[2] != epochs[1]
    assert {number // 200 for number in epochs[0]} == set(range(64))


def test_one_file_that_cannot_be_divided_is_told_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = FileClickData([write(tmp_path / "huge.csv.gz", [900], 0), write(tmp_path / "b.csv", [100], 900)], SPEC)
    assert data.uneven(2, 2048) == "", "these files are quick to decode"
    monkeypatch.setattr("shardrec.trainer.data.files._QUICK_ROWS", 0)
    message = data.uneven(2, 2048)
    assert "each of the 2 ranks decodes up to 100% of the rows, because " in message
    assert "a row group of " in message
    assert "huge.csv.gz has 90% of the rows" in message
    assert "shardrec convert" in message
    assert data.uneven(1, 2048) == ""


@pytest.mark.parametrize("world_size", [1, 3])
def test_broken_rows_are_missing_from_their_batch_alone_and_counted_once(tmp_path: Path, world_size: int) -> None:
    paths = [write(tmp_path / f"{n}.parquet", [50, 50], 100 * n, broken=(7, 60, 150)) for n in range(2)]
    whole = FileClickData([write(tmp_path / f"g{n}.parquet", [50, 50], 100 * n) for n in range(2)], SPEC, holdout=0.0)
    data = FileClickData(paths, SPEC, holdout=0.0, on_bad_row="skip")
    left_out = [number for step in steps_of(whole, 1, 128) for number in step if number in (7, 60, 150)]
    assert len(left_out) == 3
    counts = 0
    ranks = []
    for rank in range(world_size):
        ranks.append([numbers(batch) for batch in data.train_batches(rank, world_size, 1, global_rows=128)])
        counts += data.skipped.get("bad label", 0)
    steps = [[number for part in step for number in part] for step in zip(*ranks, strict=True)]
    assert steps == [[n for n in step if n not in left_out] for step in steps_of(whole, 1, 128)]
    assert counts == 3
    with pytest.raises(DataError, match=r"0\.parquet: row group 1, row 61: field 'label': value 7 is not 0 or 1"):
        list(FileClickData([write(paths[0], [50, 50], 0, broken=[60])], SPEC, holdout=0.0).train_batches(0, 1, 128))


@pytest.mark.parametrize("name", ["a.parquet", "a.csv"])
@pytest.mark.parametrize("change", ["shrinks", "grows", "vanishes", "other rows"])
def test_a_file_that_changes_while_it_is_read(tmp_path: Path, name: str, change: str) -> None:
    paths = [write(tmp_path / name, [300, 300], 0), write(tmp_path / "b.parquet", [10], 600)]
    data = FileClickData(paths, SPEC, holdout=0.0)
    data.count()
    match change:
        case "shrinks":
            paths[0].write_bytes(paths[0].read_bytes()[:-40])
        case "grows":
            write(paths[0], [300, 400], 0)
        case "vanishes":
            paths[0].unlink()
        case _:
            write(paths[0], [300, 299], 5)
    if name == "a.csv":  # whose rows are those of its copy
        assert sorted(number for step in steps_of(data, 1, 64) for number in step) == list(range(610))
        return
    with pytest.raises(DataError, match=rf"{name} (has changed since it was opened|does not exist: check the path)"):
        list(data.train_batches(0, 1, 64))


def test_a_column_that_changes_its_type_between_files(tmp_path: Path) -> None:
    paths = [tmp_path / "a.parquet", tmp_path / "b.parquet", tmp_path / "c.parquet"]
    for path, values in zip(paths, (pa.nulls(2), [3, 4], ["3", "4"]), strict=True):
        pq.write_table(pa.table({"label": [0, 1], "number": values}), path)
    assert FileClickData(paths[:2], SPEC, holdout=0.0).train_rows == 4
    with pytest.raises(
        DataError, match=r"column 'number' has numbers in .*b\.parquet and texts in .*c\.parquet: write"
    ):
        FileClickData(paths, SPEC)


@given(count=st.integers(0, 1000), world_size=st.integers(1, 50))
def test_shares_follow_each_other_and_differ_by_one_row_at_most(count: int, world_size: int) -> None:
    shares = [BatchRequest(rank=rank, world_size=world_size, batch_size=1).share(count) for rank in range(world_size)]
    assert shares[0][0] == 0
    assert shares[-1][1] == count
    assert all(left[1] == right[0] for left, right in pairwise(shares))
    sizes = {stop - start for start, stop in shares}
    assert max(sizes) - min(sizes) <= 1


@given(world_size=st.integers(1, 20), batch_size=st.integers(1, 100))
def test_a_full_global_batch_gives_every_rank_its_batch_size(world_size: int, batch_size: int) -> None:
    for rank in range(world_size):
        request = BatchRequest(rank=rank, world_size=world_size, batch_size=batch_size)
        assert request.share(request.global_size) == (rank * batch_size, (rank + 1) * batch_size)


@pytest.mark.parametrize("fraction", [0.0, 0.01, 0.1, 0.5])
def test_held_out_share(fraction: float) -> None:
    held = held_out(np.arange(200_000), fraction)
    spread = np.sqrt(200_000 * fraction * (1 - fraction))
    assert abs(held.sum() - 200_000 * fraction) <= 5 * spread
    # spread over the file: no thousand rows without, or full of, held-out rows
    if fraction == 0.1:
        per_thousand = held.reshape(200, 1000).sum(axis=1)
        assert 50 < per_thousand.min() <= per_thousand.max() < 160


def test_a_larger_share_holds_out_the_same_rows_and_more() -> None:
    rows = np.arange(10_000)
    assert (held_out(rows, 0.2) >= held_out(rows, 0.1)).all()


def test_all_faults_of_a_request_are_told_together() -> None:
    with pytest.raises(ConfigError) as caught:
        BatchRequest(rank=-1, world_size=2, batch_size=0, first_batch=-5)
    text = str(caught.value)
    assert "rank is -1 of world_size 2: give 0 to 1" in text
    assert "batch_size is 0" in text
    assert "first_batch is -5" in text

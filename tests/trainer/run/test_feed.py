"""Runs on files that arrive: each row is trained on once, whatever breaks off."""

from __future__ import annotations

import gzip
import os
import random
import shutil
import signal
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from shardrec.errors import ConfigError, DataError
from shardrec.files import UnreachableError
from shardrec.launch.ranks import RankInfo
from shardrec.trainer.data import ClickMetrics, formats, tables
from shardrec.trainer.run import RunStopped, TrainConfig
from shardrec.trainer.run.held_out import Progressive
from shardrec.trainer.run.runs import RunFolder
from shardrec.trainer.run.source import Source
from tests.campaign.results import differences
from tests.ranks import raises_on_all, ranks
from tests.trainer.data.raw import damage
from tests.trainer.run.fed import SPEC, digests, feed, numbers, trained


def deliver(folder: Path, name: str, numbers: Sequence[int], *, broken: Sequence[int] = ()) -> None:
    """A file with rows of these numbers, under its name once it is whole."""
    lines = [f"{number % 3 == 0:d},{number},{number % 40}" for number in numbers]
    lines = ["what" if number in broken else line for number, line in zip(numbers, lines, strict=True)]
    beside = folder / f".{name}"
    beside.write_text("click,number,site\n" + "\n".join(lines) + "\n", encoding="utf-8")
    beside.rename(folder / name)


def delivered(folder: Path) -> list[int]:
    """Seven files of 100 rows, three arrivals of 10, 10 and 4 steps."""
    for file in range(7):
        deliver(folder / "in", f"{file}.csv", range(100 * file, 100 * file + 100))
    return list(range(700))


@pytest.mark.parametrize("kills", [2, pytest.param(100, marks=pytest.mark.slow)])
def test_a_kill_loses_and_repeats_no_row(kills: int, tmp_path: Path) -> None:
    """Struck between checkpoints, at them, at the ends of arrivals, before the first: the state is the same, too."""
    draws = random.Random(kills)
    whole = feed(tmp_path)
    all_rows = delivered(tmp_path)
    undisturbed = trained(whole)
    assert (numbers(undisturbed), len(undisturbed)) == (all_rows, 24)
    struck, run = 0, 0
    while struck < kills:
        run += 1
        config = whole.changed(out=str(tmp_path / f"run-{run}"))
        rows: dict[int, list[int]] = {}
        last = 0
        while last <= 24 and (struck < kills or last):
            cut = draws.randint(last // 4 * 4 + 1, 26) if struck < kills else 26
            rows |= trained(config, resume=last > 0, cut_after=cut)
            last, struck = cut, struck + (cut <= 24)
        assert digests(rows, 4) == digests(undisturbed, 4)
        assert differences(tmp_path / f"run-{run}", tmp_path / "run") == []


def test_a_run_waits_for_files_saves_when_told_to_end_and_goes_on_without_those_that_are_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from shardrec.trainer.run import session
    from shardrec.trainer.run.saving import Saver

    config = feed(tmp_path, feed_idle=None, checkpoint_every="1000")
    deliver(tmp_path / "in", "b.csv", range(100))
    (tmp_path / "in" / ".c.csv").write_text("click,number", encoding="utf-8")  # not whole yet
    idle: list[int] = []
    original = Saver.after_step

    def after_step(saver: Saver, *, idle_: bool = False, **how: Any) -> None:
        idle.append(saver._progress.steps) if how.get("idle") else None
        if len(idle) == 3:
            deliver(tmp_path / "in", "a.csv", range(100, 150))  # its name is before that of the first
        if len(idle) == 6:
            os.kill(os.getpid(), signal.SIGTERM)
        original(saver, **how)

    monkeypatch.setattr(Saver, "after_step", after_step)
    monkeypatch.setattr(session, "_POLL_S", 0.001)
    with pytest.raises(RunStopped) as stopped:
        trained(config)
    assert (stopped.value.step, idle) == (6, [4, 4, 4, 6, 6, 6])
    monkeypatch.setattr(Saver, "after_step", original)
    for name in ("a.csv", "b.csv"):
        (tmp_path / "in" / name).unlink()
    deliver(tmp_path / "in", "d.csv", range(150, 200))
    (tmp_path / "run" / "plan.json").unlink()  # so that it plans, with rows that it then reads again
    assert trained(config.changed(feed_idle=0), resume=True) == {7: list(range(150, 182)), 8: list(range(182, 200))}


def test_what_cannot_be_reached_for_a_moment_is_tried_again(tmp_path: Path) -> None:
    """The list on the first rank, then a file on the other: no row is lost or repeated, also over a restart."""
    config = feed(tmp_path).changed(batch_size=16, checkpoint_every="3")
    all_rows = delivered(tmp_path)

    def flaky(cut_after: int | None, resume: bool) -> tuple[dict[int, list[int]], list[str]]:
        from shardrec.trainer.data import feed as feeds
        from shardrec.trainer.data import files

        failed: list[str] = []

        def failing(function: Any, *, rank: int) -> Any:
            def call(*args: Any, **kwargs: Any) -> Any:
                if os.environ["RANK"] == str(rank) and function.__name__ not in failed:
                    failed.append(function.__name__)
                    raise UnreachableError(f"{function.__name__} does not answer")
                return function(*args, **kwargs)

            return call

        with (
            mock.patch.object(feeds, "files_of", failing(feeds.files_of, rank=0)),
            mock.patch.object(files, "check_part", failing(files.check_part, rank=1)),
            mock.patch("time.sleep", lambda seconds: None),
            warnings.catch_warnings(record=True) as warned,
        ):
            warnings.simplefilter("always")
            rows = trained(config, cut_after=cut_after, resume=resume)
        return rows, [str(warning.message) for warning in warned if "does not answer" in str(warning.message)]

    (first, said), (second, silent) = ranks(2, flaky, 11, False)
    assert (said, silent) == (
        [
            "files_of does not answer. It is tried again in 0.5 s",
            "rank 1: check_part does not answer. It is tried again in 1 s",
        ],
        [],
    )
    rows = {step: [*first[step], *second[step]] for step in range(1, 10)}  # the last checkpoint is that of step 9
    (first, said), (second, _) = ranks(2, flaky, None, True)
    assert len(said) == 2
    rows |= {step: [*first[step], *second[step]] for step in first}
    assert numbers(rows) == all_rows


def test_a_feed_that_cannot_be_reached_ends_the_run_after_a_while(tmp_path: Path) -> None:
    config = feed(tmp_path, timeout=100.0)
    source = Source(config, RankInfo(rank=0, world_size=1, device=torch.device("cpu"), threads=1, timeout=100.0))
    assert not source.poll()
    (tmp_path / "in").rmdir()
    waits: list[float] = []
    with (
        pytest.warns(UserWarning, match="is no folder and no pattern.* It is tried again in") as warned,
        pytest.raises(DataError, match=r"feed:.*in, which is no folder .*\(it was tried again for 121.5 s, --timeout"),
    ):
        source.poll(waits.append)
    assert [float(str(warning.message).split()[-2]) for warning in warned] == [0.5, 1, 2, 4, 8, 16, 30, 30, 30]


def test_rows_that_one_rank_cannot_count_end_all_ranks(tmp_path: Path) -> None:
    """Also where there are fewer files than ranks."""
    config = feed(tmp_path)
    deliver(tmp_path / "in", "a.csv", range(20))

    def polled() -> None:
        rank = RankInfo(rank=int(os.environ["RANK"]), world_size=2, device=torch.device("cpu"), threads=1)
        fails = mock.patch("shardrec.trainer.data.files.counted", side_effect=DataError("no lines"))
        with fails if rank.is_lead else nullcontext():
            Source(config, rank).poll()

    raises_on_all(2, DataError, "no lines", polled, timeout=60)


def test_a_run_goes_on_with_another_number_of_ranks(tmp_path: Path) -> None:
    config = feed(tmp_path)
    all_rows = delivered(tmp_path)
    shares = ranks(2, trained, config.changed(batch_size=16), cut_after=13)
    rows = {step: [*shares[0][step], *shares[1][step]] for step in range(1, 13)}
    rows |= trained(config.changed(global_batch_size=32, batch_size=16), resume=True)
    assert numbers(rows) == all_rows
    # There is no score of theirs, and nothing to add to the results.
    before = (tmp_path / "run" / "metrics.json").read_bytes()
    assert ranks(2, trained, config.changed(global_batch_size=32, batch_size=16), resume=True) == [{}, {}]
    assert (tmp_path / "run" / "metrics.json").read_bytes() == before


def test_rows_are_scored_before_they_are_trained_on(tmp_path: Path) -> None:
    """The metrics are those of the model that starts, where no step changes it; of the last rows, over restarts."""
    config = feed(tmp_path, lr=1e-12, embedding_lr=1e-12, checkpoint_every="3")
    delivered(tmp_path)
    trained(config, cut_after=11)
    trained(config, resume=True)
    run = RunFolder(tmp_path / "run")
    curve = run.metrics["curve"]
    assert [(point["samples"], point["rows"]) for point in curve] == [(192, 192), (364, 200), (556, 200), (700, 200)]
    deliver(tmp_path, "last.csv", range(500, 700))
    held_out, _ = run.evaluate(str(tmp_path / "last.csv"))
    assert isinstance(held_out, ClickMetrics)
    assert run.metrics["final"]["logloss"] == pytest.approx(held_out.logloss, rel=1e-4)
    with pytest.raises(ConfigError, match="was trained on a feed, which lacks held-out rows"):
        run.evaluate()
    with pytest.raises(ConfigError, match=r"is 'feed:x', and only shardrec train takes a feed: leave 'feed:' out"):
        run.evaluate("feed:x")


def test_broken_rows_and_files_are_counted_or_end_the_run(tmp_path: Path) -> None:
    config = feed(tmp_path, on_bad_row="skip", streams=2)
    deliver(tmp_path / "in", "a.csv", range(50), broken=[7])
    (tmp_path / "in" / "d.csv").write_text("click,site\n1,2\n", encoding="utf-8")  # nothing arrives with it
    deliver(tmp_path / "in", "c.csv", [50], broken=[50])
    with pytest.warns(UserWarning, match=r"a file was left out: data file .*d.csv"):
        rows = trained(config)
    assert numbers(rows) == [number for number in range(50) if number != 7]
    skipped = RunFolder(tmp_path / "run").metrics["skipped_rows"]
    assert skipped == {"file that cannot be read": 1, "wrong number of columns": 2}
    (tmp_path / "in" / "a.csv").unlink()
    with pytest.raises(DataError, match=r"column 'number' is missing"):
        trained(config.changed(on_bad_row="error", out=str(tmp_path / "error")))


def test_a_file_that_breaks_in_the_middle_of_an_arrival(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some of its rows were trained on: what the errors say to do lets the run go on with all others, each once."""
    monkeypatch.setattr(tables, "_ROWS_AT_ONCE", 10)
    config = feed(tmp_path)
    path = tmp_path / "in" / "a.parquet"
    draws = random.Random(0)
    table = pa.table({"click": [0, 1] * 150, "number": range(300), "site": [str(draws.random()) for _ in range(300)]})
    pq.write_table(table, path, row_group_size=100, use_dictionary=False, data_page_size=200, write_batch_size=10)
    deliver(tmp_path / "in", "b.csv", range(300, 350))
    whole = path.read_bytes()
    trained(config, cut_after=8)
    damage(path, 2, 2)
    with pytest.raises(DataError, match=r"a.parquet: row group 2, row \d+: the file is damaged .*--on-bad-row skip"):
        trained(config, resume=True)
    shutil.copytree(tmp_path / "run", tmp_path / "restored")
    rows = trained(config.changed(on_bad_row="skip"), resume=True)
    skipped = RunFolder(tmp_path / "run").metrics["skipped_rows"]["damaged part of a file"]
    path.write_bytes(whole)
    restored = trained(config.changed(out=str(tmp_path / "restored")), resume=True)
    left_out = set(numbers(restored)) - set(numbers(rows))
    assert sorted(rows) == sorted(restored)
    assert (len(left_out), left_out < set(range(200, 300))) == (skipped, True)
    assert 0 < skipped < 100
    # One that is gone.
    gone = config.changed(out=str(tmp_path / "gone"))
    trained(gone, cut_after=8)
    path.unlink()
    with pytest.raises(
        DataError, match=r"a.parquet does not exist.* put the file back as it was, or .*\(--init-from\)"
    ):
        trained(gone, resume=True)
    new = config.changed(out=str(tmp_path / "new"), init_from=str(tmp_path / "gone"))
    assert numbers(trained(new)) == [*range(300, 350)]


@pytest.mark.some(1)
@pytest.mark.parametrize("how", ["gone", "replaced", "not mounted"])
def test_rows_of_a_lost_file_are_left_out_of_an_arrival(how: str, tmp_path: Path) -> None:
    """In the middle of it: all others are trained on, each once, in the steps that they would have been in."""
    config = feed(tmp_path, checkpoint_every="1", on_bad_row="skip")
    for name, first in (("a.csv", 0), ("b.csv", 200)):
        deliver(tmp_path / "in", name, range(first, first + 200))
    whole = trained(config.changed(out=str(tmp_path / "whole")))
    before = trained(config.changed(on_bad_row="error"), cut_after=5)
    if how == "not mounted":
        (tmp_path / "in").rename(tmp_path / "away")
        (tmp_path / "in").mkdir()
        with pytest.warns(UserWarning, match=r"\.csv does not exist.*tried again"), pytest.raises(DataError):
            trained(config.changed(timeout=0.1), resume=True)
        (tmp_path / "in").rmdir()
        (tmp_path / "away").rename(tmp_path / "in")
        assert trained(config, resume=True) == {step: whole[step] for step in range(6, 14)}
        return
    (tmp_path / "in" / "b.csv").unlink()
    if how == "replaced":
        deliver(tmp_path / "in", "b.csv", range(1000, 1300))
    with pytest.warns(UserWarning, match="the rows of a file are left out: data file .*b.csv"):
        after = trained(config, resume=True)
    assert after == {step: [row for row in whole[step] if row < 200] for step in range(6, 14)}
    left_out = 200 - sum(row >= 200 for row in numbers(before))
    assert RunFolder(tmp_path / "run").metrics["skipped_rows"] == {"damaged part of a file": left_out}


def test_a_damaged_text_is_left_out_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is found when the file is opened or converted, before any row was trained on."""
    monkeypatch.setattr(formats, "_BLOCK_BYTES", 1000)
    config = feed(tmp_path, on_bad_row="skip")
    deliver(tmp_path / "in", "a.csv", range(64))
    data = gzip.compress(("click,number,site\n" + "".join(f"1,{n},2\n" for n in range(9999))).encode())
    (tmp_path / "in" / "b.csv.gz").write_bytes(data[: len(data) // 2])
    (tmp_path / "in" / "c.csv").write_bytes("click,number,site\n1,2,3\n".encode("utf-16"))
    with pytest.warns(UserWarning, match="left out: .*b.csv.gz: the file is damaged"):
        assert numbers(trained(config)) == list(range(64))
    skipped = RunFolder(tmp_path / "run").metrics["skipped_rows"]
    assert skipped == {"file that cannot be read": 2}
    with pytest.raises(DataError, match=r"b.csv.gz: the file is damaged"):
        (tmp_path / "in" / "c.csv").unlink()
        trained(config.changed(on_bad_row="error", out=str(tmp_path / "error")))


def test_options_that_do_not_go_with_a_feed(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"epochs \(--epochs\) is 2, and data \(--data\) is a feed: leave it out"):
        TrainConfig(data="feed:x", epochs=2)
    with pytest.raises(ConfigError, match=r"(?s)loss \(--loss\) is 'pairwise', and data.*give checkpoint_every"):
        TrainConfig(data="feed:x", loss="pairwise")
    with pytest.raises(ConfigError, match=r"feed_idle \(--feed-idle\) is 1, and data \(--data\) is not a feed"):
        TrainConfig(feed_idle=1)
    config = feed(tmp_path)
    with pytest.raises(DataError, match="has had nothing for 0 s"):
        trained(config)
    with pytest.raises(DataError, match="is no folder and no pattern: make it first"):
        trained(config.changed(data=f"feed:{tmp_path / 'other'}"))
    (tmp_path / "spec.yaml").write_text(SPEC.replace("rows: 50", "vocabulary: from_data"), encoding="utf-8")
    with pytest.raises(ConfigError, match="which a feed never has all of"):
        trained(config.changed(out=str(tmp_path / "other")))


def test_a_run_that_found_nothing_before_its_first_checkpoint_goes_on(tmp_path: Path) -> None:
    config = feed(tmp_path)
    all_rows = delivered(tmp_path)
    trained(config, cut_after=2)
    (tmp_path / "in").rename(tmp_path / "away")
    (tmp_path / "in").mkdir()
    assert trained(config, resume=True) == {}
    (tmp_path / "in").rmdir()
    (tmp_path / "away").rename(tmp_path / "in")
    (tmp_path / "run" / "plan.json").unlink()  # so that it plans, with rows that it then reads again
    assert numbers(trained(config, resume=True)) == all_rows


def test_batches_without_rows_take_no_memory() -> None:
    """As of a rank that has no rows of arrivals with fewer rows than ranks."""
    progressive = Progressive(2)
    for rows in (0, 1, 0, 2, 1, *[0] * 10):
        progressive.scoring(lambda rows: torch.zeros(rows, 1), torch.ones(rows))(rows)
    assert (len(progressive._scored), progressive.state().shape) == (2, (2, 2))

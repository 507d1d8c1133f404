"""Event times of feeds: which rows are late, and points and saves by them, whatever breaks off."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from shardrec.errors import ConfigError, ShardrecError
from shardrec.launch.ranks import RankInfo
from shardrec.trainer.run import TrainConfig
from shardrec.trainer.run.runs import RunFolder
from shardrec.trainer.run.saving import Saver
from shardrec.trainer.run.source import Source
from tests.campaign.results import differences
from tests.ranks import raises_on_all, ranks
from tests.trainer.run.fed import SPEC, feed, numbers, trained
from tests.trainer.run.topics import PARTITIONS, Brokers, trained_on_topic

START = 1_700_000_000
"""Event times are seconds after it."""


@pytest.fixture(scope="module")
def brokers() -> Iterator[Brokers]:
    pytest.importorskip("confluent_kafka", reason="shardrec is installed without its extra kafka")
    yield Brokers()


def timed(folder: Path, **options: Any) -> TrainConfig:
    """A run on a feed with event times, a file an arrival, which leaves out what is more than 100 s late."""
    options = {"streams": 1, "checkpoint_every": "1", "on_bad_row": "skip", "late_after": 100, **options}
    config = feed(folder, **options)
    (folder / "spec.yaml").write_text(SPEC + "event_time: at\n", encoding="utf-8")
    return config


def deliver(folder: Path, name: str, times: Mapping[int, Any]) -> None:
    """A file with rows of these numbers, which happened this number of seconds after the start, or at a text."""
    rows = (f"{number % 3 == 0:d},{number},{number % 40},{at_of(time)}" for number, time in times.items())
    (folder / "in" / name).write_text("\n".join(["click,number,site,at", *rows, ""]), encoding="utf-8")


def at_of(time: Any) -> Any:
    return time if isinstance(time, str) else START + time


ARRIVALS: Sequence[Mapping[int, int]] = [
    {number: 10 * number for number in range(48)},
    {number: 300 + 5 * (number - 48) for number in range(48, 88)},
    {number: 900 - 10 * (number - 88) for number in range(88, 128)},  # the largest is in the first step
    {number: 805 if number % 2 else 630 for number in range(128, 148)},
]


def late_rows(shares: Sequence[Mapping[int, Sequence[int]]], arrivals: Sequence[Mapping[int, int]]) -> set[int]:
    """The rows that are to be late, of those that each rank has trained on."""
    late, mark, latest = set[int](), -1000, [-1000] * len(shares)
    for times in arrivals:
        late |= {number for number, time in times.items() if time < mark - 100}
        for rank, share in enumerate(shares):
            latest[rank] = max([latest[rank], *(times[number] for number in numbers(share) if number in times)])
        mark = max(mark, min(time for time in latest if time > -1000))
    return late


def check_cuts(
    config: TrainConfig,
    count: int,
    cuts: Sequence[int],
    arrivals: Sequence[Mapping[int, int]],
    train: Callable[..., dict[int, list[int]]] = trained,
) -> set[int]:
    """Broken off after a step (default: each) and gone on with, a run has the same rows in each step and the same
    results; returns the late ones."""

    def shares_of(config: TrainConfig, **how: Any) -> list[dict[int, list[int]]]:
        """The rows of each rank's steps."""
        return [train(config, **how)] if count == 1 else ranks(count, train, config, **how)

    whole = shares_of(config)
    late = late_rows(whole, arrivals)
    assert {number for share in whole for number in numbers(share)} == {*range(148)} - late
    folder = Path(str(config.output.out))
    assert RunFolder(folder).metrics["skipped_rows"] == {"late row": len(late)}
    for cut in cuts or range(1, len(whole[0])):
        broken_off = config.changed(out=f"{folder}-{cut}")
        before, after = (shares_of(broken_off, **how) for how in ({"cut_after": cut}, {"resume": True}))
        assert [one | other for one, other in zip(before, after, strict=True)] == whole
        assert differences(Path(f"{folder}-{cut}"), folder) == []
    return late


@pytest.mark.parametrize(
    ("count", "cuts"),
    [
        pytest.param(1, [5], marks=pytest.mark.slow),  # as the records of a topic below, on one rank
        (2, [5]),
        pytest.param(2, [], marks=pytest.mark.slow),
    ],
)
def test_the_same_rows_of_files_are_late_after_a_kill(count: int, cuts: list[int], tmp_path: Path) -> None:
    """Cut off in the middle of an arrival; of two ranks, the one that is behind has the watermark."""
    config = timed(tmp_path, batch_size=32 // count)
    for place, times in enumerate(ARRIVALS):
        deliver(tmp_path, f"{place}.csv", times)
    late = check_cuts(config, count, cuts, ARRIVALS)
    assert len(late) == {1: 14 + 10, 2: 10}[count]


@pytest.mark.parametrize("cuts", [[3], pytest.param([], marks=pytest.mark.slow)])
def test_the_same_records_are_late_after_a_kill(cuts: list[int], brokers: Brokers, tmp_path: Path) -> None:
    """An arrival is a file with a range of each partition."""
    flat = {number: time for times in ARRIVALS for number, time in times.items()}
    rows = [{"click": int(n % 3 == 0), "number": n, "site": n % 40, "at": 1000 * at_of(t)} for n, t in flat.items()]
    config = timed(tmp_path, data=f"feed:{brokers.deliver(f'late-{len(cuts)}', rows)}")
    size = 9 * PARTITIONS
    train = partial(trained_on_topic, most=size)
    arrivals = [{n: flat[n] for n in range(first, min(first + size, 148))} for first in range(0, 148, size)]
    assert len(check_cuts(config, 1, cuts, arrivals, train)) > 9


def test_a_run_goes_on_with_another_number_of_ranks(tmp_path: Path) -> None:
    """By the watermark in the checkpoint, from the end of an arrival on."""
    config = timed(tmp_path, batch_size=16, event_every=50, checkpoint_every="point")
    for place, times in enumerate(ARRIVALS):
        deliver(tmp_path, f"{place}.csv", times)
    before = ranks(2, trained, config, cut_after=6)
    after = trained(config.changed(global_batch_size=32), resume=True)
    assert sorted(after) == [7]
    assert {*range(128, 148)} - {*after[7]} == late_rows(before, ARRIVALS) == {*range(128, 148, 2)}


def test_points_saves_and_versions_by_event_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the end of an arrival in which the watermark passes a multiple; of the rows after the last point."""
    published: list[int] = []
    monkeypatch.setattr(Saver, "_publish", lambda saver, step: published.append(step))
    on_points: dict[str, Any] = {"event_every": 100, "checkpoint_every": "point", "publish_every": "point"}
    config = timed(tmp_path, batch_size=16, late_after=999, keep_checkpoints=9, publish=str(tmp_path), **on_points)
    for place, time in enumerate([10, 20, 130, 140, 350, 360]):
        deliver(tmp_path, f"{place}.csv", dict.fromkeys(range(24 * place, 24 * place + 24), time))
    trained(config)
    points = RunFolder(tmp_path / "run").metrics["curve"]
    assert [(point["samples"], point["rows"]) for point in points] == [(72, 72), (120, 48)]
    assert RunFolder(tmp_path / "run").metrics["final"]["rows"] == 24
    saved = (tmp_path / "run" / "checkpoints").iterdir()
    assert sorted(int(path.name.removeprefix("step-")) for path in saved) == published == [6, 10, 12]
    assert RunFolder(tmp_path / "run").evaluate(str(tmp_path / "in" / "0.csv"))[0].rows == 24
    for cut in (7, 11):  # after a point, in the middle of an interval
        broken_off = config.changed(out=str(tmp_path / f"cut-{cut}"))
        trained(broken_off, cut_after=cut)
        trained(broken_off, resume=True)
        assert differences(tmp_path / f"cut-{cut}", tmp_path / "run") == []


def test_a_time_in_the_future_is_bad_and_makes_no_others_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor one that is an hour ahead: it counts as the clock's."""
    monkeypatch.setattr("shardrec.trainer.run.source.time.time", lambda: START + 500.0)
    config = timed(tmp_path, checkpoint_every="1000")
    soon, far = START + 500 + 3599, START + 500 + 3601
    deliver(tmp_path, "0.csv", {0: 480, 1: soon - START, 2: far - START, 3: "2999-01-01", 4: "", 5: "noon"})
    deliver(tmp_path, "1.csv", {6: 401, 7: 399})
    assert numbers(trained(config)) == [0, 1, 6]
    assert RunFolder(tmp_path / "run").metrics["skipped_rows"] == {"bad event time": 4, "late row": 1}


@pytest.mark.parametrize(
    ("times", "words"),
    [
        (
            {8: 399},
            r"1.csv:2: field 'at': 2023-11-14T22:19:59\+00:00 is before 2023-11-14T22:20:00\+00:00, late by --late",
        ),
        (
            {8: "2999-01-01"},
            r"field 'at': 2999-01-01T00:00:00\+00:00 is after 20.*, an hour after its arrival was first",
        ),
        (
            {8: "noon"},
            r"field 'at': value 'noon' is no date and time, nor seconds or milliseconds since 1970; correct it, or",
        ),
    ],
)
def test_what_is_late_or_no_time_ends_all_ranks(times: dict[int, Any], words: str, tmp_path: Path) -> None:
    config = timed(tmp_path, on_bad_row="error", batch_size=1)
    deliver(tmp_path, "0.csv", {0: 500, 1: 500})
    deliver(tmp_path, "1.csv", {**times, 9: 400})
    raises_on_all(2, ShardrecError, words, trained, config)


def test_options_and_features_that_do_not_go_with_event_times(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"late_after \(--late-after\) is 3, and data \(--data\) is not a feed"):
        TrainConfig(late_after=3)
    config = timed(tmp_path)
    lead = RankInfo(rank=0, world_size=1, device=torch.device("cpu"), threads=1)
    (tmp_path / "spec.yaml").write_text(SPEC, encoding="utf-8")
    for option in ({}, {"late_after": None, "event_every": 60}):
        with pytest.raises(ConfigError, match=r"name no column of them: add event_time: COLUMN, or leave both out"):
            Source(config.changed(**option), lead)
    (tmp_path / "spec.yaml").write_text(SPEC + "event_time: site\n", encoding="utf-8")
    pytest.importorskip("confluent_kafka", reason="shardrec is installed without its extra kafka")
    with pytest.raises(ConfigError, match=r"have 2 fields or columns 'site', and a record has one"):
        Source(config.changed(data="feed:kafka://host/topic"), lead)

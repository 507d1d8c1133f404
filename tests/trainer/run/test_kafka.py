"""Runs on a topic: each record is trained on once, and what cannot be read is named on all ranks."""

from __future__ import annotations

import os
import random
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from shardrec import _versions
from shardrec.errors import ConfigError, DataError, ShardrecError, VersionError
from shardrec.launch.ranks import RankInfo
from shardrec.trainer.data.spec import parse_spec
from shardrec.trainer.run import TrainConfig
from shardrec.trainer.run.runs import RunFolder
from shardrec.trainer.run.source import Source
from tests.campaign.results import differences
from tests.ranks import raises_on_all, ranks
from tests.trainer.run.fed import SPEC, digests, feed, numbers, trained
from tests.trainer.run.topics import Brokers, trained_on_topic


@pytest.fixture(scope="module")
def brokers() -> Iterator[Brokers]:
    pytest.importorskip("confluent_kafka", reason="shardrec is installed without its extra kafka")
    yield Brokers()


def row(number: int) -> dict[str, Any]:
    return {"click": int(number % 3 == 0), "number": number, "site": number % 40, "more": "of another reader"}


def on_topic(folder: Path, url: str, **options: Any) -> TrainConfig:
    return feed(folder, data=f"feed:{url}", **options)


@pytest.mark.parametrize("kills", [2, pytest.param(100, marks=pytest.mark.slow)])
def test_a_kill_loses_and_repeats_no_record(kills: int, brokers: Brokers, tmp_path: Path) -> None:
    """Struck between checkpoints, at them, at the ends of arrivals, before the first: the state is the same, too."""
    draws = random.Random(kills)
    whole = on_topic(tmp_path, brokers.deliver(f"kills-{kills}", list(map(row, range(700)))))
    undisturbed = trained_on_topic(whole, most=280)  # arrivals of 280, 280 and 140 rows
    assert (numbers(undisturbed), len(undisturbed)) == (list(range(700)), 23)
    struck, run = 0, 0
    while struck < kills:
        run += 1
        config = whole.changed(out=str(tmp_path / f"run-{run}"))
        rows: dict[int, list[int]] = {}
        last = 0
        while last <= 23 and (struck < kills or last):
            cut = draws.randint(last // 4 * 4 + 1, 25) if struck < kills else 25
            rows |= trained_on_topic(config, most=280, resume=last > 0, cut_after=cut)
            last, struck = cut, struck + (cut <= 23)
        assert digests(rows, 4) == digests(undisturbed, 4)
        assert differences(tmp_path / f"run-{run}", tmp_path / "run") == []


def test_files_that_no_checkpoint_needs_are_removed(brokers: Brokers, tmp_path: Path) -> None:
    """But for the last one, which says where the topic goes on."""
    config = on_topic(tmp_path, brokers.deliver("removed", list(map(row, range(380)))), checkpoint_every="1")
    rows = trained_on_topic(config, most=64, cut_after=7)
    assert sorted((tmp_path / "run" / "topic").iterdir())[0].name == "topic-000000000002.parquet"
    rows |= trained_on_topic(config, most=64, resume=True)
    assert numbers(rows) == list(range(380))
    assert [path.name for path in (tmp_path / "run" / "topic").iterdir()] == ["topic-000000000005.parquet"]
    brokers.deliver("removed", list(map(row, range(380, 400))))
    assert numbers(trained_on_topic(config, resume=True)) == list(range(380, 400))
    unsaved = config.changed(checkpoint="none", checkpoint_every=None, out=str(tmp_path / "unsaved"))
    assert numbers(trained_on_topic(unsaved, most=64)) == list(range(400))
    assert [path.name for path in (tmp_path / "unsaved" / "topic").iterdir()] == ["topic-000000000006.parquet"]


def test_the_ingester_is_a_process_that_may_be_killed(brokers: Brokers, tmp_path: Path) -> None:
    """The run starts another one."""
    url = brokers.deliver("process", list(map(row, range(300))))
    config = on_topic(tmp_path, url, feed_idle=0.0)
    killed: list[int] = []

    def train() -> dict[int, list[int]]:
        from shardrec.trainer.data import ingest

        original = ingest.spawn_alone

        def spawn(*args: Any, **how: Any) -> Any:
            process = original(*args, **how)
            if not killed:
                killed.append(process.pid)
                os.kill(process.pid, signal.SIGKILL)
            return process

        ingest.spawn_alone = spawn
        try:
            return trained(config)
        finally:
            ingest.spawn_alone = original

    with pytest.warns(
        UserWarning, match="the process that reads kafka://.*process was ended: it is started again. It is"
    ):
        assert numbers(train()) == list(range(300))
    assert len(killed) == 1


def test_a_run_goes_on_with_another_number_of_ranks_and_with_what_has_come(brokers: Brokers, tmp_path: Path) -> None:
    config = on_topic(tmp_path, brokers.deliver("ranks", list(map(row, range(600)))), global_batch_size=64)
    shares = ranks(2, trained_on_topic, config.changed(batch_size=32), cut_after=5)
    rows = {step: [*shares[0][step], *shares[1][step]] for step in range(1, 5)}
    assert {len(share) for rank in shares for share in rank.values()} == {32}
    brokers.deliver("ranks", list(map(row, range(600, 700))))
    rows |= trained_on_topic(config.changed(batch_size=32), resume=True)
    assert numbers(rows) == list(range(700))


def test_broken_records_are_counted_or_end_the_run(brokers: Brokers, tmp_path: Path) -> None:
    broken = [b"{", None, b"\xff", [3], {"click": 0}, {**row(7), "number": "what"}, {**row(8), "click": 2}]
    url = brokers.deliver("broken", [*map(row, range(40)), *broken], partition=1)
    config = on_topic(tmp_path, url, on_bad_row="skip", checkpoint_every="1")
    rows = trained_on_topic(config, cut_after=1)
    rows |= trained_on_topic(config, resume=True)
    assert numbers(rows) == list(range(40))
    skipped = RunFolder(tmp_path / "run").metrics["skipped_rows"]
    assert skipped == {"bad label": 1, "bad number": 1, "bad JSON object": 5}
    brokers.deliver("broken", [b"{", b"["], partition=1)  # after the last file
    assert trained_on_topic(config, resume=True) == {}
    assert RunFolder(tmp_path / "run").metrics["skipped_rows"] == {**skipped, "bad JSON object": 7}
    place = re.escape(f"{url}: partition 1, offset 40: '{{' is no object with the fields click, number, site; ")
    config = config.changed(on_bad_row="error", out=str(tmp_path / "error"), global_batch_size=32, batch_size=16)
    words = place + "correct it, or leave such records out"
    raises_on_all(2, ShardrecError, words, trained_on_topic, config)


def test_records_that_are_gone_end_the_run_or_are_counted(brokers: Brokers, tmp_path: Path) -> None:
    """Those that have been written to a file are trained on."""
    url = brokers.deliver("kept", list(map(row, range(64))), partition=2)
    config = on_topic(tmp_path, url, batch_size=16, checkpoint_every="1")
    trained_on_topic(config, cut_after=1)
    brokers.deliver("kept", [row(64)], partition=2)
    brokers.deliver("kept", [b" " * 900_000] * 8, partition=2)  # more than the brokers keep
    brokers.deliver("kept", list(map(row, range(65, 81))), partition=2)
    words = r"kept: partition 2 lacks records that were not read \(it has offsets \d+ to 89, and 64 is the next"
    with pytest.raises(DataError, match=words):
        trained_on_topic(config, resume=True)
    with pytest.warns(UserWarning, match="partition 2 lacks its records before offset"):
        rows = trained_on_topic(config.changed(on_bad_row="skip"), resume=True)
    assert [number for number in numbers(rows) if number > 63] == list(range(65, 81))  # after those not yet saved
    skipped = RunFolder(tmp_path / "run").metrics["skipped_rows"]
    assert sum(skipped.values()) == 1 + 8
    assert skipped["record that is gone"] > 0


def test_options_and_features(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = on_topic(tmp_path, "kafka://host/topic")
    lead = RankInfo(rank=0, world_size=1, device=torch.device("cpu"), threads=1)
    with monkeypatch.context() as patched:
        patched.setattr(_versions.util, "find_spec", lambda name: None)
        _versions.check_extra.cache_clear()
        with pytest.raises(VersionError, match=r"without confluent_kafka, .* pip install 'shardrec\[kafka\]'"):
            Source(config, lead)
    pytest.importorskip("confluent_kafka", reason="shardrec is installed without its extra kafka")
    for name in ("name: click, column: site", "name: site, column: number"):
        clash = parse_spec(SPEC.replace("name: site", name), "spec")
        with pytest.raises(ConfigError, match=r"have 2 fields or columns '(click|number)', .* rename them"):
            Source(config, lead, clash)


def test_a_position_in_a_topic_is_refused(tmp_path: Path) -> None:
    """As earlier versions recorded it."""
    pytest.importorskip("confluent_kafka", reason="shardrec is installed without its extra kafka")
    lead = RankInfo(rank=0, world_size=1, device=torch.device("cpu"), threads=1)
    source = Source(on_topic(tmp_path, "kafka://host/topic"), lead)
    taken = ["kafka://host/topic?partition=0&offsets=0-64&last=19ac3f0d1c2-8f3a90b1"]
    with pytest.raises(DataError, match=r"of a version of shardrec that read .*topic itself: .* \(--init-from\)"):
        source.seek({"taken": taken, "kinds": {}, "files": [], "left_out": 0}, in_arrival=False)
    source.seek({"taken": [], "kinds": {}, "files": [], "left_out": 0}, in_arrival=False)  # before the first record

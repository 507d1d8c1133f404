"""``shardrec ingest``: a topic as a folder, which ``shardrec train`` follows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from shardrec.files import UnreachableError
from shardrec.trainer.data import ingest
from tests.trainer.cli.command import Run
from tests.trainer.run.fed import feed, numbers, trained
from tests.trainer.run.topics import Brokers


def test_a_topic_is_written_to_a_folder_and_trained_on(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In files of a bounded size, each with the lag; brokers that do not answer for a moment are asked again."""
    pytest.importorskip("confluent_kafka", reason="shardrec is installed without its extra kafka")
    config = feed(tmp_path)  # which writes the spec
    rows = [{"click": n % 3 == 0, "number": n, "site": n % 40} for n in range(100)]
    brokers = Brokers()
    url = brokers.deliver("clicks", rows)
    command = ["ingest", url, str(tmp_path / "in"), "--features", str(tmp_path / "spec.yaml"), "--idle", "0"]
    monkeypatch.setattr(ingest.Ingester.write, "__defaults__", (64,))
    code, out, _ = run(*command)
    shown = [re.sub(".*/", "", line) for line in out.splitlines()]
    assert code == 0
    assert shown == [
        "topic-000000000000.parquet: 64 rows, 36 records behind",
        "topic-000000000001.parquet: 36 rows, 0 records behind",
    ]
    brokers.deliver("clicks", [*rows[:1], b"{"])
    write, failed = ingest.Ingester.write, []

    def fails_once(ingester: ingest.Ingester) -> object:
        if ingester._next == 3 and not failed:
            failed.append(1)
            raise UnreachableError("brokers do not answer")
        return write(ingester)

    monkeypatch.setattr(ingest.Ingester, "write", fails_once)
    assert "is no object with the fields click, number, site" in run(*command)[2]
    with pytest.warns(UserWarning, match=r"brokers do not answer. It is tried again in 0.5 s"):
        assert run(*command, "--on-bad-row", "skip", "--keep", "0")[0] == 0
    assert [path.name for path in (tmp_path / "in").iterdir()] == ["topic-000000000002.parquet"]
    assert numbers(trained(config)) == [0]


def test_what_is_refused(tmp_path: Path, run: Run) -> None:
    pytest.importorskip("confluent_kafka", reason="shardrec is installed without its extra kafka")
    for topic, words in (
        ("incoming", "incoming is no topic: give kafka://HOST:PORT/TOPIC"),
        ("kafka://127.0.0.1:1/clicks?format=xml", "a topic with the options 'format=xml': give format=avro"),
    ):
        code, _, err = run("ingest", topic, str(tmp_path))
        assert (code, words in err) == (1, True)
    assert run("ingest", "kafka://127.0.0.1:1/clicks", str(tmp_path), "--on-bad-row", "what")[0] == 2

"""Runs on a topic: each record is trained on once, and what cannot be read is named on all ranks."""

from __future__ import annotations

import io
import json
import os
import random
import re
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
import torch

from shardrec import _versions
from shardrec.errors import ConfigError, DataError, ShardrecError, VersionError
from shardrec.files import UnreachableError
from shardrec.launch.ranks import RankInfo
from shardrec.trainer.data import FeatureSpec, FileClickData, kafka
from shardrec.trainer.data.feed import Feed
from shardrec.trainer.data.records import decoder_of
from shardrec.trainer.data.request import named_spec
from shardrec.trainer.data.spec import parse_spec
from shardrec.trainer.data.tables import check_file
from shardrec.trainer.run import TrainConfig
from shardrec.trainer.run.runs import RunFolder
from shardrec.trainer.run.source import Source
from tests.campaign.results import differences
from tests.ranks import raises_on_all, ranks
from tests.trainer.run.fed import SPEC, digests, feed, numbers, trained
from tests.trainer.run.topics import Brokers


@pytest.fixture(scope="module")
def brokers() -> Iterator[Brokers]:
    pytest.importorskip("confluent_kafka", reason="shardrec is installed without its extra kafka")
    yield Brokers()
    kafka._idle.clear()


def row(number: int) -> dict[str, Any]:
    return {"click": int(number % 3 == 0), "number": number, "site": number % 40, "more": "of another reader"}


def on_topic(folder: Path, url: str, **options: Any) -> TrainConfig:
    return feed(folder, data=f"feed:{url}", **options)


@pytest.mark.parametrize("kills", [2, pytest.param(100, marks=pytest.mark.slow)])
def test_a_kill_loses_and_repeats_no_record(
    kills: int, brokers: Brokers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Struck between checkpoints, at them, at the ends of arrivals, before the first: the state is the same, too."""
    monkeypatch.setattr(kafka, "_MOST", 70)  # three arrivals: 280, 280 and 140 rows
    draws = random.Random(kills)
    whole = on_topic(tmp_path, brokers.deliver(f"kills-{kills}", list(map(row, range(700)))))
    undisturbed = trained(whole)
    assert (numbers(undisturbed), len(undisturbed)) == (list(range(700)), 23)
    struck, run = 0, 0
    while struck < kills:
        run += 1
        config = whole.changed(out=str(tmp_path / f"run-{run}"))
        rows: dict[int, list[int]] = {}
        last = 0
        while last <= 23 and (struck < kills or last):
            cut = draws.randint(last // 4 * 4 + 1, 25) if struck < kills else 25
            rows |= trained(config, resume=last > 0, cut_after=cut)
            last, struck = cut, struck + (cut <= 23)
        assert digests(rows, 4) == digests(undisturbed, 4)
        assert differences(tmp_path / f"run-{run}", tmp_path / "run") == []


def test_a_run_goes_on_with_another_number_of_ranks_and_with_what_has_come(brokers: Brokers, tmp_path: Path) -> None:
    config = on_topic(tmp_path, brokers.deliver("ranks", list(map(row, range(600)))), global_batch_size=64)
    shares = ranks(2, trained, config.changed(batch_size=32), cut_after=5)
    rows = {step: [*shares[0][step], *shares[1][step]] for step in range(1, 5)}
    assert {len(share) for rank in shares for share in rank.values()} == {32}
    brokers.deliver("ranks", list(map(row, range(600, 700))))
    rows |= trained(config.changed(batch_size=32), resume=True)
    assert numbers(rows) == list(range(700))


def test_broken_records_are_counted_or_end_the_run(brokers: Brokers, tmp_path: Path) -> None:
    broken = [b"{", None, b"\xff", [3], {"click": 0}, {**row(7), "number": "what"}, {**row(8), "click": 2}]
    url = brokers.deliver("broken", [*map(row, range(40)), *broken], partition=1)
    config = on_topic(tmp_path, url, on_bad_row="skip")
    assert numbers(trained(config)) == list(range(40))
    skipped = RunFolder(tmp_path / "run").metrics["skipped_rows"]
    assert skipped == {"bad label": 1, "bad number": 1, "bad JSON object": 5}
    place = re.escape(f"{url}?partition=1&offsets=0-47:40: '{{' is no object with the fields click, number, site; ")
    config = config.changed(on_bad_row="error", out=str(tmp_path / "error"), global_batch_size=32, batch_size=16)
    raises_on_all(2, ShardrecError, place + "correct it, or leave such rows out", trained, config)


def test_records_that_are_gone_end_the_run_or_are_counted(brokers: Brokers, tmp_path: Path) -> None:
    """Those of the range under way, and those that no arrival had."""
    url = brokers.deliver("kept", list(map(row, range(64))), partition=2)
    config = on_topic(tmp_path, url, batch_size=16, checkpoint_every="1")
    trained(config, cut_after=1)
    trained(config.changed(out=str(tmp_path / "whole")))
    brokers.deliver("kept", [row(64)], partition=2)
    brokers.deliver("kept", [b" " * 900_000] * 8, partition=2)  # more than the brokers keep
    brokers.deliver("kept", list(map(row, range(65, 81))), partition=2)
    for out, words in (
        ("run", r"offsets=0-64:16: the record is gone; keep records for longer .*, or leave such rows out"),
        ("whole", r"partition=2 lacks .* \(it has offsets \d+ to 89, and 64 is the next to read\): keep records"),
    ):
        with pytest.raises(DataError, match=words):
            trained(config.changed(out=str(tmp_path / out)), resume=True)
        rows = trained(config.changed(out=str(tmp_path / out), on_bad_row="skip"), resume=True)
        assert numbers(rows) == list(range(65, 81))
        skipped = RunFolder(tmp_path / out).metrics["skipped_rows"]
        assert sum(skipped.values()) == {"run": 48, "whole": 0}[out] + 1 + 8


def test_records_that_are_left_of_a_range_are_read(brokers: Brokers) -> None:
    """Where the oldest of a range under way are gone."""
    brokers.deliver("left", [b" " * 900_000] * 8, partition=0)  # more than the brokers keep
    url = brokers.deliver("left", list(map(row, range(8, 16))), partition=0)
    oldest = kafka.range_of(kafka.new_ranges(url, [], skips=False)[0]).start
    assert 0 < oldest <= 8
    spec = named_spec(parse_spec(SPEC, "spec"))
    data = FileClickData([f"{url}?partition=0&offsets=0-16"], spec, holdout=0.0, on_bad_row="skip")
    with pytest.warns(UserWarning, match=rf"offsets=0-16 lacks its records before offset {oldest}$"):
        batches = list(data.train_batches(0, 1, 4))
    assert [round(1000 * float(number)) for batch in batches for number in batch.dense[:, 0]] == list(range(8, 16))
    assert data.skipped == {"damaged part of a file": oldest, "bad JSON object": 8 - oldest}


def test_what_may_come_later_is_another_error(brokers: Brokers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kafka, "_SILENT_S", 0.3)
    url = brokers.deliver("silent", list(map(row, range(3))), partition=0)
    with (
        monkeypatch.context() as patch,
        pytest.raises(
            UnreachableError,
            match=r"kafka://127.0.0.1:1/silent cannot be read \(.*Connection refused.*\): check that the",
        ),
    ):
        patch.setattr(kafka, "_REQUEST_S", 1.0)  # brokers that are there get longer
        kafka.new_ranges("kafka://127.0.0.1:1/silent", [], skips=True)
    with pytest.raises(UnreachableError, match=r"offsets=3-5 cannot be read \(offset 3 has not come in 0.3 s\): check"):
        list(kafka.read_range(f"{url}?partition=0&offsets=3-5", named_spec(parse_spec(SPEC, "spec")), 0, 4))
    with pytest.raises(DataError, match=r"silent-not cannot be read \(.*nknown topic.*\)") as refused:
        kafka.new_ranges(f"{url}-not", [], skips=True)
    assert not isinstance(refused.value, UnreachableError)
    with pytest.raises(DataError, match=r"partition=0 lacks .*\(it has offsets 0 to 3, and 9 is the next .*made anew"):
        kafka.new_ranges(url, [f"{url}?partition=0&offsets=0-9"], skips=True)


def fed_by(url: str) -> Feed:
    spec = named_spec(parse_spec(SPEC, "spec"))
    return Feed(url, spec, lambda names, _: FileClickData(names, spec, holdout=0.0), skips=True)


def test_a_topic_that_was_made_anew_is_noticed(brokers: Brokers) -> None:
    """With more records than were read: by the next poll, and where it goes on with an arrival of the old one."""
    url = brokers.deliver("anew", list(map(row, range(64))), partition=2)
    whole = fed_by(url)
    arrival = whole.poll()
    assert arrival is not None
    others = Brokers()
    again = others.deliver("anew", list(map(row, range(100))), partition=2)
    for position, goes_on in ((arrival.position, True), (whole.position(), False)):
        other = fed_by(again)
        other.seek(json.loads(json.dumps(position)))
        with pytest.raises(DataError, match=r"/anew was made anew: partition 2 has another record at offset 63"):
            other.poll()
        going_on = fed_by(url)
        going_on.seek(position)
        assert (going_on.poll() is not None) == goes_on
    brokers.deliver("anew", [row(64)], partition=2)
    assert going_on.poll() is not None


AVRO = {
    "type": "record",
    "name": "Click",
    "fields": [
        {"name": "click", "type": "boolean"},
        {"name": "number", "type": ["null", "long"]},
        {"name": "site", "type": ["null", "string"]},
        {"name": "tags", "type": {"type": "map", "values": "float"}},
        {"name": "at", "type": {"type": "long", "logicalType": "timestamp-millis"}},
        {"name": "price", "type": {"type": "bytes", "logicalType": "decimal", "precision": 9, "scale": 2}},
        {"name": "more", "type": "bytes"},
    ],
}
TIMES = {
    "type": "record",
    "name": "Times",
    "fields": [
        {"name": "part", "type": {"type": "record", "name": "Part", "fields": [{"name": "a", "type": "int"}]}},
        {"name": "again", "type": "Part"},
        {"name": "at", "type": {"type": "int", "logicalType": "time-millis"}},
        {"name": "id", "type": {"type": "string", "logicalType": "uuid"}},
    ],
}


def test_times_of_day_and_uuids_are_texts(tmp_path: Path) -> None:
    pytest.importorskip("fastavro", reason="shardrec is installed without its extra avro")
    (tmp_path / "times.avsc").write_text(json.dumps(TIMES), encoding="utf-8")
    decode = decoder_of(f"format=avro&schema={tmp_path}/times.avsc")
    text = str(UUID(int=7))
    record = decode(b"\x02\x04" + b"\xd0\x0f" + bytes([2 * len(text)]) + text.encode())
    assert record == {"part": {"a": 1}, "again": {"a": 2}, "at": "00:00:01", "id": text}


class Avro:
    """Clicks by a schema in a file."""

    def __init__(self, folder: Path) -> None:
        fastavro = pytest.importorskip("fastavro", reason="shardrec is installed without its extra avro")
        self._write, self._schema = fastavro.schemaless_writer, fastavro.parse_schema(AVRO)
        (folder / "clicks.avsc").write_text(json.dumps(AVRO), encoding="utf-8")
        self.options, self.header = f"format=avro&schema={folder / 'clicks.avsc'}", b"\0\0\0\x01\x02"

    def __call__(self, number: int) -> bytes:
        record = {"click": number % 3 == 0, "number": number, "site": str(number % 40), "tags": {"a": 0.5}}
        more = {"at": datetime(2026, 1, 2, 3, tzinfo=UTC), "price": Decimal("1.25"), "more": b"of another reader"}
        self._write(stream := io.BytesIO(), self._schema, record | more)
        return stream.getvalue()


class Protobuf:
    """The same as the second message inside the first of a file; ``site`` is optional, ``at`` a message."""

    def __init__(self, folder: Path) -> None:
        from google.protobuf import descriptor_pool, message_factory, timestamp_pb2
        from google.protobuf.descriptor_pb2 import FieldDescriptorProto as Field
        from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet

        described = FileDescriptorSet()
        described.file.append(FileDescriptorProto.FromString(timestamp_pb2.DESCRIPTOR.serialized_pb))
        file = described.file.add(name="shop.proto", package="shop", syntax="proto3")
        file.dependency.append("google/protobuf/timestamp.proto")
        shop = file.message_type.add(name="Shop")
        shop.nested_type.add(name="Other")
        click = shop.nested_type.add(name="Click")
        entry = click.nested_type.add(name="TagsEntry")
        entry.options.map_entry = True
        one, many = Field.LABEL_OPTIONAL, Field.LABEL_REPEATED
        entry.field.add(name="key", number=1, type=Field.TYPE_STRING, label=one)
        entry.field.add(name="value", number=2, type=Field.TYPE_FLOAT, label=one)
        click.field.add(name="click", number=1, type=Field.TYPE_BOOL, label=one)
        click.field.add(name="number", number=2, type=Field.TYPE_INT64, label=one)
        click.oneof_decl.add(name="_site")
        click.field.add(name="site", number=3, type=Field.TYPE_STRING, label=one, proto3_optional=True, oneof_index=0)
        click.field.add(name="at", number=4, type=Field.TYPE_MESSAGE, type_name=".google.protobuf.Timestamp", label=one)
        click.field.add(
            name="tags", number=5, type=Field.TYPE_MESSAGE, type_name=".shop.Shop.Click.TagsEntry", label=many
        )
        click.field.add(name="price", number=6, type=Field.TYPE_DOUBLE, label=one)
        (folder / "clicks.desc").write_bytes(described.SerializeToString())
        pool = descriptor_pool.DescriptorPool()
        for each in described.file:
            pool.Add(each)
        self.message = message_factory.GetMessageClass(pool.FindMessageTypeByName("shop.Shop.Click"))
        self.options = f"format=protobuf&schema={folder / 'clicks.desc'}&message=shop.Shop.Click"
        self.header = b"\0\0\0\x01\x02\x04\x00\x02"

    def __call__(self, number: int) -> bytes:
        record = self.message(click=number % 3 == 0, number=number, site=str(number % 40), tags={"a": 0.5}, price=1.25)
        record.at.FromJsonString("2026-01-02T03:00:00Z")
        data: bytes = record.SerializeToString()
        return data


@pytest.mark.parametrize("kind", [Avro, Protobuf])
def test_records_of_avro_and_protobuf_are_rows_as_json_is(
    kind: Callable[[Path], Any], brokers: Brokers, tmp_path: Path
) -> None:
    """The same batches, bit for bit; broken ones are counted, and headers are checked where there are some."""
    record, features = kind(tmp_path), SPEC + "  - {name: at, kind: dense}\n  - {name: price, kind: dense}\n"
    spec = named_spec(parse_spec(features + "  - {name: tags, kind: weighted, rows: 9, weights: w}\n", "spec"))
    objects = [{**row(number), "site": str(number % 40)} for number in range(40)]
    objects = [{**each, "at": "2026-01-02T03:00:00Z", "price": 1.25, "tags": {"a": 0.5}} for each in objects]
    name = kind.__name__.lower()
    urls = [brokers.deliver(f"{name}-json", [*objects, b"{", b""], partition=1)]
    broken = [record(3)[:-1], b"\xff"]
    url = brokers.deliver(f"{name}-plain", [*map(record, range(40)), *broken], partition=1)
    urls.append(f"{url}?{record.options}")
    framed = [record.header + data for data in [*map(record, range(40)), broken[0]]]
    framed.append(record.header[:4] + b"\x03" + framed[0][5:])
    urls.append(f"{brokers.deliver(f'{name}-framed', framed, partition=1)}?{record.options}&schema_id=258")
    made = []
    for url in urls:
        feed_ = Feed(
            url, spec, lambda names, _: FileClickData(names, spec, holdout=0.0, on_bad_row="skip", needs_rows=False)
        )
        arrival = feed_.poll()
        assert arrival is not None
        made.append([*arrival.rows.train_batches(0, 1, 16)])
        assert arrival.rows.skipped == {"bad JSON object": 2}
        assert feed_.poll() is None
    for batches in made[1:]:
        for batch, expected in zip(batches, made[0], strict=True):
            assert torch.equal(batch.dense, expected.dense)
            assert torch.equal(batch.labels, expected.labels)
            assert torch.equal(batch.sparse.values(), expected.sparse.values())
            assert torch.equal(batch.sparse.weights(), expected.sparse.weights())
    decode = decoder_of(record.options + "&schema_id=258")
    assert "does not begin with the header" in decode(framed[-1]).where
    assert f"is none of {tmp_path}" in decode(framed[-2]).where
    assert decode(record.header + record(7))["number"] in (7, "7")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("format=xml", "a topic with the options 'format=xml': give format=avro&schema=FILE, or"),
        ("schema=a", "a topic with the options"),
        ("format=avro", "a topic with the options"),
        ("format=avro&schema=", "a topic with the options"),
        ("format=avro&schema=a&message=b", "a topic with the options"),
        ("format=avro&schema=a&schema_id=-1", "a topic with the options"),
        ("format=json&schema_id=1", "a topic with the options"),
        ("format=protobuf&schema=FOLDER/empty&message=a.B", "empty is no descriptor set with message 'a.B'"),
        ("format=protobuf&schema=FOLDER/none&message=a.B", "none is no descriptor set with message 'a.B' .*No such"),
        ("format=protobuf&schema=FOLDER/text&message=a.B", "text is no descriptor set with message 'a.B'"),
        ("format=avro&schema=FOLDER/empty", "empty is no schema of Avro"),
        ("format=avro&schema=FOLDER/text", "text is no schema of Avro .UnknownType: recrd"),
        ("format=avro&schema=FOLDER/none", "none is no schema of Avro .FileNotFoundError"),
        ("format=avro&schema=FOLDER/pipe", "pipe is no schema of Avro .OSError: .*it is no regular file"),
        ("format=protobuf&schema=FOLDER/pipe&message=a.B", "pipe is no descriptor set .*it is no regular file"),
        ("format=avro&schema=FOLDER/tree", "tree is no schema of Avro .ValueError: record Tree is within itself"),
        ("format=avro&schema=FOLDER/far", "far is no schema of Avro .ValueError: record a.Tree is within itself"),
    ],
)
def test_formats_that_are_refused(options: str, words: str, tmp_path: Path) -> None:
    if "FOLDER" in options and "avro" in options:
        pytest.importorskip("fastavro", reason="shardrec is installed without its extra avro")
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "text").write_text('"recrd"', encoding="utf-8")
    os.mkfifo(tmp_path / "pipe")
    tree = {"type": "record", "name": "Tree", "fields": [{"name": "up", "type": ["null", "Tree"]}]}
    (tmp_path / "tree").write_text(json.dumps(tree), encoding="utf-8")
    wood = {"name": "trees", "type": {"type": "array", "items": "a.Tree"}}
    part = {"type": "record", "name": "Wood", "fields": [wood]}
    tree |= {"namespace": "a", "fields": [{"name": "wood", "type": part}]}
    (tmp_path / "far").write_text(json.dumps(tree), encoding="utf-8")
    with pytest.raises(ShardrecError, match=words):
        decoder_of(options.replace("FOLDER", str(tmp_path)))


class Scripted:
    """A consumer of given messages: offsets with records, and the end of the partition, negative."""

    def __init__(self, offsets: list[int]) -> None:
        self._offsets = offsets

    def assign(self, partitions: list[Any]) -> None:
        self._offsets = [offset for offset in self._offsets if abs(offset) >= partitions[0].offset]

    def unassign(self) -> None:
        pass

    def poll(self, timeout: float) -> None:
        pass

    def consume(self, count: int, timeout: float) -> list[Any]:
        taken, self._offsets = self._offsets[:count], self._offsets[count:]
        return [Message(offset) for offset in taken]


class Message:
    def __init__(self, offset: int) -> None:
        self._offset = offset

    def offset(self) -> int:
        return abs(self._offset)

    def error(self) -> Any:
        from confluent_kafka import KafkaError

        return KafkaError(KafkaError._PARTITION_EOF) if self._offset < 0 else None

    def value(self) -> bytes:
        return f'{{"click": 0, "number": {self._offset}, "site": null}}'.encode()


@pytest.mark.parametrize(
    ("offsets", "records"), [([3, 4, 7, -10], [4, 7]), ([4, 5, 12], [4, 5]), ([-10], []), ([9], [9])]
)
def test_offsets_without_records_have_places(offsets: list[int], records: list[int]) -> None:
    pytest.importorskip("confluent_kafka", reason="shardrec is installed without its extra kafka")
    spec: FeatureSpec = named_spec(parse_spec(SPEC, "spec"))
    kafka._idle["scripted:1"] = [Scripted(offsets)]
    places, at = [], 4
    for table, faults in kafka.read_range("kafka://scripted:1/t?partition=0&offsets=3-10", spec, 1, 4):
        held = [place for place in range(table.num_rows + len(faults)) if place not in faults]
        assert table["number"].to_pylist() == [str(at + place) for place in held]
        places += [at + place for place in held]
        at += table.num_rows + len(faults)
    assert (places, at) == (records, 10)
    # Such a place is no broken row.
    kafka._idle["scripted:1"] = [Scripted(offsets)]
    data = FileClickData(["kafka://scripted:1/t?partition=0&offsets=4-10"], spec, holdout=0.0, needs_rows=False)
    batches = data.train_batches(0, 1, 4)
    assert [round(1000 * float(number)) for batch in batches for number in batch.dense[:, 0]] == records


def test_options_and_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match="is no topic: give feed:kafka://HOST:PORT/TOPIC"):
        kafka.range_of("kafka://host/topic/more")
    for name, spec in (
        ("kafka://host/topic", SPEC),
        ("kafka://host/topic?partition=0&offsets=0-5", SPEC.replace("name: site", "name: place, column: site")),
    ):
        with pytest.raises(DataError, match=r"a topic, whose .*: give feed:kafka://host/topic$"):
            check_file(name, parse_spec(spec, "spec"))
    config = on_topic(tmp_path, "kafka://host/topic")
    lead = RankInfo(rank=0, world_size=1, device=torch.device("cpu"), threads=1)
    with monkeypatch.context() as patched:
        patched.setattr(_versions.util, "find_spec", lambda name: None)
        _versions.check_extra.cache_clear()
        with pytest.raises(VersionError, match=r"without confluent_kafka, .* pip install 'shardrec\[kafka\]'"):
            Source(config, lead)
    pytest.importorskip("confluent_kafka", reason="shardrec is installed without its extra kafka")
    clash = parse_spec(SPEC.replace("name: site", "name: click, column: site"), "spec")
    with pytest.raises(
        ConfigError, match="have a feature 'click', which a record's label, group or event time is named, too"
    ):
        Source(config, lead, clash)
    for options, words in (
        ('{"security.protocl": "ssl"}', 'No such configuration property: "security.protocl"'),
        ("3", "SHARDREC_KAFKA is no JSON object"),
        ("[]", "SHARDREC_KAFKA is no JSON object"),
        ('{"group.id": null}', "option 'group.id' is no text, number or boolean of librdkafka's: correct it"),
        ('{"error_cb": 3}', "option 'error_cb' is no text, number or boolean"),
    ):
        monkeypatch.setenv("SHARDREC_KAFKA", options)
        with pytest.raises(DataError, match=words):
            kafka.new_ranges("kafka://host:1/topic", [], skips=False)

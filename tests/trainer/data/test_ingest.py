"""``Ingester``: each record of a topic is in one row of one file, whatever breaks off."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from decimal import Decimal
from itertools import count
from pathlib import Path
from typing import Any
from unittest import mock
from uuid import UUID

import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardrec.errors import DataError, ShardrecError
from shardrec.files import UnreachableError
from shardrec.trainer.data import kafka
from shardrec.trainer.data.feed import Feed
from shardrec.trainer.data.files import FileClickData
from shardrec.trainer.data.ingest import Ingester, left_out_of
from shardrec.trainer.data.kafka import Place, Topic
from shardrec.trainer.data.records import decoder_of
from shardrec.trainer.data.spec import parse_spec
from shardrec.trainer.data.urls import files_of
from tests.trainer.run.fed import SPEC
from tests.trainer.run.topics import PARTITIONS, Brokers

_topics = count()


@pytest.fixture(scope="module")
def brokers() -> Iterator[Brokers]:
    pytest.importorskip("confluent_kafka", reason="shardrec is installed without its extra kafka")
    yield Brokers()


def row(number: int) -> dict[str, Any]:
    return {"click": int(number % 3 == 0), "number": number, "site": number % 40, "more": "of another reader"}


def of(url: str, folder: Path, spec: str = SPEC, **options: Any) -> Ingester:
    return Ingester(url, parse_spec(spec, "spec"), folder, **options)


def ingested(url: str, folder: Path, spec: str = SPEC, **options: Any) -> None:
    """Write all that there is."""
    ingester = of(url, folder, spec, **options)
    while ingester.write() or ingester.lag:
        pass
    ingester.close()


def columns(folder: Path) -> dict[str, list[Any]]:
    """Of all files in order."""
    return dict(pq.read_table(sorted(folder.glob("topic-*.parquet"))).to_pydict())


class PowerCut(BaseException):
    pass


actions = st.one_of(
    st.tuples(st.just("deliver"), st.lists(st.integers(0, PARTITIONS - 1), max_size=12)),
    st.tuples(st.just("write"), st.integers(1, 9)),
    st.tuples(st.just("killed before the file has its name"), st.integers(1, 9)),
    st.tuples(st.just("killed after the file has its name"), st.integers(1, 9)),
)


@settings(max_examples=6)
@given(drawn=st.lists(actions, max_size=9))
def test_each_record_is_in_one_row(
    drawn: list[tuple[str, Any]], brokers: Brokers, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The records of each partition in their order; over kills at any time, in files of any size."""
    folder, name = tmp_path_factory.mktemp("topic"), f"drawn-{next(_topics)}"
    url = brokers.deliver(name, [])
    delivered: dict[int, list[int]] = {number: [] for number in range(PARTITIONS)}
    numbers, ingester = count(), of(url, folder)
    for what, how in drawn:
        if what == "deliver":
            for partition in how:
                number = next(numbers)
                brokers.deliver(name, [row(number)], partition=partition)
                delivered[partition].append(number)
            continue
        cuts = {"replace": "before the", "unlink": "after the"}
        method = next((method for method, words in cuts.items() if words in what), None)
        if method is None:
            ingester.write(how)
            continue
        with mock.patch.object(Path, method, side_effect=PowerCut):
            try:
                ingester.write(how)
            except PowerCut:
                ingester.close()
                ingester = of(url, folder)
    ingester.close()
    ingested(url, folder)
    if any(delivered.values()):
        read = columns(folder)
        rows = list(zip(read["_partition"], read["_offset"], map(int, read["number"]), strict=True))
        for partition, expected in delivered.items():
            assert [row[1:] for row in rows if row[0] == partition] == list(enumerate(expected))


def test_a_file_has_the_columns_of_the_features(brokers: Brokers, tmp_path: Path) -> None:
    """By their columns, where a record has them by name; values are as they came."""
    features = """
label: click
group: user
features:
  - {name: number, kind: dense, column: n}
  - {name: tags, kind: weighted, rows: 9, column: t, weights: w}
  - {name: seen, kind: sequence, rows: 9, max_length: 2}
"""
    rows = [{"click": True, "user": "u", "number": 1.5, "tags": {"a": 0.5}, "seen": [1, "1", 1.0]}]
    rows += [{"click": 0, "user": 7, "number": None, "tags": None, "seen": None}]
    ingested(brokers.deliver("columns", rows, partition=0), tmp_path, features)
    assert columns(tmp_path) == {
        **{"click": ["1", "0"], "user": ["u", "7"], "n": ["1.5", None], "t": [["a"], []], "w": [[0.5], []]},
        **{"seen": [["1", "1", "1.0"], None], "_partition": [0, 0], "_offset": [0, 1]},
    }
    data = FileClickData(files_of(str(tmp_path)), parse_spec(features, "spec"), holdout=0.0)
    assert [batch.size for batch in data.train_batches(0, 1, 2)] == [2]


def test_the_oldest_files_are_removed_and_a_feed_notices(brokers: Brokers, tmp_path: Path) -> None:
    """Not the newest one, whatever the bound; a feed that has read the others goes on."""
    url = brokers.deliver("oldest", list(map(row, range(60))))
    spec = parse_spec(SPEC, "spec")

    def feed(**options: Any) -> Feed:
        return Feed(str(tmp_path), spec, lambda names, _: FileClickData(names, spec, holdout=0.0), **options)

    ingester = of(url, tmp_path, keep=0)
    assert ingester.write(20) == (tmp_path / "topic-000000000000.parquet", 20)
    slow, quick, late = feed(), feed(), feed(skips=True)
    for each in (slow, quick, late):
        assert each.poll() is not None
    ingester.write(20)
    assert quick.poll() is not None
    ingester.write(20)
    assert [path.name for path in tmp_path.iterdir()] == ["topic-000000000002.parquet"]
    assert quick.poll() is not None
    with pytest.raises(DataError, match=r"1 files before .*2.parquet were removed before they were read: keep more"):
        slow.poll()
    with pytest.warns(UserWarning, match="were removed before they were read"):
        assert late.poll() is not None
    assert late.left_out == 1
    (tmp_path / "topic-000000000002.parquet").rename(tmp_path / "topic-000000000000.parquet")
    with pytest.raises(DataError, match=r"0.parquet is new, and later ones were read: its folder was begun anew"):
        quick.poll()


def test_files_of_several_topics_are_a_feed(brokers: Brokers, tmp_path: Path) -> None:
    """Each folder has numbers of its own."""
    spec = parse_spec(SPEC, "spec")
    feed = Feed(f"{tmp_path}/*/*.parquet", spec, lambda names, _: FileClickData(names, spec, holdout=0.0), most=3)
    for name in "ab":
        ingester = of(brokers.deliver(f"several-{name}", list(map(row, range(40)))), tmp_path / name)
        ingester.write(20)
        ingester.write(20)
    arrivals = [feed.poll(), feed.poll()]
    assert [each and each.rows.train_rows for each in arrivals] == [60, 20]
    assert feed.poll() is None


def test_a_name_that_is_not_listed_yet_is_waited_for(brokers: Brokers, tmp_path: Path) -> None:
    """A list of a folder may have a file, and lack the one before it that was renamed meanwhile."""
    spec = parse_spec(SPEC, "spec")
    feed = Feed(str(tmp_path), spec, lambda names, _: FileClickData(names, spec, holdout=0.0))
    ingester = of(brokers.deliver("listed", list(map(row, range(30)))), tmp_path)
    ingester.write(10)
    assert feed.poll() is not None
    ingester.write(10)
    ingester.write(10)
    names = files_of(str(tmp_path))
    with mock.patch("shardrec.trainer.data.feed.files_of", lambda *_, **__: [names[0], names[2]]):
        assert feed.poll() is None
    arrival = feed.poll()
    assert arrival is not None
    assert list(arrival.rows.paths) == names[1:]


def test_folders_that_are_refused(brokers: Brokers, tmp_path: Path) -> None:
    url = brokers.deliver("one", [row(1)])
    ingester = of(url, tmp_path)
    ingester.write()
    with pytest.raises(UnreachableError, match=r"another ingester writes to .*: end it, or give another folder"):
        of(url, tmp_path)
    ingester.close()
    with pytest.raises(DataError, match=r"0.parquet is of topic one, not of kafka://.*/other: give another folder"):
        of(brokers.deliver("other", []), tmp_path)
    file = tmp_path / "topic-000000000000.parquet"
    file.write_bytes(b"PAR1")
    with pytest.raises(DataError, match=r"0.parquet is damaged .*: copy it again; or remove it, and its records are"):
        of(url, tmp_path)
    with pytest.raises(DataError, match=r"Not a directory.*. Give a folder to write to"):
        of(url, file / "in")
    with pytest.raises(DataError, match=r"data files kafka://host/topic: .*Train on feed:kafka://host/topic, or write"):
        files_of("kafka://host/topic")


def test_records_that_are_gone_are_counted(brokers: Brokers, tmp_path: Path) -> None:
    """With those that are no rows, in the metadata of the next file."""
    url = brokers.deliver("gone", [row(0)], partition=0)
    ingester = of(url, tmp_path, skips=True)
    assert ingester.write() is not None
    brokers.deliver("gone", [b" " * 900_000] * 8, partition=0)  # more than the brokers keep
    with pytest.warns(UserWarning, match=r"gone: partition 0 lacks its records before offset \d+$"):
        assert ingester.write() is None
    brokers.deliver("gone", [row(1), b"{"], partition=0)
    written = ingester.write()
    assert written is not None
    left_out = left_out_of(str(written[0]))
    assert sum(left_out.values()) == 9
    assert {*left_out} == {"bad JSON object", "record that is gone"}
    assert left_out["bad JSON object"] >= 2


def test_an_ingester_needs_no_torch() -> None:
    program = "import sys, shardrec.trainer.data.ingest; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_what_may_come_later_is_another_error(brokers: Brokers, monkeypatch: pytest.MonkeyPatch) -> None:
    url = brokers.deliver("silent", list(map(row, range(3))), partition=0)
    with (
        monkeypatch.context() as patch,
        pytest.raises(
            UnreachableError,
            match=r"kafka://127.0.0.1:1/silent cannot be read \(.*Connection refused.*\): check that the",
        ),
    ):
        patch.setattr(kafka, "_REQUEST_S", 1.0)  # brokers that are there get longer
        Topic("kafka://127.0.0.1:1/silent").read({}, 9, skips=True)
    monkeypatch.setattr(kafka, "_SILENT_S", 0.3)
    topic = Topic(url)
    topic.read({}, 9, skips=False)
    with (
        mock.patch.object(topic, "_ends", lambda *_: {0: (0, 9)}),
        mock.patch.object(kafka, "_FIXED", {}),
        pytest.raises(UnreachableError, match=r"silent cannot be read \(no record comes of partitions \[0\]\): check"),
    ):
        topic._consumer = Scripted([])  # type: ignore[assignment]
        topic.read({}, 9, skips=False)
    with pytest.raises(DataError, match=r"silent-not cannot be read \(.*nknown topic.*\)") as refused:
        Topic(f"{url}-not").read({}, 9, skips=True)
    assert not isinstance(refused.value, UnreachableError)
    with pytest.raises(DataError, match=r"partition 0 lacks .*\(it has offsets 0 to 3, and 9 is the next .*made anew"):
        Topic(url).read({0: Place(9, "")}, 9, skips=True)


def test_a_topic_that_was_made_anew_is_noticed(brokers: Brokers) -> None:
    """With more records than were read."""
    url = brokers.deliver("anew", list(map(row, range(64))), partition=2)
    read = Topic(url).read({}, 99, skips=False)
    assert (len(read.records), read.lag) == (64, 0)
    others = Brokers()
    again = Topic(others.deliver("anew", list(map(row, range(100))), partition=2))
    with pytest.raises(DataError, match=r"/anew was made anew: partition 2 has another record at offset 63 than was"):
        again.read(read.places, 99, skips=False)
    assert len(again.read({2: Place(64, "")}, 99, skips=False).records) == 36  # of which the last record is not known
    brokers.deliver("anew", [row(64)], partition=2)
    assert [record.offset for record in Topic(url).read(read.places, 99, skips=False).records] == [64]


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
    features += "  - {name: tags, kind: weighted, rows: 9, weights: w}\n"
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
    made, spec = [], parse_spec(features, "spec")
    for place, url in enumerate(urls):
        ingested(url, tmp_path / str(place), features, skips=True)
        assert columns(tmp_path / str(place))["_offset"] == list(range(40))
        data = FileClickData(files_of(str(tmp_path / str(place))), spec, holdout=0.0)
        made.append([*data.train_batches(0, 1, 16)])
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
        ("format=avro&schema=FOLDER/pipe", "pipe is no schema of Avro .OSError: .*it is not a regular file"),
        ("format=protobuf&schema=FOLDER/pipe&message=a.B", "pipe is no descriptor set .*it is not a regular file"),
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

    def partition(self) -> int:
        return 0

    def offset(self) -> int:
        return abs(self._offset)

    def error(self) -> Any:
        from confluent_kafka import KafkaError

        return KafkaError(KafkaError._PARTITION_EOF) if self._offset < 0 else None

    def key(self) -> bytes:
        return b""

    def timestamp(self) -> tuple[int, int]:
        return 0, 7

    def value(self) -> bytes:
        return str(self._offset).encode()


@pytest.mark.parametrize(
    ("offsets", "records", "stop"),
    [
        ([3, 4, 7, -10], [4, 7], 10),
        ([4, 5, 12], [4, 5], 10),
        ([-10], [], 10),
        ([9], [9], 10),
        ([5, -8], [5], 8),  # of a transaction that has not ended
    ],
)
def test_offsets_without_records(offsets: list[int], records: list[int], stop: int) -> None:
    """The next round begins after them."""
    pytest.importorskip("confluent_kafka", reason="shardrec is installed without its extra kafka")
    topic = Topic("kafka://scripted:1/t")
    topic._consumer = Scripted(offsets)  # type: ignore[assignment]
    with mock.patch.object(topic, "_ends", lambda *_: {0: (0, 12)}):
        read = topic.read({0: Place(4, "")}, 6, skips=False)
    assert [record.offset for record in read.records] == records
    assert (read.places[0].offset, bool(read.places[0].last), read.lag) == (stop, 9 in records, 12 - stop)


def test_options_and_names(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match="is no topic: give kafka://HOST:PORT/TOPIC"):
        Topic("kafka://host/topic/more")
    pytest.importorskip("confluent_kafka", reason="shardrec is installed without its extra kafka")
    for options, words in (
        ('{"security.protocl": "ssl"}', 'No such configuration property: "security.protocl"'),
        ("3", "SHARDREC_KAFKA is no JSON object"),
        ("[]", "SHARDREC_KAFKA is no JSON object"),
        ('{"group.id": null}', "option 'group.id' is no text, number or boolean of librdkafka's: correct it"),
        ('{"error_cb": 3}', "option 'error_cb' is no text, number or boolean"),
    ):
        monkeypatch.setenv("SHARDREC_KAFKA", options)
        with pytest.raises(DataError, match=words):
            Topic("kafka://host:1/topic").read({}, 1, skips=False)

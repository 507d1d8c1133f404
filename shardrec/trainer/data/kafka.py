"""Records of a Kafka topic, each of them a row, by ranges of a partition's offsets.

A range is read as a file is, whose name is ``kafka://host:9092/clicks?partition=3&offsets=100-200`` (200 not included),
after the options of the topic's URL (:mod:`shardrec.trainer.data.records`). An offset without a record, as transactions
and compaction leave them, has a place among the rows and no row.

A topic that is deleted and made anew has other records at the same offsets, and brokers tell no client. So what was
read last of a partition ends with a mark of its last record, its time and checksum: ``&last=19ac3f0d1c2-8f3a90b1``.
"""

from __future__ import annotations

import os
import re
import warnings
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple
from zlib import crc32

from shardrec import DataError
from shardrec.files import UnreachableError, parse_json
from shardrec.trainer.data.fault import Reason, RowFault
from shardrec.trainer.data.records import decoder_of
from shardrec.trainer.data.request import table_of
from shardrec.trainer.data.spec import FeatureSpec

if TYPE_CHECKING:
    import pyarrow as pa
    from confluent_kafka import Consumer, KafkaError  # an extra

__all__ = ["Range", "check_last", "new_ranges", "range_of", "read_range"]

_MOST = 1 << 16
"""Offsets of a range."""

_OPTIONS = "SHARDREC_KAFKA"
_NAME = re.compile(
    r"(kafka://([^/?\s]+)/([\w.-]+)(?:\?((?!partition=)[^?\n]+?))?)"
    r"(?:[?&]partition=(\d+)&offsets=(\d+)-(\d+)(?:&last=([\w-]*))?)?"
)
_heard = deque[str](maxlen=2)
"""What a consumer said last of its brokers, such as that they refuse the password."""

_USUAL = {
    **{"group.id": "shardrec", "queued.max.messages.kbytes": 8192, "reconnect.backoff.ms": 1000},
    **{"log_level": 2, "error_cb": lambda error: _heard.append(error.str())},  # in place of lines on stderr
    **{"fetch.queue.backoff.ms": 50, "fetch.wait.max.ms": 50},  # a wait at a range's end would be that of the next
}
_REQUEST_S, _SILENT_S, _LOOK_S = 10.0, 60.0, 0.2
_ABSENT = RowFault(reason=Reason.ABSENT, where="there is no record", remedy="")
_GONE = RowFault(
    reason=Reason.DAMAGED,
    where="the record is gone",
    remedy="keep records for longer (retention.ms, retention.bytes)",
)
_REACH = (
    "check that the topic exists, that its brokers run, that this host reaches them by the names that they go by, and "
    f"the options in the environment variable {_OPTIONS}"
)
_KEEP = (
    "keep records for longer (retention.ms, retention.bytes); leave out those that are gone (--on-bad-row skip), or, "
    "if the topic was made anew, start a new run in another folder (--out)"
)
_idle: dict[str, list[Consumer]] = {}
"""Consumers that read nothing now, by their brokers: a new one takes threads and connections."""


class Range(NamedTuple):
    """Offsets ``[start, stop)`` of a partition; of a topic's name, the numbers are 0.

    Attributes:
        source: the name of the topic.
        options: what records are, for :func:`~shardrec.trainer.data.records.decoder_of`.
        last: the mark of the last record; "" if it is not known.
    """

    source: str
    brokers: str
    topic: str
    options: str
    partition: int
    start: int
    stop: int
    last: str


def range_of(path: str) -> Range:
    """The range of a name."""
    match = _NAME.fullmatch(path)
    if match is None:
        raise DataError(f"data (--data) is {path}, which is no topic: give feed:kafka://HOST:PORT/TOPIC")
    source, brokers, topic, options, *numbers, last = match.groups()
    partition, start, stop = (int(number or 0) for number in numbers)
    return Range(source, brokers, topic, options or "", partition, start, stop, last or "")


def new_ranges(source: str, before: Iterable[str], *, skips: bool) -> list[str]:
    """The names of the next ranges of a topic's partitions, at most one of each, with the marks of their last records.

    Args:
        source: the name of the topic.
        before: the last range of each partition that was read; one of which none was begins with its oldest record.
        skips: whether records that are gone have a range, of rows that cannot be read.

    Raises:
        DataError: if there is no such topic or offset.
        UnreachableError: for no answer.
    """
    from confluent_kafka import TopicPartition  # an extra

    starts = {read.partition: read.stop for read in map(range_of, before)}
    topic, ranges = range_of(source).topic, dict[int, str]()
    with _consumer(source) as consumer:
        about = consumer.list_topics(topic, timeout=_REQUEST_S).topics[topic]
        if about.error is not None:
            raise _fault(source, about.error)
        partitions = sorted({*about.partitions, *starts})
        lows, highs = (
            consumer.offsets_for_times([TopicPartition(topic, number, at) for number in partitions], timeout=_REQUEST_S)
            for at in (-2, -1)  # the oldest offset, and the end
        )
    for low, high in zip(lows, highs, strict=True):
        for error in filter(None, (low.error, high.error)):
            raise _fault(source, error)
        here = f"{source}{'&' if '?' in source else '?'}partition={low.partition}"
        start = starts.get(low.partition, low.offset)
        if start > high.offset or (start < low.offset and not skips):
            has = f"it has offsets {low.offset} to {high.offset}, and {start} is the next to read"
            raise DataError(f"{here} lacks records that were not trained on ({has}): {_KEEP}")
        stop = min(start + _MOST, low.offset if start < low.offset else high.offset)
        if start < stop:
            ranges[low.partition] = f"{here}&offsets={start}-{stop}"
    marks = _last_of(source, map(range_of, ranges.values()))
    return [f"{name}&last={marks.get(partition, '')}" for partition, name in ranges.items()]


def check_last(source: str, before: Iterable[str]) -> None:
    """Raise if a partition has another record than the last that was read of it.

    Args:
        source: the name of the topic.
        before: the last range of each partition that was read. One without a mark, or whose last record is gone, is not
            compared.

    Raises:
        DataError: for another record.
        UnreachableError: for no answer.
    """
    marked = [read for read in map(range_of, before) if read.last]
    marks = _last_of(source, marked)
    for read in marked:
        if marks.get(read.partition, read.last) != read.last:
            raise DataError(
                f"{source} was made anew: partition {read.partition} has another record at offset {read.stop - 1} than "
                "was read there; start a new run in another folder (--out), which may have the weights of this one "
                "(--init-from)"
            )


def _last_of(source: str, ranges: Iterable[Range]) -> dict[int, str]:
    """Marks of the last records of ranges, one of a partition, which another record would hardly have."""
    from confluent_kafka import TopicPartition  # an extra

    left = {each.partition: each.stop - 1 for each in ranges}
    marks, silent_s = dict[int, str](), 0.0
    with _consumer(source) as consumer:
        consumer.assign([TopicPartition(range_of(source).topic, *place) for place in left.items()])
        while left:
            messages = consumer.consume(len(left), timeout=_LOOK_S)
            silent_s = 0.0 if messages else silent_s + _LOOK_S
            if silent_s > _REQUEST_S:
                raise UnreachableError(f"{source} cannot be read (no record comes of partitions {[*left]}): {_REACH}")
            for message in messages:
                partition = message.partition()
                assert partition is not None, "it comes from one"
                offset = left.pop(partition, None)
                if message.error() is None and message.offset() == offset:
                    value = crc32(message.value() or b"", crc32(message.key() or b""))
                    marks[partition] = f"{max(0, message.timestamp()[1]):x}-{value:08x}"
    return marks


def read_range(
    path: str, spec: FeatureSpec, start: int, at_once: int
) -> Iterator[tuple[pa.Table, dict[int, RowFault]]]:
    """Tables of a range's records, without those of the first ``start`` offsets, and faults of the others by place.

    Args:
        path: the name of the range.
        spec: of :func:`~shardrec.trainer.data.request.named_spec`.
        start: offsets to leave out.
        at_once: offsets of a table, at most, but for records that are gone, which are faults.

    Raises:
        DataError: for offsets after the end of the partition, which was made anew.
        UnreachableError: for those that do not come.
    """
    from confluent_kafka import KafkaError, TopicPartition  # an extra

    _, _, topic, options, partition, at, stop, _ = range_of(path)
    decode, at, silent_s = decoder_of(options), at + start, 0.0
    with _consumer(path) as consumer:
        consumer.assign([TopicPartition(topic, partition, at)])
        while at < stop:
            messages = consumer.consume(min(at_once, stop - at), timeout=_LOOK_S)
            silent_s = 0.0 if messages else silent_s + _LOOK_S
            if silent_s > _SILENT_S:
                raise UnreachableError(f"{path} cannot be read (offset {at} has not come in {_SILENT_S:g} s): {_REACH}")
            rows: list[object] = []
            for message in messages:
                error = message.error()
                if error is not None and error.code() != KafkaError._PARTITION_EOF:
                    oldest = 0
                    if _is_gone(error):
                        (low,) = consumer.offsets_for_times([TopicPartition(topic, partition, -2)], timeout=_REQUEST_S)
                        oldest = low.offset
                    if oldest <= at + len(rows):
                        raise _fault(path, error)
                    warnings.warn(f"{path} lacks its records before offset {oldest}", stacklevel=2)
                    rows += [_GONE] * (min(oldest, stop) - at - len(rows))
                    consumer.assign([TopicPartition(topic, partition, oldest)])
                    break
                offset = message.offset()
                assert offset is not None, "also the end of a partition has one"
                place = min(offset, stop) - at
                rows += [_ABSENT] * (place - len(rows))
                if error is None and len(rows) == place < stop - at:
                    rows.append(decode(message.value() or b""))
            if rows:
                yield table_of(rows, spec, labelled=True)
                at += len(rows)


@contextmanager
def _consumer(path: str) -> Iterator[Consumer]:
    """A consumer, of which errors are those of reading ``path``."""
    from confluent_kafka import Consumer, KafkaException  # an extra

    brokers, consumer = range_of(path).brokers, None
    idle = _idle.setdefault(brokers, [])
    try:
        try:
            consumer = idle.pop()
        except IndexError:  # no other thread has put one back
            fixed = {"bootstrap.servers": brokers, "enable.auto.commit": False, "enable.partition.eof": True}
            consumer = Consumer({**_USUAL, **_options(), **fixed, "auto.offset.reset": "error"})
        consumer.poll(0)  # the callbacks that wait
        _heard.clear()
        yield consumer
    except KafkaException as error:
        if consumer is not None:
            consumer.poll(0)
        raise _fault(path, error.args[0]) from error
    finally:
        if consumer is not None:
            consumer.unassign()
            idle.append(consumer)


def _options() -> dict[str, str | int | float]:
    """Options of librdkafka, such as those of TLS and SASL."""
    try:
        options = parse_json(os.environ.get(_OPTIONS, "{}"))
    except ValueError as error:
        raise DataError(f"{_OPTIONS} is no JSON object of librdkafka's options ({error}): correct it") from error
    if not isinstance(options, dict):
        raise DataError(f"{_OPTIONS} is no JSON object of librdkafka's options: correct it")
    for name, value in options.items():  # the client ends the process for some others
        if not isinstance(value, str | int | float) or name.endswith("_cb"):
            raise DataError(f"{_OPTIONS}: option {name!r} is no text, number or boolean of librdkafka's: correct it")
    return options


def _is_gone(error: KafkaError) -> bool:
    """Whether a partition has no such offset."""
    from confluent_kafka import KafkaError  # an extra

    return error.code() in (KafkaError._AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE)


def _fault(path: str, error: KafkaError) -> DataError:
    from confluent_kafka import KafkaError  # an extra

    if _is_gone(error):
        return DataError(f"{path} lacks records that were not trained on ({error.str()}): {_KEEP}")
    refused = "UNKNOWN_TOPIC_OR_PART _UNKNOWN_PARTITION TOPIC_EXCEPTION TOPIC_AUTHORIZATION_FAILED _INVALID_ARG"
    kind = DataError if error.code() in (getattr(KafkaError, name) for name in refused.split()) else UnreachableError
    return kind(f"{path} cannot be read ({'; '.join([error.str(), *_heard])}): {_REACH}")

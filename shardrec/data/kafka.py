"""Records of a Kafka topic, each of them a row as a JSON object, by ranges of a partition's offsets.

A range is read as a file is, whose name is ``kafka://host:9092/clicks?partition=3&offsets=100-200`` (200 not included).
An offset without a record, as transactions and compaction leave them, has a place among the rows and no row.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardrec._versions import check_extra
from shardrec.data.fault import Reason, RowFault
from shardrec.data.request import table_of
from shardrec.data.spec import FeatureSpec
from shardrec.data.urls import UnreachableError
from shardrec.errors import DataError
from shardrec.files import parse_json

__all__ = ["OffsetRange", "new_ranges", "range_of", "read_range"]

_MOST = 1 << 16
"""Offsets of a range."""

_OPTIONS = "SHARDREC_KAFKA"
_NAME = re.compile(r"kafka://([^/?\s]+)/([\w.-]+)(?:\?partition=(\d+)&offsets=(\d+)-(\d+))?")
_REQUEST_S, _SILENT_S, _LOOK_S = 10.0, 60.0, 0.2
_ABSENT = RowFault(reason=Reason.ABSENT, where="there is no record", remedy="")
_REACH = (
    "check that the topic exists, that its brokers run, that this host reaches them by the names that they go by, and "
    f"the options in the file that the environment variable {_OPTIONS} names"
)
_KEEP = (
    "keep records for longer (retention.ms, retention.bytes); leave out those that are gone (--on-bad-row skip), or, "
    "if the topic was made anew, start a new run in another folder (--out)"
)
_idle: dict[str, list[Any]] = {}
"""Consumers that read nothing now, by their brokers: a new one takes threads and connections."""


@dataclass(frozen=True, kw_only=True)
class OffsetRange:
    """Offsets ``start`` to ``stop`` (not included) of a partition."""

    partition: int
    start: int
    stop: int


def range_of(path: str) -> OffsetRange | None:
    """The range of this name; None for the name of a whole topic.

    Raises:
        DataError: if it is neither.
    """
    _, _, *numbers = _parts(path)
    if numbers[0] is None:
        return None
    partition, start, stop = map(int, numbers)
    return OffsetRange(partition=partition, start=start, stop=stop)


def new_ranges(source: str, before: Iterable[str], *, skips: bool) -> list[str]:
    """The names of the next ranges of a topic's partitions, at most one of each.

    Args:
        source: the name of the topic.
        before: the last range of each partition that was read; one of which none was begins with its oldest record.
        skips: whether records that are gone have a range, of rows that cannot be read.

    Raises:
        DataError: if there is no such topic or offset.
        UnreachableError: for no answer.
    """
    from confluent_kafka import TopicPartition  # an extra

    starts = {known.partition: known.stop for known in map(range_of, before) if known is not None}
    topic, ranges = _parts(source)[1], []
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
        here, start = f"{source}?partition={low.partition}", starts.get(low.partition, low.offset)
        if start > high.offset or (start < low.offset and not skips):
            has = f"it has offsets {low.offset} to {high.offset}, and {start} is the next to read"
            raise DataError(f"{here} lacks records that were not trained on ({has}): {_KEEP}")
        stop = min(start + _MOST, low.offset if start < low.offset else high.offset)
        if start < stop:
            ranges.append(f"{here}&offsets={start}-{stop}")
    return ranges


def read_range(path: str, spec: FeatureSpec, start: int, at_once: int) -> Iterator[tuple[Any, dict[int, RowFault]]]:
    """Tables of a range's records, without those of the first ``start`` offsets, and faults of the others by place.

    Args:
        path: the name of the range.
        spec: of :func:`~shardrec.data.request.named_spec`.
        start: offsets to leave out.
        at_once: offsets of a table, at most.

    Raises:
        DataError: for records that are gone.
        UnreachableError: for those that do not come.
    """
    from confluent_kafka import KafkaError, TopicPartition  # an extra

    topic, offsets, silent_s = _parts(path)[1], range_of(path), 0.0
    assert offsets is not None, "a range is read"
    at, stop = offsets.start + start, offsets.stop
    with _consumer(path) as consumer:
        consumer.assign([TopicPartition(topic, offsets.partition, at)])
        while at < stop:
            messages = consumer.consume(min(at_once, stop - at), timeout=_LOOK_S)
            silent_s = 0.0 if messages else silent_s + _LOOK_S
            if silent_s > _SILENT_S:
                raise UnreachableError(f"{path} cannot be read (offset {at} has not come in {_SILENT_S:g} s): {_REACH}")
            rows: list[Any] = []
            for message in messages:
                error, place = message.error(), min(message.offset(), stop) - at
                if error is not None and error.code() != KafkaError._PARTITION_EOF:
                    raise _fault(path, error)
                rows += [_ABSENT] * (place - len(rows))
                if error is None and len(rows) == place < stop - at:
                    rows.append(_row(message.value()))
            if rows:
                yield table_of(rows, spec, labelled=True)
                at += len(rows)


def _row(value: bytes | None) -> Any:
    """What a record says, or else its bytes."""
    try:
        return parse_json(value or b"")
    except ValueError:
        return value


def _parts(path: str) -> tuple[str, ...]:
    """Brokers, topic, partition, first offset and end; of a topic's name the last three are None."""
    match = _NAME.fullmatch(path)
    if match is None:
        raise DataError(f"data (--data) is {path}, which is no topic: give feed:kafka://HOST:PORT/TOPIC")
    return match.groups()


@contextmanager
def _consumer(path: str) -> Iterator[Any]:
    """A consumer, of which errors are those of reading ``path``."""
    check_extra("kafka")
    from confluent_kafka import Consumer, KafkaException  # an extra

    brokers = _parts(path)[0]
    idle, consumer = _idle.setdefault(brokers, []), None
    try:
        try:
            consumer = idle.pop()
        except IndexError:
            usual = {"group.id": "shardrec", "queued.max.messages.kbytes": 8192, "fetch.queue.backoff.ms": 50}
            usual["fetch.wait.max.ms"] = 50  # a range is there: a longer wait at its end would be that of the next
            fixed = {"bootstrap.servers": brokers, "enable.auto.commit": False, "enable.partition.eof": True}
            consumer = Consumer({**usual, **_options(), **fixed, "auto.offset.reset": "error"})
        yield consumer
    except KafkaException as error:
        raise _fault(path, error.args[0]) from error
    finally:
        if consumer is not None:
            consumer.unassign()
            idle.append(consumer)


def _options() -> dict[str, str]:
    """Options of librdkafka, such as those of TLS and SASL: lines ``name=value`` of a file."""
    path = os.environ.get(_OPTIONS, os.devnull)
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise DataError(f"{_OPTIONS} is {path!r}, which cannot be read ({error}): give a file of options") from error
    pairs = (line.partition("=") for line in lines if line.strip() and not line.startswith("#"))
    return {name.strip(): value.strip() for name, _, value in pairs}


def _fault(path: str, error: Any) -> DataError:
    from confluent_kafka import KafkaError  # an extra

    if error.code() in (KafkaError._AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE):
        return DataError(f"{path} lacks records that were not trained on ({error.str()}): {_KEEP}")
    refused = ("UNKNOWN_TOPIC_OR_PART", "_UNKNOWN_TOPIC", "_UNKNOWN_PARTITION", "TOPIC_EXCEPTION", "_INVALID_ARG")
    is_refused = error.code() in (getattr(KafkaError, name) for name in (*refused, "TOPIC_AUTHORIZATION_FAILED"))
    return (DataError if is_refused else UnreachableError)(f"{path} cannot be read ({error.str()}): {_REACH}")

"""Rounds of a Kafka topic: the records that its partitions have had since the last round, and how far that is.

A topic that is deleted and made anew has other records at the same offsets, and brokers tell no client. So the place
in a partition has a mark of the record before it, its time and checksum, and a round reads that record again.
"""

from __future__ import annotations

import os
import re
import warnings
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple
from zlib import crc32

from shardrec import DataError
from shardrec.files import UnreachableError, parse_json

if TYPE_CHECKING:
    from confluent_kafka import Consumer, KafkaError, Message  # an extra

_ROUND_BYTES = 64 << 20
"""Values of a round, but for those of the last message that was asked for."""

_OPTIONS = "SHARDREC_KAFKA"
_URL = re.compile(r"kafka://([^/?\s]+)/([\w.-]+)(?:\?([^?\n]+))?")
_USUAL = {
    **{"group.id": "shardrec", "queued.max.messages.kbytes": 8192, "reconnect.backoff.ms": 1000, "log_level": 2},
    **{"fetch.queue.backoff.ms": 50, "fetch.wait.max.ms": 50},  # a wait at a round's end would be that of the next
}
_FIXED = {"enable.auto.commit": False, "enable.partition.eof": True, "auto.offset.reset": "error"}
_REQUEST_S, _SILENT_S, _LOOK_S = 10.0, 60.0, 0.2
_AT_ONCE = 1000
_REACH = (
    "check that the topic exists, that its brokers run, that this host reaches them by the names that they go by, and "
    f"the options in the environment variable {_OPTIONS}"
)
_ANEW = (
    "begin in another folder. A run that follows it begins anew, too (--out), and may have the weights of the old one "
    "(--init-from)"
)
_KEEP = (
    "keep records for longer (retention.ms, retention.bytes). Leave out those that are gone (--on-bad-row skip); or, "
    f"if the topic was made anew, {_ANEW}"
)


class Place(NamedTuple):
    """Where the next round begins in a partition.

    Attributes:
        offset: of the next record.
        last: the mark of the record before it; "" if it is not known.
    """

    offset: int
    last: str


class Record(NamedTuple):
    """A record's value, and where the record is."""

    partition: int
    offset: int
    value: bytes


class Round(NamedTuple):
    """What a topic has had since the last round.

    Attributes:
        records: the partitions side by side, each in its order.
        places: of each partition, where the next round begins.
        gone: records that were removed from the topic before they were read.
        lag: offsets that the topic has for later rounds.
    """

    records: list[Record]
    places: dict[int, Place]
    gone: int
    lag: int


@dataclass(eq=False)
class _Range:
    """Offsets ``[start, stop)`` of a partition, of which those before ``end`` were read, and the mark of the last."""

    partition: int
    start: int
    stop: int
    end: int
    mark: str


class Topic:
    """A topic, and a consumer of it, which commits nothing.

    Args:
        url: ``kafka://HOST:PORT[,HOST:PORT...]/TOPIC``, which may end with ``?OPTIONS``.

    Attributes:
        name: of the topic.
        options: what records are, for :func:`~shardrec.trainer.data.records.decoder_of`.

    Raises:
        DataError: for another URL.
    """

    def __init__(self, url: str) -> None:
        match = _URL.fullmatch(url)
        if match is None:
            raise DataError(f"{url} is no topic: give kafka://HOST:PORT/TOPIC")
        self._url, (self._brokers, self.name, options) = url, match.groups()
        self.options: str = options or ""
        self._consumer: Consumer | None = None
        self._heard = deque[str](maxlen=2)  # what was said last of brokers, such as that they refuse the password

    def read(self, places: Mapping[int, Place], most: int, *, skips: bool) -> Round:
        """Read at most ``most`` records, as many of each partition that has new ones.

        Args:
            places: where partitions go on. Others begin with their oldest record.
            most: number of records.
            skips: whether records that are gone are counted, in place of an error.

        Raises:
            DataError: if there is no such topic, or its records are not those that follow the places.
            UnreachableError: for no answer.
        """
        from confluent_kafka import Consumer, KafkaException  # an extra

        try:
            if self._consumer is None:
                heard = {"error_cb": lambda error: self._heard.append(error.str())}  # in place of lines on stderr
                brokers = {"bootstrap.servers": self._brokers}
                self._consumer = Consumer({**_USUAL, **_options(), **heard, **brokers, **_FIXED})
            self._consumer.poll(0)  # the callbacks that wait
            self._heard.clear()
            return self._round(self._consumer, places, most, skips=skips)
        except KafkaException as error:
            if self._consumer is not None:
                self._consumer.poll(0)
            raise self._fault(error.args[0]) from error

    def _round(self, consumer: Consumer, places: Mapping[int, Place], most: int, *, skips: bool) -> Round:
        ranges, gone = list[_Range](), 0
        for partition, (low, high) in self._ends(consumer, places).items():
            place = places.get(partition, Place(low, ""))
            if place.offset > high or (place.offset < low and not skips):
                raise DataError(
                    f"{self._url}: partition {partition} lacks records that were not read (it has offsets {low} to "
                    f"{high}, and {place.offset} is the next to read): {_KEEP}"
                )
            if place.offset < low:
                warnings.warn(f"{self._url}: partition {partition} lacks its records before offset {low}", stacklevel=2)
                gone, place = gone + low - place.offset, Place(low, "")
            if place.offset < high:
                ranges.append(_Range(partition, place.offset, high, place.offset, place.last))
        new = sum(each.stop - each.start for each in ranges)
        for each in ranges:
            each.stop = min(each.stop, each.start + max(1, most // len(ranges)))
        records = self._consumed(consumer, {each.partition: each for each in ranges})
        after = {each.partition: Place(each.stop, each.mark if each.end == each.stop else "") for each in ranges}
        return Round(records, {**places, **after}, gone, new - sum(each.stop - each.start for each in ranges))

    def _ends(self, consumer: Consumer, places: Mapping[int, Place]) -> dict[int, tuple[int, int]]:
        """The oldest offset of each partition, and the offset after its last."""
        from confluent_kafka import TopicPartition  # an extra

        about = consumer.list_topics(self.name, timeout=_REQUEST_S).topics[self.name]
        if about.error is not None:
            raise self._fault(about.error)
        partitions = sorted({*about.partitions, *places})
        lows, highs = (
            consumer.offsets_for_times([TopicPartition(self.name, number, at) for number in partitions], _REQUEST_S)
            for at in (-2, -1)  # the oldest, and the end
        )
        for error in filter(None, (end.error for end in (*lows, *highs))):
            raise self._fault(error)
        return {low.partition: (low.offset, high.offset) for low, high in zip(lows, highs, strict=True)}

    def _consumed(self, consumer: Consumer, ranges: dict[int, _Range]) -> list[Record]:
        """The records of the ranges, which end where they do not go on yet, or where there are enough bytes."""
        from confluent_kafka import KafkaError, TopicPartition  # an extra

        left, records, size, silent_s = dict(ranges), list[Record](), 0, 0.0
        begins = ((number, each.start - bool(each.mark)) for number, each in ranges.items())
        consumer.assign([TopicPartition(self.name, *place) for place in begins])
        while left and size < _ROUND_BYTES:
            most = sum(each.stop - each.end for each in left.values())
            messages = consumer.consume(min(_AT_ONCE, most), timeout=_LOOK_S)  # which waits for as many
            silent_s = 0.0 if messages else silent_s + _LOOK_S
            if silent_s > _SILENT_S:
                raise UnreachableError(
                    f"{self._url} cannot be read (no record comes of partitions {[*left]}): {_REACH}"
                )
            for message in messages:
                error, partition, offset = message.error(), message.partition(), message.offset()
                if error is not None and error.code() != KafkaError._PARTITION_EOF:
                    raise self._fault(error)
                assert partition is not None and offset is not None, "a record and the end of a partition have both"
                each = ranges[partition]
                if partition not in left:
                    continue
                if error is not None:
                    each.stop = max(each.end, min(each.stop, offset))
                elif each.start <= offset < each.stop:
                    value = message.value() or b""
                    records.append(Record(partition, offset, value))
                    size, each.end, each.mark = size + len(value), offset + 1, _mark(message)
                elif offset == each.start - 1 and each.mark not in ("", _mark(message)):
                    raise DataError(
                        f"{self._url} was made anew: partition {partition} has another record at offset {offset} than "
                        f"was read there; {_ANEW}"
                    )
                if offset >= each.stop - (error is None):
                    del left[partition]
        consumer.unassign()
        for each in left.values():
            each.stop = each.end
        return sorted(records, key=lambda record: (record.offset - ranges[record.partition].start, record.partition))

    def _fault(self, error: KafkaError) -> DataError:
        from confluent_kafka import KafkaError  # an extra

        refused = "UNKNOWN_TOPIC_OR_PART _UNKNOWN_PARTITION TOPIC_EXCEPTION TOPIC_AUTHORIZATION_FAILED _INVALID_ARG"
        is_refused = error.code() in (getattr(KafkaError, name) for name in refused.split())
        kind = DataError if is_refused else UnreachableError  # also for a record that is gone: the next round tells
        return kind(f"{self._url} cannot be read ({'; '.join([error.str(), *self._heard])}): {_REACH}")


def _mark(message: Message) -> str:
    """Time and checksum of a record, which another one would hardly have."""
    value = crc32(message.value() or b"", crc32(message.key() or b""))
    return f"{max(0, message.timestamp()[1]):x}-{value:08x}"


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

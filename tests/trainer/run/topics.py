"""Topics of librdkafka's own mock brokers, and runs that follow them without a further process."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from shardrec.trainer.data.ingest import ROUND, Ingester
from shardrec.trainer.data.spec import FeatureSpec
from shardrec.trainer.run import TrainConfig
from tests.trainer.run.fed import trained

__all__ = ["PARTITIONS", "Brokers", "Restarted", "trained_on_topic"]

PARTITIONS = 4
"""Of a topic that the brokers make when a producer names it."""


class Brokers:
    """Mock brokers in this process, which others reach by TCP, and a producer."""

    def __init__(self) -> None:
        from confluent_kafka import Producer  # an extra

        self._producer = Producer({"test.mock.num.brokers": 2, "linger.ms": 0, "log_level": 0})
        self.address = ",".join(
            f"{broker.host}:{broker.port}" for broker in self._producer.list_topics(timeout=20).brokers.values()
        )

    def deliver(self, topic: str, rows: Sequence[Any], partition: int | None = None) -> str:
        """Records of rows, or of bytes, in turn to the partitions or all to one; returns the URL of the topic."""
        self._producer.list_topics(topic, timeout=20)  # which makes it
        for place, row in enumerate(rows):
            value = row if row is None or isinstance(row, bytes) else json.dumps(row).encode()
            self._producer.produce(topic, value, partition=place % PARTITIONS if partition is None else partition)
        assert self._producer.flush(20) == 0, "the records were not delivered"
        return f"kafka://{self.address}/{topic}"


class Restarted:
    """In place of the ingester's process: an ingester of this one, which begins again for each file."""

    def __init__(self, url: str, spec: FeatureSpec, folder: Path, *, skips: bool, most: int = ROUND) -> None:
        self._ingester, self._skips, self._most = (url, spec, folder), skips, most
        self._is_asked, self.lag, self.left_out = False, 0, Counter[str]()

    def ask(self) -> None:
        self._is_asked = True

    def wait(self) -> None:
        if self._is_asked:
            self._is_asked = False
            ingester = Ingester(*self._ingester, skips=self._skips)
            try:
                ingester.write(self._most)
                self.lag, self.left_out = ingester.lag, ingester.left_out
            finally:
                ingester.close()


def trained_on_topic(config: TrainConfig, *, most: int = ROUND, **how: Any) -> dict[int, list[int]]:
    """:func:`trained`, with at most so many records in a file."""
    made = mock.Mock(side_effect=lambda *args, skips: Restarted(*args, skips=skips, most=most))
    with mock.patch("shardrec.trainer.run.source.IngestProcess", made):
        return trained(config, **how)

"""Topics of librdkafka's own mock brokers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

__all__ = ["PARTITIONS", "Brokers"]

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

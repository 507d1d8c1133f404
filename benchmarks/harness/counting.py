"""Collectives that count what they send."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from shardrec.exchange.collectives import Collectives, Pending, StreamSizes

__all__ = ["CountingCollectives", "Sent"]


@dataclass(frozen=True, kw_only=True)
class Sent:
    """What one rank sent.

    Args:
        bytes: per exchange, by the word that it goes by ("header", "payload", ...), bytes to each rank; 0 to itself.
        calls: per exchange, the number of all-to-alls.
    """

    bytes: dict[str, list[int]] = field(default_factory=dict)
    calls: Counter[str] = field(default_factory=Counter)


class CountingCollectives(Collectives):
    """Counts the bytes that other collectives send, and lets them do the work.

    What a rank keeps for itself does not count. Nothing is read from a device.

    Args:
        collectives: of the group.
    """

    def __init__(self, collectives: Collectives) -> None:
        self.rank = collectives.rank
        self.world_size = collectives.world_size
        self._collectives = collectives
        self._sent = Sent()

    def send(
        self, parts: Sequence[Sequence[Tensor]], receive: Sequence[int], what: str, streams: StreamSizes | None = None
    ) -> Pending:
        counts = self._sent.bytes.setdefault(what, [0] * self.world_size)
        for target, of_rank in enumerate(parts):
            if target != self.rank:
                counts[target] += sum(part.nbytes for part in of_rank)
        self._sent.calls[what] += 1
        # Without the streams their gradients come back by a send of their own, which counts, too.
        return self._collectives.send(parts, receive, what)

    def take(self) -> Sent:
        """What was sent since the last call."""
        sent, self._sent = self._sent, Sent()
        return sent

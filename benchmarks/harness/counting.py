"""Collectives that count what they send."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from shardrec.exchange.collectives import Collectives

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

    def all_to_all(self, values: Tensor, receive: Sequence[int], send: Sequence[int], what: str) -> Tensor:
        row_bytes = values.element_size() * values.shape[1:].numel()
        counts = self._sent.bytes.setdefault(what, [0] * self.world_size)
        for target, rows in enumerate(send):
            if target != self.rank:
                counts[target] += rows * row_bytes
        self._sent.calls[what] += 1
        return self._collectives.all_to_all(values, receive, send, what)

    def wait(self, pending: Tensor, what: str) -> Tensor:
        return self._collectives.wait(pending, what)

    def take(self) -> Sent:
        """What was sent since the last call."""
        sent, self._sent = self._sent, Sent()
        return sent

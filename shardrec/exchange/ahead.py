"""Calls of a forward that has not begun: their ids travel while the batch before is computed.

::

    ahead = Ahead(queue, calls)     the batches are checked and cut; no other rank, no host sync
    ahead.exchange()                header, which all ranks wait for; the payload is on its way
    module(features)                in the forward: the call is there already, its rows are looked up
    ahead.close()                   what was not called after all is let go

An id exchange reads no weights, so that it may come before the last update; rows are looked up in the forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from shardrec.exchange.joint import begin_exchange

if TYPE_CHECKING:
    from shardrec.exchange.queue import Call, ExchangeQueue, QueuedCall

__all__ = ["Ahead", "Caller"]


class Caller(Protocol):
    """A sharded module."""

    def new_call(self, features: object) -> Call:
        """A call with these features, which it checks and cuts."""


class Ahead:
    """The calls of one coming forward, in the order in which it will make them.

    Args:
        queue: of the model.
        calls: each module with its features.
    """

    def __init__(self, queue: ExchangeQueue, calls: Sequence[tuple[Caller, object]]) -> None:
        self._queue = queue
        self._sources = list(calls)
        self.queued = [queue.new_call(module, features) for module, features in calls]
        self._taken: set[int] = set()
        queue.ahead.append(self)

    def take(self, module: Caller, features: object) -> QueuedCall | None:
        """The call of a module with these very features, once."""
        for number, (known_module, known_features) in enumerate(self._sources):
            if known_module is module and known_features is features and number not in self._taken:
                self._taken.add(number)
                return self.queued[number]
        return None

    @property
    def is_used_up(self) -> bool:
        """Whether the forward has made all of the calls."""
        return len(self._taken) == len(self.queued)

    def exchange(self) -> None:
        """Exchange the headers and let the payloads go.

        Raises:
            InputError: on every rank, if a batch of any is faulty.
            PeerError: if another rank is gone.
        """
        for calls in self._queue.fitting(self.queued):
            exchange = begin_exchange(self._queue.context, [(one.call.input, one.call.prepared) for one in calls])
            for number, one in enumerate(calls):
                one.arriving = (exchange, number)

    def close(self) -> None:
        """Let go of what the forward did not call."""
        if self in self._queue.ahead:
            self._queue.ahead.remove(self)
        for number, one in enumerate(self.queued):
            if number not in self._taken and one.arriving is not None:
                one.arriving[0].finish()

"""Calls made ahead of their forward: their ids travel while the previous batch is computed.

::

    ahead = Ahead(headers, calls)   the batches are checked and cut; needs no other rank
    ahead.exchange()                header, which all ranks wait for; the payload is on its way
    ahead.prefetch()                rows of tables behind a cache are loaded, when the ids are there
    module(features)                in the forward: takes the prepared call, only its rows are exchanged
    ahead.close()                   drops the calls that the forward did not make

An id exchange reads no weights, so it may come before the last update; rows are looked up in the forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from shardrec.errors import ShardrecError
from shardrec.exchange.headers import Headers
from shardrec.exchange.step import Call, Caller, exchange_ids, split_by_compatibility

__all__ = ["Ahead"]


class Ahead:
    """The calls of the next forward, in the order in which it will make them.

    Args:
        headers: of the model.
        calls: each module with its features; as an attribute, the :class:`Call` of each.
    """

    def __init__(self, headers: Headers, calls: Sequence[tuple[Caller, object]]) -> None:
        self._headers, self._plans = headers, headers.plans
        self.calls = [module.new_call(features) for module, features in calls]
        self._left = [(*source, call) for source, call in zip(calls, self.calls, strict=True)]

    def take(self, module: Caller, features: object) -> Call | None:
        """The prepared call of a module with this features object, at most once; else None."""
        for place, (known_module, known_features, call) in enumerate(self._left):
            if known_module is module and known_features is features:
                del self._left[place]
                return call
        return None

    @property
    def is_used_up(self) -> bool:
        """Whether the forward has made all of the calls."""
        return not self._left

    @property
    def is_stale(self) -> bool:
        """Whether the modules have another plan since."""
        return self._plans != self._headers.plans

    def exchange(self) -> None:
        """Exchange the headers and let the payloads go.

        Raises:
            InputError: on every rank, if a batch of any is faulty.
            PeerError: if another rank is gone.
        """
        # Without a call, too: another rank may have some.
        for calls in split_by_compatibility(self._headers, self.calls) or [[]]:
            exchange_ids(self._headers, calls)

    def find_rows(self) -> None:
        """On a GPU: begin what a lookup does without the tables, on the current stream."""
        for call in self.calls:
            call.find_rows()

    def prefetch(self) -> None:
        """Load rows into the caches of tables that have one; the ids have to be under way."""
        for module, _, call in self._left:
            if module.id_maps is None:  # which give ids their rows in the forward
                module.shards.prefetch(call.received)

    def arrived(self) -> list[Any]:
        """The calls' records of tensors; waits for the ids that were exchanged."""
        return [
            (call.prepared, call.sent, call.found_rows, None if call.sent is None else call.received())
            for call in self.calls
        ]

    def close(self) -> None:
        """Drop the calls that the forward did not make."""
        for _, _, call in self._left:
            if call.is_launched:
                with suppress(ShardrecError):  # whose cause the next exchange meets, too
                    call.value()
            elif call.sent is not None:
                call.received()

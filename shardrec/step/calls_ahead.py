"""Calls made ahead of their forward: their ids travel while the previous batch is computed.

::

    ahead = Ahead(headers, calls)   calls with checked and cut batches. Needs no other rank
    ahead.exchange()                header, which all ranks wait for; the payload is on its way
    ahead.prefetch()                rows of tables behind a cache are loaded, when the ids are there
    module(features)                in the forward: takes the prepared call, only its rows are exchanged
    ahead.close()                   drops the calls that the forward did not make

An id exchange reads no weights, so it may come before the last update. Rows are looked up in the forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from shardrec.errors import ConfigError, ShardrecError
from shardrec.exchange.headers import Headers
from shardrec.step.exchange import finish
from shardrec.step.id_exchange import exchange_ids, split_by_compatibility
from shardrec.step.records import GradMode, InFlight


class Ahead:
    """The calls of the next forward, in the order in which it will make them.

    Args:
        headers: of the model.
        calls: each module with its features and its call, which was begun; as an attribute, the calls.
    """

    def __init__(self, headers: Headers, calls: Sequence[tuple[object, object, InFlight]]) -> None:
        self._headers, self._plans = headers, headers.plans
        self._left = list(calls)
        self._in_other_mode: list[InFlight] = []
        self.calls = [call for _, _, call in self._left]

    def take(self, module: object, features: object, *, assigns_new_ids: bool) -> InFlight | None:
        """The call of a module with this features object, in these modes, at most once. Otherwise None."""
        mode = GradMode.current(), assigns_new_ids
        for place, (known_module, known_features, call) in enumerate(self._left):
            if known_module is module and known_features is features:
                if (call.mode, call.assigns_new_ids) == mode:
                    del self._left[place]
                    return call
                self._in_other_mode.append(call)
        return None

    def refuse_other_modes(self) -> None:
        """Raise if a call's rows were looked up early, and the forward has made it in another mode only.

        Raises:
            ConfigError: on every rank, before the backward.
        """
        for module, _, call in self._left:
            if call in self._in_other_mode and call.is_launched and (call.mode.gradients or call.assigns_new_ids):
                tables = ", ".join(repr(name) for name in {name: None for _, name, _ in call.input.expect.tables})
                raise ConfigError(
                    f"{type(module).__name__} of tables {tables} is called in another mode (torch.no_grad, "
                    "torch.inference_mode, eval()) than in the steps before, for which TrainPipeline has looked up its "
                    "rows: call it in one mode, or give TrainPipeline depth=0"
                )

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
        # Also without a call: another rank may have calls.
        for calls in split_by_compatibility(self._headers, self.calls) or [[]]:
            exchange_ids(self._headers, calls)

    def find_rows(self) -> None:
        """On a GPU: begin to map dynamic ids, behind the computation of the previous batch, on the current stream."""
        for call in self.calls:
            if call.step.id_maps is not None and call.assigns_new_ids:
                call.found_rows = call.step.id_maps.find_rows(call.wait_for_ids())

    def prefetch(self) -> None:
        """Load rows into the caches of tables that have one. The ids have to be under way."""
        for call in self.calls:
            if call.step.id_maps is None:  # which give ids their rows in the forward
                call.step.lookup.prefetch(call.wait_for_ids)

    def arrived(self) -> list[Any]:
        """The calls' tensors. Waits for the ids that were exchanged."""
        return [
            (
                (call.batch, call.given, call.to_send, call.cut, call.lengths, call.distinct_index, call.bad_ids),
                (call.full, call.parts, call.slot_ids, call.positions, call.found_rows),
                call.wait_for_ids() if call.is_sent else None,
            )
            for call in self.calls
        ]

    def close(self) -> None:
        """Drop the calls that the forward did not make."""
        for _, _, call in self._left:
            if call.is_launched:
                with suppress(ShardrecError):  # the next exchange meets the same cause
                    finish(call)
            elif call.is_sent:
                call.wait_for_ids()

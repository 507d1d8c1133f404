"""Count the collectives of a step, whoever asks for them.

Functional collectives (eager, scripted or compiled), ``torch.distributed`` calls and DDP's reducer all end in operators
of the ``c10d`` namespace, one for each collective asked for. The profiler sees those on every thread, in C++ as in
Python, so that nothing has to be patched and a compiled step stays compiled; a dispatch mode would make dynamo fall
back to eager.

The backend's own events ("gloo:…") are of less use: gloo builds a reduce-scatter out of all-reduces.
"""

from __future__ import annotations

from collections import Counter
from types import TracebackType
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

__all__ = ["CountCollectives"]

_NAMESPACE = "c10d::"
_SHARED = "shardrec::all_to_all"  # of ranks that share a host, which need no process group
_NAMES = {
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "allgather_": "all_gather",
    "_allgather_base_": "all_gather",
    "allgather_coalesced_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "reduce_scatter_": "reduce_scatter",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "alltoall_": "all_to_all",
    "alltoall_base_": "all_to_all",
    "broadcast_": "broadcast",
    "reduce_": "reduce",
    "gather_": "gather",
    "scatter_": "scatter",
    "send": "send",
    "recv_": "recv",
    "recv_any_source_": "recv",
    "barrier": "barrier",
    "monitored_barrier_": "barrier",
}


class CountCollectives(Counter[str]):
    """How many collectives of each kind this rank asks for inside a ``with`` block, forward and backward.

    ::

        with CountCollectives() as counts:
            loss(model(batch)).backward()
        assert counts == {"all_to_all": 4, "all_reduce": 1}

    The counts are there when the block ends. Keys are ``all_to_all``, ``all_reduce``, ``all_gather``,
    ``reduce_scatter``, ``broadcast``, ``reduce``, ``gather``, ``scatter``, ``send``, ``recv`` and ``barrier``; an
    operator that is none of these counts under its own name. Groups of one rank count too; coalesced collectives count
    as one. A collective counts when it is asked for, even if it ends after the block.

    Raises:
        RuntimeError: a profiler is already running, for example another `CountCollectives`; there can be only one.
    """

    _profile: profile | None = None

    def __enter__(self) -> CountCollectives:
        # The C++ flag, torch.autograd._profiler_enabled(), stays False while all threads are profiled.
        if torch.autograd.profiler._is_profiler_enabled:
            raise RuntimeError("CountCollectives: a profiler is already running in this process; end its block first")
        self.clear()
        self._profile = profile(
            activities=[ProfilerActivity.CPU],
            experimental_config=torch._C._profiler._ExperimentalConfig(profile_all_threads=True),
        )
        self._profile.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._profile is not None, "__enter__ made it"
        running, self._profile = self._profile, None
        running.__exit__(kind, error, trace)
        names = _event_names(running)
        self.update(_collective(name) for name in names if name.startswith(_NAMESPACE))
        self.update("all_to_all" for name in names if name == _SHARED)


def _event_names(finished: profile) -> list[str]:
    """Names only: reading all of an event, as ``finished.events()`` does, crashes now and then in its metadata."""
    results: Any = finished.profiler and finished.profiler.kineto_results
    return [event.name() for event in results.events()]


def _collective(event: str) -> str:
    operator = event.removeprefix(_NAMESPACE)
    return _NAMES.get(operator, operator)

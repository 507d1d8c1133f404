"""Count the collectives of a step, whoever asks for them.

Functional collectives (eager, scripted or compiled), ``torch.distributed`` calls and DDP's reducer all end in operators
of the ``c10d`` namespace, one for each collective asked for. The profiler sees those on every thread, in C++ as in
Python, so that nothing has to be patched and a compiled step stays compiled; a dispatch mode would make dynamo fall
back to eager.

Only operators are recorded, not the ranges beside them. Each of gloo's collectives holds such a range ("gloo:…") open
until its own thread ends it, and torch then writes into the profile's memory, even where the profile is over and the
memory freed (seen in torch 2.13 with valgrind: a few steps of DistributedDataParallel in ``torch.profiler.profile``
corrupt the heap). So a test that may leave a collective under way counts with this and not with a profile.
"""

from __future__ import annotations

from collections import Counter
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from unittest.mock import patch

import torch
from torch._C._profiler import RecordScope, _ExperimentalConfig
from torch.autograd import profiler
from torch.profiler import ProfilerActivity

from shardrec.exchange.shared import shared_memory as collectives

__all__ = ["CollectiveOperators", "CountCollectives"]

_NAMESPACE = "c10d::"
_SHARED = "shardrec::all_to_all"  # of ranks that share a host, which need no process group
_NAMES = {
    _SHARED: "all_to_all",
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


class CollectiveOperators(Counter[str]):
    """How often each operator that is a collective is called inside a ``with`` block, on any thread of this rank.

    Keys are the operators of ``c10d``, for example ``c10d::alltoall_base_``, and ``shardrec::all_to_all``, which is the
    exchange through memory of ranks that share a host. The counts are there when the block ends.

    Raises:
        RuntimeError: a profiler is already running, for example another of these; there can be only one.
    """

    _shared: AbstractContextManager[object] = nullcontext()

    def __enter__(self) -> CollectiveOperators:
        # The C++ flag, torch.autograd._profiler_enabled(), stays False while all threads are profiled.
        if profiler._is_profiler_enabled:
            raise RuntimeError(f"{type(self).__name__}: a profiler is already running in this process. End it first")
        self.clear()
        config = profiler.profile(
            use_cpu=True, experimental_config=_ExperimentalConfig(profile_all_threads=True)
        ).config(create_trace_id=True)
        self._shared = patch.object(collectives, "_counted", self._count_shared)
        self._shared.__enter__()
        torch.autograd._prepare_profiler(config, {ProfilerActivity.CPU})
        profiler._run_on_profiler_start()
        torch.autograd._enable_profiler(config, {ProfilerActivity.CPU}, {RecordScope.FUNCTION})
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        profiler._run_on_profiler_stop()
        events = torch.autograd._disable_profiler().events()
        self._shared.__exit__(kind, error, trace)
        self.update(event.name() for event in events if event.name().startswith(_NAMESPACE))

    def all_to_alls(self) -> dict[str, int]:
        """The counts of those of them that are all-to-alls."""
        return {name: count for name, count in self.items() if _kind(name) == "all_to_all"}

    def _count_shared(self) -> AbstractContextManager[None]:
        self[_SHARED] += 1
        return nullcontext()


class CountCollectives(CollectiveOperators):
    """How many collectives of each kind this rank asks for inside a ``with`` block, forward and backward.

    ::

        with CountCollectives() as counts:
            loss(model(batch)).backward()
        assert counts == {"all_to_all": 4, "all_reduce": 1}

    Keys are ``all_to_all``, ``all_reduce``, ``all_gather``, ``reduce_scatter``, ``broadcast``, ``reduce``, ``gather``,
    ``scatter``, ``send``, ``recv`` and ``barrier``; an operator that is none of these counts under its own name. Groups
    of one rank count too; coalesced collectives count as one. A collective counts when it is asked for, even if it
    ends after the block.
    """

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        operators = Counter(self)
        self.clear()
        for operator, count in operators.items():
            self[_kind(operator)] += count


def _kind(operator: str) -> str:
    name = operator.removeprefix(_NAMESPACE)
    return _NAMES.get(name, name)

"""Record which ranks each collective of this rank is among."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.utils._python_dispatch import TorchDispatchMode

from shardrec.exchange.flight_record import FlightRecord

__all__ = ["Scopes"]


class Scopes(TorchDispatchMode):
    """The scope of each collective over a process group inside a ``with`` block, of eager code on this thread.

    Args:
        scopes: by name, global ranks in ascending order.

    Attributes:
        of: by operation, as flight records name it, the names of the scopes that it used.
    """

    def __init__(self, scopes: Mapping[str, Sequence[int]]) -> None:
        super().__init__()
        self.of: dict[str, set[str]] = {}
        self._names = {tuple(ranks): name for name, ranks in scopes.items()}
        self._what = "of no flight record"
        self._begin = FlightRecord.begin
        self._patches = ExitStack()

    def __enter__(self) -> Scopes:
        def begin(record: FlightRecord, what: str, size: int = 0) -> int:
            self._what = what
            return self._begin(record, what, size)

        def broadcast(group: dist.ProcessGroup, *arguments: Any) -> None:  # which calls the group without an operator
            self._note(group)
            _broadcast(group, *arguments)

        _broadcast = dist._broadcast_coalesced
        self._patches.enter_context(patch.object(FlightRecord, "begin", begin))
        self._patches.enter_context(patch.object(dist, "_broadcast_coalesced", broadcast))
        super().__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        self._patches.close()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional") and "wait" not in func.__name__:
            values = (*args, *(kwargs or {}).values())
            groups = [value for value in values if "ProcessGroup" in str(getattr(value, "_type", lambda: "")())]
            group = dist.ProcessGroup.unbox(groups[0]) if groups else _resolve_process_group(values[-1])
            self._note(group)
        return func(*args, **(kwargs or {}))

    def _note(self, group: dist.ProcessGroup) -> None:
        ranks = tuple(sorted(dist.get_process_group_ranks(group)))
        self.of.setdefault(self._what, set()).add(self._names.get(ranks, str(ranks)))

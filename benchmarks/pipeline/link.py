"""A link between ranks that is as slow as asked for, and what is waited for on it.

A message leaves when the one before it has left, travels, and is there after the latency. No processor works on that.
So what a loop hides is seen on a machine whose ranks share memory and cores, too, where nothing waits for a network.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar
from unittest.mock import patch

import torch.distributed as dist
from torch import Tensor

from shardrec.exchange.collectives import Collectives, Pending, StreamSizes, WayBack

__all__ = ["Link", "linked", "torch_linked"]

T = TypeVar("T")


@dataclass(kw_only=True)
class Link:
    """One rank's link. What travels is called ``"ids"`` (integers, headers too) or ``"rows"`` (floats).

    Args:
        latency_s: from the end of sending to the arrival.
        bytes_per_s: at which bytes for other ranks leave.

    Attributes:
        travelled: seconds that messages took, by what travelled.
        seen: of these, seconds for which the rank had nothing to do but wait. The others are hidden.
        waited: seconds in all for which the rank waited: for the link, for the transport below it, and for late peers.
    """

    latency_s: float = 0.0
    bytes_per_s: float = math.inf
    travelled: Counter[str] = field(default_factory=Counter)
    seen: Counter[str] = field(default_factory=Counter)
    waited: Counter[str] = field(default_factory=Counter)
    _free_at: float = 0.0

    def send(self, size: int, kind: str) -> float:
        """Bytes leave. Returns when they are there."""
        seconds = size / self.bytes_per_s
        self._free_at = max(time.perf_counter(), self._free_at) + seconds
        self.travelled[kind] += seconds + self.latency_s
        return self._free_at + self.latency_s

    def wait(self, arrival: float, kind: str, wait: Callable[[], T]) -> T:
        """Wait for what arrives then, and for what the transport itself waits for."""
        begin = time.perf_counter()
        left = max(0.0, arrival - begin)
        time.sleep(left)
        self.seen[kind] += left
        result = wait()
        self.waited[kind] += time.perf_counter() - begin
        return result


def linked(link: Link, collectives: Collectives) -> None:
    """Let all that a model's exchanges send take the link."""
    send, rank = collectives.send, collectives.rank

    def send_over(
        parts: Sequence[Sequence[Tensor]], receive: Sequence[int], what: str, streams: StreamSizes | None = None
    ) -> _Pending:
        kind = "rows" if parts[rank][0].is_floating_point() else "ids"
        size = sum(part.nbytes for to, of_rank in enumerate(parts) if to != rank for part in of_rank)
        back = 0 if streams is None else 4 * sum(sum(sizes) for to, sizes in enumerate(streams.into) if to != rank)
        return _Pending(send(parts, receive, what, streams), link, link.send(size, kind), kind, back)

    collectives.send = send_over  # type: ignore[method-assign]


class _Pending:
    def __init__(self, pending: Pending, link: Link, arrival: float, kind: str, back: int) -> None:
        self._pending, self._link, self._arrival, self._kind = pending, link, arrival, kind
        self.way_back = None if pending.way_back is None else _WayBack(pending.way_back, link, back)

    def wait(self) -> list[Tensor]:
        return self._link.wait(self._arrival, self._kind, self._pending.wait)


class _WayBack:
    def __init__(self, way_back: WayBack, link: Link, size: int) -> None:
        self.views = way_back.views
        self._way_back, self._link, self._size = way_back, link, size
        self._arrival = 0.0

    def send(self) -> None:
        self._way_back.send()
        self._arrival = self._link.send(self._size, "rows")

    def wait(self) -> list[Tensor]:
        return self._link.wait(self._arrival, "rows", self._way_back.wait)


@contextmanager
def torch_linked(link: Link) -> Iterator[None]:
    """Inside, let ``dist.all_to_all_single`` take the link."""
    direct = dist.all_to_all_single

    def over(output: Tensor, input: Tensor, *args: Any, **given: Any) -> Any:
        kind = "rows" if input.is_floating_point() else "ids"
        group = given.get("group")
        splits = given.get("input_split_sizes", args[1] if len(args) > 1 else None)
        own = splits[dist.get_rank(group)] if splits else input.size(0) // dist.get_world_size(group)
        work = direct(output, input, *args, **given)
        arrival = link.send(input.nbytes * (input.size(0) - own) // max(1, input.size(0)), kind)
        if work is not None:
            return _Work(work, link, arrival, kind)
        return link.wait(arrival, kind, lambda: None)

    with patch.object(dist, "all_to_all_single", over):
        yield


class _Work(dist.Work):
    """May be waited for again."""

    def __init__(self, work: dist.Work, link: Link, arrival: float, kind: str) -> None:
        super().__init__()
        self._work, self._link, self._arrival, self._kind = work, link, arrival, kind

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        done: bool = self._link.wait(self._arrival, self._kind, self._work.wait)
        return done

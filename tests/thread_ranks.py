"""Ranks as threads of the test's own process, with collectives that check what each side expects of the other.

For what needs no process group: the exchange takes its collectives as an object. Any number of ranks, hundreds of
microseconds a run, so that hypothesis can search through plans and batches.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from shardrec.exchange.collectives import Collectives, Later, Pending, StreamSizes

__all__ = ["ThreadCollectives", "thread_ranks"]

T = TypeVar("T")

_TIMEOUT_S = 100.0


class ThreadCollectives(Collectives):
    """The collectives of one rank; a message that does not have the size that its receiver expects is an error.

    Args:
        rank: this rank.
        mail: one queue per (source, target).

    Attributes:
        issued: what was issued.
        unwaited: what was issued and never waited for.
    """

    def __init__(self, rank: int, mail: Sequence[Sequence[queue.Queue[tuple[str, Tensor]]]]) -> None:
        self.rank = rank
        self.world_size = len(mail)
        self.issued: list[str] = []
        self.unwaited: list[str] = []
        self._mail = mail

    def send(
        self, parts: Sequence[Sequence[Tensor]], receive: Sequence[int], what: str, streams: StreamSizes | None = None
    ) -> Pending:
        assert len(receive) == len(parts) == self.world_size
        self.issued.append(what)
        for target, of_rank in enumerate(parts):
            self._mail[self.rank][target].put((what, torch.cat([part.detach() for part in of_rank]).clone()))
        self.unwaited.append(what)
        return Later(partial(self._receive, list(receive), what))

    def _receive(self, sizes: list[int], what: str) -> list[Tensor]:
        self.unwaited.remove(what)
        parts = []
        for source, size in enumerate(sizes):
            sent, part = self._mail[source][self.rank].get(timeout=_TIMEOUT_S)
            assert sent == what, f"rank {self.rank} waits for {what} and rank {source} sent {sent}"
            assert part.numel() == size, f"{what}: rank {source} sent {part.numel()} and {size} were expected"
            parts.append(part)
        return list(torch.cat(parts).split(sizes))  # in one piece, as a process group's


def thread_ranks(world_size: int, fn: Callable[[ThreadCollectives], T]) -> list[T]:
    """Call ``fn`` once per rank, each in a thread; returns the values by rank, or raises the first error."""
    mail = [[queue.Queue[tuple[str, Tensor]]() for _ in range(world_size)] for _ in range(world_size)]
    values: dict[int, T] = {}
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            values[rank] = fn(ThreadCollectives(rank, mail))
        except BaseException as error:
            errors.append(error)
            for box in mail[rank]:
                box.put((f"nothing but {error!r}", torch.zeros(0)))

    if world_size == 1:
        run(0)
    else:
        threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(world_size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(2 * _TIMEOUT_S)
    if errors:
        raise errors[0]  # the others are those of ranks that waited for this one
    return [values[rank] for rank in range(world_size)]

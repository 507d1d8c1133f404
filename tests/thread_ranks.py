"""Ranks as threads of the test's own process, with collectives that check what each side expects of the other.

For what needs no process group: the exchange takes its collectives as an object. Any number of ranks, hundreds of
microseconds a run, so that hypothesis can search through plans and batches.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from shardrec.exchange.collectives import Collectives

__all__ = ["ThreadCollectives", "thread_ranks"]

T = TypeVar("T")

_TIMEOUT_S = 100.0


class ThreadCollectives(Collectives):
    """The collectives of one rank; a message that does not have the size that its receiver expects is an error.

    Args:
        rank: this rank.
        mail: one queue per (source, target).
    """

    def __init__(self, rank: int, mail: Sequence[Sequence[queue.Queue[tuple[str, Tensor]]]]) -> None:
        self.rank = rank
        self.world_size = len(mail)
        self.issued: list[str] = []
        self._mail = mail
        self._expected: dict[int, tuple[str, list[int], Tensor]] = {}

    def all_to_all(self, values: Tensor, receive: Sequence[int], send: Sequence[int], what: str) -> Tensor:
        assert len(receive) == len(send) == self.world_size
        assert values.size(0) == sum(send), f"{what}: sends {values.size(0)} of {sum(send)}"
        self.issued.append(what)
        for target, part in enumerate(values.detach().split(list(send))):
            self._mail[self.rank][target].put((what, part.clone()))
        # What is read before the wait is to be wrong.
        pending = torch.full((sum(receive), *values.shape[1:]), 99, dtype=values.dtype)
        self._expected[id(pending)] = (what, list(receive), pending)
        return pending

    def wait(self, pending: Tensor, what: str) -> Tensor:
        issued, receive, _ = self._expected.pop(id(pending))
        assert issued == what, f"{what} waits for {issued}"
        parts = []
        for source, size in enumerate(receive):
            sent, part = self._mail[source][self.rank].get(timeout=_TIMEOUT_S)
            assert sent == what, f"rank {self.rank} waits for {what} and rank {source} sent {sent}"
            assert part.size(0) == size, f"{what}: rank {source} sent {part.size(0)} and {size} were expected"
            parts.append(part)
        return pending.copy_(torch.cat(parts))

    @property
    def unwaited(self) -> list[str]:
        """What was issued and never waited for."""
        return [what for what, _, _ in self._expected.values()]


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

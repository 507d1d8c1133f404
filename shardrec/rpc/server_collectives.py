"""The collectives between servers in an update, for sums of squares of rows whose columns are on several servers.

Rowwise Adagrad needs the mean square of whole rows (:mod:`shardrec.lookup.whole_rows`). Each server makes the updates
of a training run in the order in which the trainers pushed them, so that servers that wait for each other make the same
update. The server's own thread waits; the RPC threads store received rows and answer.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from time import monotonic
from typing import Any

import torch
from torch import Tensor
from torch.distributed import rpc

from shardrec.errors import PeerError
from shardrec.exchange.collectives import Collectives, Later, Pending, StreamSizes, joined

__all__ = ["ServerCollectives"]

_Key = tuple[int, int, int, int]


class ServerCollectives(Collectives):
    """The collectives of a server, of which it only needs :meth:`send`.

    Args:
        rank: of the plan, whose shards this server holds.
        names: RPC names of all servers.
        take: the function by which a server takes rows, with (key, rows).
    """

    def __init__(self, rank: int, names: Sequence[str], take: Callable[[_Key, Tensor], Any]) -> None:
        self.rank = rank
        self.world_size = len(names)
        self.call: Callable[..., Any] = rpc.rpc_async
        self._names = tuple(names)
        self._take = take
        self._update = (0, 0)
        self._deadline = 0.0
        self._exchanges = 0
        self._box: dict[_Key, Tensor] = {}
        self._came = threading.Condition()

    def begin(self, update: tuple[int, int], deadline: float) -> None:
        """An update begins.

        Args:
            update: its run and number, the same on all servers.
            deadline: time limit on the monotonic clock, for the others' sums.
        """
        self._update, self._deadline, self._exchanges = update, deadline, 0
        with self._came:
            for key in [key for key in self._box if key[0] != update[0] or key[1] < update[1]]:
                del self._box[key]

    def put(self, key: _Key, rows: Tensor) -> None:
        """Take what another server tells."""
        with self._came:
            self._box[key] = rows
            self._came.notify_all()

    def send(
        self, parts: Sequence[Sequence[Tensor]], receive: Sequence[int], what: str, streams: StreamSizes | None = None
    ) -> Pending:
        assert what == "row norm", f"a server takes no part in the {what} exchange"
        self._exchanges += 1
        exchange = (*self._update, self._exchanges)
        sent = []
        for rank, of_rank in enumerate(parts):
            rows = joined(of_rank)
            if rank != self.rank and rows.numel():
                args = ((*exchange, self.rank), rows.cpu().clone())
                sent.append(self.call(self._names[rank], self._take, args=args))
        return Later(partial(self._squares, exchange, joined(parts[self.rank]), receive, sent))

    def _squares(
        self, exchange: tuple[int, int, int], own_part: Tensor, receive: Sequence[int], sent: Sequence[Any]
    ) -> list[Tensor]:
        """Wait for an exchange: ``own_part`` is what this server would send to itself, ``sent`` are its calls."""
        parts = []
        for rank, count in enumerate(receive):
            if rank == self.rank:
                parts.append(own_part)
            elif count:
                parts.append(self.receive((*exchange, rank), own_part, count))
            else:
                parts.append(own_part[:0])
        for call in sent:
            call.wait()
        return parts

    def receive(self, key: _Key, like: Tensor, count: int) -> Tensor:
        """Wait for what another server tells; ``key`` ends with its rank."""
        with self._came:
            if not self._came.wait_for(lambda: key in self._box, self._deadline - monotonic()):
                raise PeerError(
                    f"server {self._names[key[3]]!r} has not told its part of rows that an update needs; nothing of "
                    "them was changed: start it again from the last checkpoint"
                )
            rows = self._box.pop(key)
        if rows.numel() != count or rows.dtype is not torch.float32:
            raise PeerError(
                f"server {self._names[key[3]]!r} tells of {rows.numel()} rows, and {count} are updated here"
            )
        return rows.to(like.device)

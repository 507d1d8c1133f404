"""The collectives between servers in an update, for sums of squares of rows with columns on several servers.

Rowwise Adagrad needs the mean square of whole rows (:mod:`shardrec.lookup.whole_rows`). Each server makes the updates
of a training run in the order in which the trainers pushed them, so that servers that wait for each other make the same
update. The server's own thread waits. The RPC threads store received rows and answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from time import monotonic

import torch
from torch import Tensor

from shardrec.errors import PeerError
from shardrec.exchange.collectives import Collectives, Later, Pending, StreamSizes, joined
from shardrec.modules.servers import Servers
from shardrec.rpc.messages import Call, Connections

_Key = tuple[int, int, int, int]  # run, update, exchange of the update, rank of the sender


class ServerCollectives(Collectives):
    """The collectives of a server, which only needs :meth:`send`."""

    def __init__(self, rank: int, names: Sequence[str]) -> None:
        self.rank = rank
        self.world_size = len(names)
        self.servers = Connections(Servers(names))
        self._names = tuple(names)
        self._update = (0, 0)
        self._deadline = 0.0
        self._exchanges = 0
        self._received: dict[_Key, Future[Tensor]] = {}  # and the ones that are waited for

    def begin(self, update: tuple[int, int], deadline: float) -> None:
        """An update begins.

        Args:
            update: its run and number, the same on all servers.
            deadline: time limit on the monotonic clock, for the others' sums.
        """
        self._update, self._deadline, self._exchanges = update, deadline, 0
        for key in list(self._received):
            if key[0] != update[0] or key[1] < update[1]:
                del self._received[key]

    def put(self, key: _Key, rows: Tensor) -> None:
        """Take what another server tells."""
        self._received.setdefault(key, Future()).set_result(rows)

    def send(
        self, parts: Sequence[Sequence[Tensor]], receive: Sequence[int], what: str, streams: StreamSizes | None = None
    ) -> Pending:
        assert what == "row norm", f"a server takes no part in the {what} exchange"
        self._exchanges += 1
        exchange = (*self._update, self._exchanges)
        sums = [joined(of_rank) for of_rank in parts]
        calls = [
            self.servers.call(rank, "take_rows", (*exchange, self.rank), rows.cpu().clone())
            for rank, rows in enumerate(sums)
            if rank != self.rank and rows.numel()
        ]
        return Later(partial(self._receive, exchange, sums[self.rank], receive, calls))

    def _receive(
        self, exchange: tuple[int, int, int], own_part: Tensor, receive: Sequence[int], calls: Sequence[Call]
    ) -> list[Tensor]:
        """Wait for an exchange: ``own_part`` is what this server would send to itself."""
        parts = []
        for rank, count in enumerate(receive):
            if rank == self.rank:
                parts.append(own_part)
            elif count:
                parts.append(self._take((*exchange, rank), count).to(own_part.device))
            else:
                parts.append(own_part[:0])
        for call in calls:
            call.wait()
        return parts

    def _take(self, key: _Key, count: int) -> Tensor:
        """Wait for the ``count`` sums that another server tells."""
        name = self._names[key[3]]
        try:
            rows = self._received.setdefault(key, Future()).result(self._deadline - monotonic())
        except TimeoutError as error:
            raise PeerError(
                f"server {name!r} has not told its part of rows that an update needs. Nothing of them was changed: "
                "start it again from the last checkpoint"
            ) from error
        del self._received[key]
        if rows.numel() != count or rows.dtype is not torch.float32:
            raise PeerError(f"server {name!r} tells of {rows.numel()} rows, and {count} are updated here")
        return rows

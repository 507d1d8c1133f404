"""The collectives of a step on a trainer with tables on servers.

To the sharded modules the trainers and the servers are ranks of one group: T trainers, which have batches and no
shards, then S servers, which have shards and no batches. Between trainers only the header travels, over their own
process group. Between a trainer and a server what an all-to-all would carry::

    header    trainers alone: fault flags and agreement. A server has neither a batch nor a fault
    payload   nothing: the ids travel with the lookup
    output    to server q: lookup(ids) ──► rows, for all the modules that share the exchange
    backward  to server q: update(ids, gradients) ──► made, once all the trainers' have come

[Note: staleness]
With staleness 0 backward ends when the servers have made the update, as the sharded model's backward does. With
staleness k it waits for all updates but the last k, so that a forward sees all but those, or more.

[Note: one push of several exchanges]
A trainer keeps what its exchanges have for the servers until the end of the backward or, with ``update="step"``, until
the step, and pushes all of it as one update. So the servers keep nothing between two updates.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import chain

import torch
from torch import Tensor

from shardrec.errors import ConfigError, ShardrecError
from shardrec.exchange.collectives import Collectives, Later, Pending, StreamSizes, joined
from shardrec.exchange.headers import FIXED_COLUMNS
from shardrec.lookup.deferred import DeferredGradients
from shardrec.lookup.optimizers import FusedOptimizer
from shardrec.rpc.messages import Call, Connections, Part

_SHARE_OF_TIMEOUT = 0.8  # of a trainer's time limit, which a server waits for the other trainers


class KeptGradients(DeferredGradients):
    """What exchanges have for the servers since the last update. See [Note: one push of several exchanges].

    Attributes:
        pushes: per exchange, in the order of their backwards, for each server what was looked up, and its gradient.
    """

    def __init__(self) -> None:
        super().__init__(None)

    def keep(self, requests: Sequence[list[Part]], gradients: Sequence[Tensor]) -> None:
        """Keep what the backward of an exchange has."""
        self.backwards += 1
        self.pushes.append((requests, gradients))

    def tensors(self) -> list[Tensor]:
        """The gradients of the looked-up rows, (n,) float32 each, to be changed in place."""
        return [gradient for _, gradients in self.pushes for gradient in gradients]

    def drop(self) -> None:
        """Let go of the gradients."""
        super().drop()
        self.pushes: list[tuple[Sequence[list[Part]], Sequence[Tensor]]] = []


class RemoteCollectives(Collectives):
    """The collectives of one trainer.

    Args:
        trainers: the collectives of the trainers' process group.
        servers: that hold the shards.
        staleness: updates that the tables may be behind.

    Attributes:
        session: a number that identifies this run of the trainers, the same on all of them.
        rates: the learning rate per fused optimizer, in the order in which the servers know them.
        updates_at_step: the optimizer's step calls :meth:`step`. Otherwise the end of each backward does.
        kept: what :meth:`step` pushes.
        requests: per module of the lookup that is to come, the part for each server.
    """

    def __init__(self, trainers: Collectives, servers: Connections, *, staleness: int) -> None:
        self.rank = trainers.rank
        self.world_size = trainers.world_size + len(servers)
        self.trainers = trainers
        self.servers = servers
        self.staleness = staleness
        self.session = 0
        self.rates: dict[FusedOptimizer, float] = {}
        self.updates_at_step = False
        self.kept = KeptGradients()
        self.requests: list[list[Part]] = []
        self._updates = 0
        self._pushed: deque[list[Call]] = deque()  # per update and server
        self._queued: Callable[[], object] = lambda: None  # what the end of the backward under way calls, if it lives

    @property
    def mean_over(self) -> int:
        return self.trainers.world_size

    def header(self, rows: Tensor) -> Tensor:
        of_trainers = self.trainers.header(rows[: self.trainers.world_size])
        silent = rows.new_zeros((len(self.servers), rows.size(1)))
        silent[:, :FIXED_COLUMNS] = rows[self.rank, :FIXED_COLUMNS]  # as this trainer's flag and checksum
        return torch.cat([of_trainers, silent])

    def ids(self, parts: Sequence[Sequence[Tensor]], receive: Sequence[int]) -> Pending:
        like = parts[0][0]
        return Later(lambda: [like.new_zeros(size) for size in receive])

    def gather(self, values: Tensor, sizes: Sequence[int], what: str) -> list[Tensor]:
        count = self.trainers.world_size
        return self.trainers.gather(values, sizes[:count], what) + [values.new_zeros(size) for size in sizes[count:]]

    def send(
        self, parts: Sequence[Sequence[Tensor]], receive: Sequence[int], what: str, streams: StreamSizes | None = None
    ) -> Pending:
        assert not sum(receive[: self.trainers.world_size]), (
            f"trainers do not have shards, and {what} is to come from one"
        )
        like = parts[0][0]
        modules, self.requests = self.requests, []
        if not modules:  # nothing of the servers: sums of squares of rows that no trainer holds
            return Later(lambda: [like.new_zeros(size) for size in receive])
        requests = [[parts[server] for parts in modules] for server in range(len(self.servers))]
        lookups = [self.servers.call(server, "lookup", request) for server, request in enumerate(requests)]
        way_back = None if streams is None else _Gradients(self, requests, streams, like.device)
        return Later(partial(self._rows, lookups, like.device), way_back)

    def program_goes_back(self) -> None:
        if not self.updates_at_step and self._queued() is None:
            self.kept.drop()  # of a backward that raised, which has let go of its callback
            update = partial(self.step, self.staleness)
            self._queued = weakref.ref(update)
            torch.autograd.Variable._execution_engine.queue_callback(update)

    def _rows(self, lookups: Sequence[Call], device: torch.device) -> list[Tensor]:
        """Wait for the servers' rows: per rank, on ``device``."""
        rows_by_rank = [torch.empty(0, dtype=torch.float32, device=device)] * self.trainers.world_size
        for lookup in lookups:
            rows: Tensor = lookup.wait()
            rows_by_rank.append(rows if device.type == "cpu" else rows.pin_memory().to(device, non_blocking=True))
        return rows_by_rank

    def step(self, behind: int = 0) -> None:
        """Have the servers make one update of the kept gradients, if there are any, and wait for all updates but the
        last ``behind``. Every trainer calls it.

        Raises:
            ConfigError: if a server has replicas.
            PeerError: if a server is gone or did not answer in time.
        """
        pushes = self.kept.pushes
        if not pushes:
            return
        self.kept.drop()
        for names in self.servers.names:
            if len(names) > 1:
                raise ConfigError(
                    f"an update would change one of the replicas {', '.join(names)} alone. Replicas are for read-only "
                    "serving: to train, give Servers one name for each rank of the plan"
                )
        self._updates += 1
        update, trainer = (self.session, self._updates), (self.rank, self.trainers.world_size)
        common = (update, trainer, _SHARE_OF_TIMEOUT * self.servers.timeout_s, list(self.rates.values()))
        calls = []
        for server in range(len(self.servers)):
            parts = [part for requests, _ in pushes for part in requests[server]]
            gradient = torch.cat([gradients[server] for _, gradients in pushes])
            calls.append(self.servers.call(server, "update", *common, parts, gradient.cpu()))
        self._pushed.append(calls)
        self.wait_for_updates(behind)

    def wait_for_updates(self, behind: int = 0) -> None:
        """Wait for all updates but the last ``behind``.

        Raises:
            PeerError: if a server is gone or did not answer in time.
        """
        while len(self._pushed) > behind:
            for update in self._pushed.popleft():
                update.wait()

    def end_updates(self) -> None:
        """Wait until no update is under way any more, made or failed: the tables are about to be replaced."""
        for update in chain.from_iterable(self._pushed):
            with suppress(ShardrecError):
                update.wait()
        self._pushed.clear()


@dataclass
class _Gradients:
    """The gradients of one lookup on their way to the servers."""

    collectives: RemoteCollectives
    requests: list[list[Part]]
    streams: StreamSizes
    device: torch.device
    buffers: list[Tensor] = field(default_factory=list)

    def views(self) -> list[Tensor]:
        sizes = self.streams.into
        self.buffers = [torch.empty(sum(of_rank), dtype=torch.float32, device=self.device) for of_rank in sizes]
        return [
            view for buffer, of_rank in zip(self.buffers, sizes, strict=True) for view in buffer.split(list(of_rank))
        ]

    def send(self) -> None:
        gradients = self.buffers[len(self.buffers) - len(self.requests) :]
        collectives, self.buffers = self.collectives, []
        collectives.program_goes_back()  # or another backward
        collectives.kept.keep(self.requests, gradients)

    def wait(self) -> list[Tensor]:
        return [torch.empty(0, dtype=torch.float32, device=self.device) for _ in self.streams.out[0]]


def words(pieces: Sequence[Tensor]) -> Tensor:
    """The pieces of a part as one flat int32 tensor on the CPU, in memory of its own: RPC sends whole storages."""
    flat = joined(pieces).cpu()
    return flat if flat.untyped_storage().nbytes() == flat.nbytes else flat.clone()

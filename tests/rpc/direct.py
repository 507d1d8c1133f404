"""Servers in the test's own process, called without RPC: their queues, threads and Futures are the real ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

from torch import nn

import shardrec
from shardrec.layout import ShardingPlan
from shardrec.pending import as_lazy
from shardrec.rpc import EmbeddingServer, RemoteModel
from shardrec.rpc.messages import Connections, unwrapped

__all__ = ["DirectServers", "served"]


class DirectServers(Connections):
    """As :class:`Connections`, of servers in this process."""

    def __init__(self, servers: Sequence[EmbeddingServer]) -> None:
        super().__init__(shardrec.Servers([f"server{one.rank}" for one in servers], timeout_s=5.0))
        self.local = list(servers)
        for one in servers:
            one.between.servers = self

    def call(self, server: int, method: str, *arguments: Any) -> Any:
        future = self.local[server]._answer(method, arguments)
        return as_lazy(future).then(lambda answer: unwrapped(answer, f"server{server}"))

    def call_replicas(self, server: int, method: str, *arguments: Any) -> None:
        shardrec.wait(self.call(server, method, *arguments))


@contextmanager
def served(
    make: Callable[[], nn.Module], plan: ShardingPlan, *, options: dict[str, Any] | None = None, **settings: Any
) -> Iterator[tuple[RemoteModel, DirectServers]]:
    """A trainer's model and its servers.

    Args:
        make: makes the unsharded model, the same every time.
        plan: of the tables.
        options: of each server.
        settings: of ``shardrec.shard``.
    """
    servers = [EmbeddingServer(make(), plan, rank, **(options or {})) for rank in range(plan.world_size)]
    direct = DirectServers(servers)
    try:
        with mock.patch("shardrec.rpc.remote_model.Connections", lambda servers: direct):
            model = shardrec.shard(make(), plan, servers=shardrec.Servers(direct.names), **settings)
        assert isinstance(model, RemoteModel)
        yield model, direct
    finally:
        for one in servers:
            one.close()

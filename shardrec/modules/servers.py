"""The embedding servers that hold a model's tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass

from shardrec.errors import ConfigError


@dataclass(frozen=True)
class Servers:
    """The argument ``servers`` of :func:`shardrec.shard`: the embedding servers that hold the tables (docs/rpc.md).

    Args:
        names: RPC names of the servers, one for each rank of the plan, or the name of one; for serving, each may be the
            names of its replicas.
        staleness: number of updates that may still be in progress on the servers when ``backward()`` returns.
        timeout_s: seconds that a server may take to answer.

    Raises:
        ConfigError: for no servers, a duplicate name, a negative staleness or a time limit of 0 or less.
    """

    names: str | Sequence[str | Sequence[str]]
    _: KW_ONLY
    staleness: int = 0
    timeout_s: float = 60.0

    def __post_init__(self) -> None:
        servers = [name for replicas in self.of_ranks() for name in replicas]
        if not servers or len(set(servers)) != len(servers) or not all(self.of_ranks()):
            raise ConfigError(
                f"names of Servers is {self.names!r}. Give the RPC name of a server for each rank of the plan, each "
                "once"
            )
        if self.staleness < 0:
            raise ConfigError(
                f"staleness={self.staleness}. Give the number of steps that tables may be behind, 0 or more"
            )
        if self.timeout_s <= 0:
            raise ConfigError(f"timeout_s={self.timeout_s}. Give a number of seconds above 0")

    def of_ranks(self) -> tuple[tuple[str, ...], ...]:
        """By rank of the plan, the names of the server's replicas, or the server's name without replicas."""
        servers = (self.names,) if isinstance(self.names, str) else self.names
        return tuple((names,) if isinstance(names, str) else tuple(names) for names in servers)

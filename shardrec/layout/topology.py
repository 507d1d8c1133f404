"""The ranks a plan is for: how many hosts, and how many ranks on each."""

from __future__ import annotations

import os
from dataclasses import dataclass

from shardrec.errors import ConfigError

__all__ = ["Topology"]


@dataclass(frozen=True, kw_only=True)
class Topology:
    """Hosts of equally many ranks; ranks are numbered host by host, as torchrun numbers them.

    Args:
        hosts: number of machines.
        ranks_per_host: number of ranks on each.
    """

    hosts: int = 1
    ranks_per_host: int = 1

    def __post_init__(self) -> None:
        if self.hosts < 1 or self.ranks_per_host < 1:
            raise ConfigError(
                f"a topology needs at least one host and one rank on it, got hosts={self.hosts}, "
                f"ranks_per_host={self.ranks_per_host}"
            )

    @property
    def world_size(self) -> int:
        """Number of ranks in all."""
        return self.hosts * self.ranks_per_host

    def host_ranks(self, host: int) -> tuple[int, ...]:
        """The ranks of one host, ascending."""
        if not 0 <= host < self.hosts:
            raise ConfigError(f"there is no host {host}; the topology has hosts 0 to {self.hosts - 1}")
        return tuple(range(host * self.ranks_per_host, (host + 1) * self.ranks_per_host))

    @classmethod
    def of_world(cls, world_size: int) -> Topology:
        """The topology of ``world_size`` ranks as torchrun's ``LOCAL_WORLD_SIZE`` describes it (else one host)."""
        local = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
        if not 1 <= local <= world_size or world_size % local:
            local = world_size
        return cls(hosts=world_size // local, ranks_per_host=local)

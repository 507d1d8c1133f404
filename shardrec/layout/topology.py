"""The ranks that a plan is for: the hosts, the ranks per host, and the machine of a rank."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import inf

from shardrec.errors import ConfigError
from shardrec.layout.machine import Machine
from shardrec.layout.presets import detect_machine, preset


@dataclass(frozen=True, kw_only=True)
class Topology:
    """Hosts of equally many ranks. Ranks are numbered host by host, as torchrun numbers them.

    Args:
        hosts: number of machines.
        ranks_per_host: number of ranks on each.
        machine: memory and bandwidths of a rank. None leaves them to the planner's default.
        rank_memory: bytes for tables on each rank, in the order of the ranks, if ranks differ. Default: the machine's
            memory on all ranks.
    """

    hosts: int = 1
    ranks_per_host: int = 1
    machine: Machine | None = None
    rank_memory: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if self.hosts < 1 or self.ranks_per_host < 1:
            raise ConfigError(
                f"a topology needs at least one host and one rank on it, got hosts={self.hosts}, "
                f"ranks_per_host={self.ranks_per_host}"
            )
        if self.rank_memory is not None:
            sizes = tuple(self.rank_memory)
            if len(sizes) != self.world_size or not all(0 <= size < inf for size in sizes):
                raise ConfigError(
                    f"a topology's rank_memory is {sizes}. Give the bytes of each of its {self.world_size} ranks, "
                    "at least 0 and not infinite"
                )
            object.__setattr__(self, "rank_memory", sizes)

    @property
    def world_size(self) -> int:
        """Number of ranks in all."""
        return self.hosts * self.ranks_per_host

    def host_ranks(self, host: int) -> tuple[int, ...]:
        """The ranks of one host, ascending."""
        if not 0 <= host < self.hosts:
            raise ConfigError(f"there is no host {host}. The topology has hosts 0 to {self.hosts - 1}")
        return tuple(range(host * self.ranks_per_host, (host + 1) * self.ranks_per_host))

    def with_machine(self, machine: Machine | str) -> Topology:
        """The same ranks on another machine: a :class:`Machine`, or the name of a preset such as ``"h100"``."""
        return replace(self, machine=preset(machine) if isinstance(machine, str) else machine)

    @classmethod
    def of_world(cls, world_size: int) -> Topology:
        """The topology of ``world_size`` ranks according to torchrun's ``LOCAL_WORLD_SIZE`` (one host without it)."""
        local = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
        if not 1 <= local <= world_size or world_size % local:
            local = world_size
        return cls(hosts=world_size // local, ranks_per_host=local)

    @classmethod
    def detect(cls, *, hosts: int = 1, ranks_per_host: int | None = None, device: str | None = None) -> Topology:
        """The topology of hosts like this machine.

        Args:
            hosts: number of machines.
            ranks_per_host: default: one per CUDA device, or per core on a machine without CUDA.
            device: ``"cpu"`` or ``"cuda"``. Default: CUDA where torch sees a device.

        Returns:
            A topology with a machine: memory as the device or the host reports it, bandwidths of the nearest preset.
        """
        if ranks_per_host is None:
            import torch

            devices = torch.cuda.device_count() if device != "cpu" else 0
            ranks_per_host = devices or len(os.sched_getaffinity(0))
        machine = detect_machine(ranks_per_host, device=device)
        return cls(hosts=hosts, ranks_per_host=ranks_per_host, machine=machine)

    def to_json(self) -> dict[str, object]:
        """JSON-compatible data. ``machine`` and ``rank_memory`` only where they are given."""
        data: dict[str, object] = {"hosts": self.hosts, "ranks_per_host": self.ranks_per_host}
        if self.machine is not None:
            data["machine"] = self.machine.to_json()
        if self.rank_memory is not None:
            data["rank_memory"] = list(self.rank_memory)
        return data

    @classmethod
    def from_json(cls, data: Mapping[str, object]) -> Topology:
        """The topology that :meth:`to_json` gave.

        Raises:
            ConfigError: if a number is missing or wrong, or the machine is not one.
        """
        counts = {}
        for name in ("hosts", "ranks_per_host"):
            count = data.get(name)
            if type(count) is not int:
                raise ConfigError(f"a topology's {name} is {count!r}. Give a whole number")
            counts[name] = count
        machine = data.get("machine")
        if machine is not None and not isinstance(machine, Mapping):
            raise ConfigError(f"a topology's machine is {machine!r}. Give its entries, or leave it out")
        sizes = data.get("rank_memory")
        if sizes is not None:
            if not isinstance(sizes, list) or not all(type(each) in (int, float) for each in sizes):
                raise ConfigError(f"a topology's rank_memory is {sizes!r}. Give a list of bytes, or leave it out")
            sizes = tuple(sizes)
        return cls(**counts, machine=None if machine is None else Machine.from_json(machine), rank_memory=sizes)

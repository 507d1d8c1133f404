"""The machine of a rank: its memory tiers and bandwidths."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from math import inf
from typing import Any

from shardrec.errors import ConfigError

_KINDS = ("cpu", "cuda")


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The hardware of a rank. Bytes, bytes per second, seconds.

    Args:
        name: for reports.
        kind: ``"cpu"`` or ``"cuda"``: the device of the tables.
        device_memory: bytes of the device (0 for a CPU).
        host_memory: a rank's share of its host's memory, in bytes.
        memory_bandwidth: bytes per second of the tier that the tables are in.
        host_link: bytes per second between two ranks of a host, each way.
        network: bytes per second of a rank to other hosts, each way.
        memory_link: bytes per second between the device and its host's memory, each way (PCIe).
        latency: seconds of a collective.
        cache: bytes of the last-level cache, a rank's share.
        source: the origin of the figures.
    """

    name: str
    kind: str
    device_memory: float = 0
    host_memory: float = inf
    memory_bandwidth: float
    host_link: float
    network: float
    latency: float
    cache: float = 0
    memory_link: float = 32e9
    source: str = ""

    def __post_init__(self) -> None:
        if self.kind not in _KINDS:
            raise ConfigError(
                f"machine {self.name!r}: there is no kind {self.kind!r}. The kinds are {', '.join(_KINDS)}"
            )
        for name in ("memory_bandwidth", "host_link", "network", "memory_link"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"machine {self.name!r}: {name} is {getattr(self, name)}. Give bytes per second")
        for name in ("device_memory", "host_memory", "latency", "cache"):
            if not getattr(self, name) >= 0:
                raise ConfigError(
                    f"machine {self.name!r}: {name} is {getattr(self, name)}. Give a number of at least 0"
                )
        if self.kind == "cuda" and not self.device_memory:
            raise ConfigError(f"machine {self.name!r}: a CUDA device has memory. Give device_memory in bytes")

    @property
    def table_memory(self) -> float:
        """Bytes of the tier that the tables are in: the device's for CUDA, else the host's share."""
        return self.device_memory if self.kind == "cuda" else self.host_memory

    def to_json(self) -> dict[str, object]:
        """JSON-compatible data. Memory without a limit is null."""
        return {name: None if value == inf else value for name, value in asdict(self).items()}

    @classmethod
    def from_json(cls, data: Mapping[str, object]) -> Machine:
        """The machine that :meth:`to_json` gave.

        Raises:
            ConfigError: for an unknown or missing entry, or one of the wrong kind.
        """
        known = {each.name: str(each.type) for each in fields(cls)}
        unknown = [name for name in data if name not in known]
        if unknown:
            raise ConfigError(f"a machine has no {unknown[0]!r}. It has {', '.join(known)}")
        values: dict[str, Any] = {}
        for name, value in data.items():
            kind: tuple[type, ...] = (str,) if known[name] == "str" else (int, float)
            if value is None and known[name] != "str":
                values[name] = inf
            elif isinstance(value, kind) and not isinstance(value, bool):
                values[name] = value
            else:
                raise ConfigError(f"a machine's {name} is {value!r}. Give a {'text' if kind == (str,) else 'number'}")
        try:
            return cls(**values)
        except TypeError as error:
            raise ConfigError(f"this is not a machine: {error}") from error

"""The coefficients of the cost model: few, each with a unit, measured (``shardrec calibrate``) or from a data sheet."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from shardrec.errors import ConfigError
from shardrec.files import read_json
from shardrec.layout.machine import Machine

_FORMAT = 3

# What random rows and small messages reach of a data sheet's peak. Assumptions, not measurements: calibrate replaces
# them.
_OF_MEMORY_PEAK = 0.5
_OF_LINK_PEAK = 0.7


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Time coefficients of one kind of rank. Nanoseconds per id, bag or byte. Microseconds per call.

    Args:
        name: of the machine or the calibration.
        source: where the figures are from.
        lookup_id_ns: per id looked up, besides its bytes.
        row_byte_ns: per byte of a row read from memory. A byte that is updated, or in a cache, is a multiple of it.
        cache_bytes: rows of tables that fit into this much are always in a cache.
        update_id_ns: per id in backward, besides its bytes.
        summed_id_ns: the same for ids of a shard so small that the gradients of all its rows stay in a core's cache.
        decode_ns: per weight of a distinct row that is not float32, for its way to float32 and back. Each id takes as
            much as two weights besides, for on the CPU such tables are looked up by other kernels.
        bag_ns: per bag of a shard, in forward and backward together.
        pooled_byte_ns: per byte of pooled columns that are written, added up or put in order.
        route_id_ns: per id sent, received, or sorted by row block.
        exchange_byte_ns: all-to-all, per byte that leaves a rank for another of its host.
        host_exchange_byte_ns: the same for another host.
        exchange_us: a collective without bytes, and the work around it.
        reduce_byte_ns: all-reduce, per byte of the tensor.
        memory_link_byte_ns: per byte between a device and its host's memory, of tables that are there; not calibrated.
        replica_byte_ns: per byte of a replica's dense gradient, besides the all-reduce.
        shard_us: per shard, or replicated table, and step.
        forward_us: per forward, whatever the plan, besides the collectives.
        backward_us: the same of a backward.
        errors: fit errors of a calibration: relative error by name, in percent.
    """

    name: str
    source: str
    lookup_id_ns: float
    row_byte_ns: float
    cache_bytes: float
    update_id_ns: float
    summed_id_ns: float
    decode_ns: float
    bag_ns: float
    pooled_byte_ns: float
    route_id_ns: float
    exchange_byte_ns: float
    host_exchange_byte_ns: float
    exchange_us: float
    reduce_byte_ns: float
    replica_byte_ns: float
    shard_us: float
    forward_us: float
    backward_us: float
    memory_link_byte_ns: float = 0.045
    errors: Mapping[str, float] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if isinstance(value, (int, float)) and not 0 <= value < float("inf"):
                raise ConfigError(f"profile {self.name!r}: {each.name} is {value}. Give a finite number, at least 0")

    @classmethod
    def of_machine(cls, machine: Machine) -> Profile:
        """Coefficients from a data sheet: bandwidths at half (memory) and seven tenths (links) of their peak.

        What ids, shards and steps take on a CPU is rounded from calibrations of one machine; on a GPU it is assumed.
        """
        memory = 1e9 / (machine.memory_bandwidth * _OF_MEMORY_PEAK)
        link = 1e9 / (machine.host_link * _OF_LINK_PEAK)
        network = 1e9 / (machine.network * _OF_LINK_PEAK)
        gpu = machine.kind == "cuda"
        return cls(
            name=machine.name,
            source=machine.source,
            lookup_id_ns=0.05 if gpu else 5.0,
            row_byte_ns=memory,
            cache_bytes=machine.cache,
            update_id_ns=0.3 if gpu else 20.0,
            summed_id_ns=0.3 if gpu else 5.0,
            decode_ns=0.0,
            bag_ns=0.02 if gpu else 10.0,
            pooled_byte_ns=memory,
            route_id_ns=0.1 if gpu else 5.0,
            exchange_byte_ns=link,
            host_exchange_byte_ns=network,
            exchange_us=machine.latency * 1e6,
            reduce_byte_ns=2 * link,
            memory_link_byte_ns=1e9 / (machine.memory_link * _OF_LINK_PEAK),
            # Zeroed, filled, averaged and applied.
            replica_byte_ns=4 * memory,
            shard_us=1.0 if gpu else 20.0,
            forward_us=100.0 if gpu else 900.0,
            backward_us=100.0 if gpu else 150.0,
        )

    def to_json(self) -> dict[str, object]:
        """The profile as JSON-compatible data."""
        return {"format": _FORMAT, **asdict(self)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Profile:
        """The profile that :meth:`to_json` gave.

        Raises:
            ConfigError: naming what is missing, unknown or of the wrong kind.
        """
        if data.get("format") != _FORMAT:
            raise ConfigError(f"not a profile of format {_FORMAT} (format: {data.get('format')!r}). Calibrate again")
        values = {name: value for name, value in data.items() if name != "format"}
        known = {each.name: each for each in fields(cls)}
        unknown = values.keys() - known.keys()
        missing = known.keys() - values.keys() - {"errors", "memory_link_byte_ns"}
        if unknown or missing:
            what = [f"unknown: {', '.join(sorted(unknown))}"] * bool(unknown)
            what += [f"missing: {', '.join(sorted(missing))}"] * bool(missing)
            raise ConfigError(f"not a profile ({'; '.join(what)}). Calibrate again")
        for name, value in values.items():
            wanted: tuple[type, ...] = {"str": (str,), "float": (int, float)}.get(str(known[name].type), (dict,))
            if not isinstance(value, wanted) or isinstance(value, bool):
                raise ConfigError(f"not a profile: {name} is {value!r}. Calibrate again")
        return cls(**values)

    def save(self, path: str | Path) -> None:
        """Write the profile as JSON."""
        Path(path).write_text(json.dumps(self.to_json(), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Profile:
        """Read a profile that :meth:`save` wrote.

        Raises:
            ConfigError: if the file is not one. The message names the file.
        """
        try:
            data = read_json(path)
            return cls.from_json(data if isinstance(data, dict) else {})
        except (OSError, ConfigError) as error:
            raise ConfigError(f"{path}: {error}") from error
        except ValueError as error:
            raise ConfigError(f"{path}: not JSON ({error}). Give a file that shardrec calibrate wrote") from error

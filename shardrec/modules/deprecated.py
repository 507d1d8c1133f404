"""Deprecated parameters of :func:`shardrec.shard`, which work until the release after 0.1."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from shardrec.errors import ConfigError
from shardrec.modules.servers import Servers
from shardrec.replicas.replicas import Replicas

__all__ = ["records_of"]

_OF_REPLICAS = ("sync_every", "sync_optimizer")
_OF_SERVERS = ("staleness", "timeout_s")


def records_of(replicas: Any, servers: Any, former: Mapping[str, Any]) -> tuple[Replicas | None, Servers | None]:
    """The records for the arguments of :func:`shardrec.shard`, with a warning that names them if these are deprecated.

    Raises:
        TypeError: for an unknown parameter; for a deprecated one together with the record that replaces it.
        ConfigError: for ``sync_every`` without replicas.
    """
    for name in former:
        record = replicas if name in _OF_REPLICAS else servers
        if name not in (*_OF_REPLICAS, *_OF_SERVERS) or isinstance(record, (Replicas, Servers)):
            raise TypeError(f"shard() got an unexpected keyword argument {name!r}")
    averaging = {name: former[name] for name in _OF_REPLICAS if name in former}
    answering = {name: former[name] for name in _OF_SERVERS if name in former}
    if replicas is None and averaging.get("sync_every", 1) != 1:
        raise ConfigError(f"{averaging} without replicas; say how many copies of the tables there are")
    told = []
    if averaging or not isinstance(replicas, Replicas | None):
        told.append("replicas=shardrec.Replicas(count, sync_every=..., sync_optimizer=...)")
        replicas = None if replicas is None else Replicas(replicas, **averaging)
    if answering or not isinstance(servers, Servers | None):
        told.append("servers=shardrec.Servers(names, staleness=..., timeout_s=...)")
        servers = None if servers is None else Servers(servers, **answering)
    if told:
        names = ", ".join([*averaging, *answering]) or "a number or a list in its place"
        warnings.warn(f"shard() takes {' and '.join(told)}, not {names}", DeprecationWarning, stacklevel=3)
    return replicas, servers

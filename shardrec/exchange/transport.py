"""The transport between ranks: shared memory on the same host, the process group otherwise."""

from __future__ import annotations

import os
from functools import partial
from typing import Literal

import torch
import torch.distributed as dist

from shardrec.errors import ConfigError
from shardrec.exchange.collectives import Collectives, FunctionalCollectives, collectives_of
from shardrec.exchange.shared import handshake
from shardrec.exchange.shared.shared_memory import SharedCollectives
from shardrec.memory import keep_large_blocks

Transport = Literal["auto", "group"]
"""``auto``: shared memory between the ranks of a host that can share it. ``group``: the process group for all."""

_DEFAULT_TIMEOUT_S = 1800.0


def transport_of(
    group: dist.ProcessGroup | None, device: torch.device, transport: Transport | None = None
) -> Collectives:
    """The collectives for a model's exchanges. Every rank of ``group`` calls this.

    Args:
        group: default: the default group, or a single rank without one.
        device: of the tables. Only ranks with tables on the CPU share memory.
        transport: default: the environment variable ``SHARDREC_TRANSPORT``, or else ``auto``.

    Raises:
        ConfigError: for an unknown transport.
    """
    chosen = transport or os.environ.get("SHARDREC_TRANSPORT", "auto")
    if chosen not in ("auto", "group"):
        raise ConfigError(f"transport {chosen!r} is unknown. Give 'auto' (shared memory inside a host) or 'group'")
    if device.type == "cpu":
        keep_large_blocks()
    base = collectives_of(group)
    if device.type != "cpu" or not isinstance(base, FunctionalCollectives):
        return base
    # A rank that does not want shared memory still answers, so that the others do not wait for it.
    identity = handshake.host_identity if chosen == "auto" else str
    channel = handshake.connect(base.group, partial(timeout_s, base.group, device), identity=identity)
    return base if channel is None else SharedCollectives(base, channel)


def timeout_s(group: dist.ProcessGroup, device: torch.device) -> float:
    """Seconds that a collective of a process group may take."""
    try:
        return float(group._get_backend(device).options._timeout.total_seconds())
    except (AttributeError, RuntimeError):
        return _DEFAULT_TIMEOUT_S

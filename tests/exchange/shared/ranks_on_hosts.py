"""Collectives through shared memory, as if the ranks were on several hosts."""

from __future__ import annotations

import torch.distributed as dist

from shardrec.exchange.collectives import FunctionalCollectives, collectives_of
from shardrec.exchange.shared.handshake import connect, host_identity
from shardrec.exchange.shared.shared_memory import SharedCollectives


def shared(ranks_per_host: int | None = None, timeout_s: float = 60.0) -> SharedCollectives:
    """The collectives of the default group, as if each ``ranks_per_host`` ranks had a host of their own."""
    host = 0 if ranks_per_host is None else dist.get_rank() // ranks_per_host
    group = dist.group.WORLD
    assert group is not None
    channel = connect(group, lambda: timeout_s, identity=lambda: f"{host_identity()} {host}")
    assert channel is not None
    base = collectives_of()
    assert isinstance(base, FunctionalCollectives)
    return SharedCollectives(base, channel)

"""``shardrec.detect_anomaly``: find the table where NaN or Inf comes from."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from shardrec.errors import ConfigError
from shardrec.modules.collection import ShardedCollection

__all__ = ["detect_anomaly"]


@contextmanager
def detect_anomaly(model: nn.Module) -> Iterator[None]:
    """Raise at the step in which rows of a table, or their gradients, are NaN or Inf, on every rank.

    Rows are checked before they are sent to the requesting rank, and gradients before any table is updated, so that the
    tables are unchanged. Each check waits for the device and costs two small all-to-alls: use it for debugging, like
    ``torch.autograd.detect_anomaly``, which names the dense operator. Every rank must enter this context. It checks
    eager calls, and ``torch.compile`` in boundary mode; it does not check a scripted program, and raises for a traced
    one.

    Args:
        model: sharded.

    Raises:
        ConfigError: if nothing in the model is sharded.
        AnomalyError: inside, from forward or backward; names the table, the feature and the rank.
    """
    before = {one.context: one.context.detect_anomaly for one in model.modules() if isinstance(one, ShardedCollection)}
    if not before:
        raise ConfigError(f"{type(model).__name__} holds no sharded collection; shard it with shardrec.shard first")
    for context in before:
        context.detect_anomaly = True
    try:
        yield
    finally:
        for context, was in before.items():
            context.detect_anomaly = was

"""The error of this package; a part of the hierarchy in ``shardrec.errors``."""

from __future__ import annotations

from shardrec.errors import ShardrecError

__all__ = ["AwaitableError"]


class AwaitableError(ShardrecError, RuntimeError):
    """An awaitable used in a way that can never give its value, or would give it wrongly."""

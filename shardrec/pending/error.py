"""The error of ``shardrec.pending``; part of the hierarchy in ``shardrec.errors``."""

from __future__ import annotations

from shardrec.errors import ShardrecError

__all__ = ["AwaitableError"]


class AwaitableError(ShardrecError, RuntimeError):
    """An awaitable was used in a way that cannot return its value, or would return a wrong one."""

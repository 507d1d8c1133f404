"""The error of a pipeline that cannot continue with a batch."""

from __future__ import annotations

from shardrec.errors import ShardrecError

__all__ = ["PipelineError"]


class PipelineError(ShardrecError, RuntimeError):
    """A stage failed, on another rank if the traceback in the message says so, or a skip was not used as declared."""

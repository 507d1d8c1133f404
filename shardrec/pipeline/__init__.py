"""Pipelined stages, and skip connections between them.

::

    skip          stash(name, tensor) in one layer, pop(name) in a later one
    Pipeline      a sequential cut into stages, on several devices or ranks, between which micro-batches flow
"""

from shardrec.pipeline import skip
from shardrec.pipeline.balance import balance_by_size, balance_by_time
from shardrec.pipeline.error import PipelineError
from shardrec.pipeline.pipeline import Pipeline
from shardrec.pipeline.recompute import is_checkpointing, is_recomputing
from shardrec.pipeline.timeline import Timeline

__all__ = [
    "Pipeline",
    "PipelineError",
    "Timeline",
    "balance_by_size",
    "balance_by_time",
    "is_checkpointing",
    "is_recomputing",
    "skip",
]

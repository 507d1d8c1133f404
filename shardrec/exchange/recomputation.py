"""Whether a forward is computed again, for a backward, and what else a pipeline tells the forwards in it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class _InPipeline(threading.local):
    """Of the forward that runs on this thread.

    Attributes:
        checkpointing: it keeps no graph, and will be recomputed.
        recomputing: it is a recomputation.
        micro_batches: number of micro-batches that the mini-batch is cut into. 0 outside of a pipeline.
    """

    checkpointing = False
    recomputing = False
    micro_batches = 0


IN_PIPELINE = _InPipeline()


def is_checkpointing() -> bool:
    """Whether the forward that runs on this thread is a pipeline's that keeps no graph, and will be recomputed."""
    return IN_PIPELINE.checkpointing


def is_recomputing() -> bool:
    """Whether the forward that runs on this thread is a recomputation, for a backward.

    A layer that counts its calls, or updates a state in forward, should not do so in a recomputation.
    """
    return IN_PIPELINE.recomputing or torch._C._current_graph_task_id() >= 0


def recomputes_graph() -> bool:
    """In a recomputation: whether the forward before kept a graph, as in a checkpoint that is not reentrant.

    Such a checkpoint has hooks of its own. The forward before is not always the last one: an evaluation may lie between
    a forward and its backward.
    """
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks is not None and hooks[0].__module__ == "torch.utils.checkpoint"


@contextmanager
def in_pipeline(**told: int) -> Iterator[None]:
    """Tell the forwards inside the block some of :data:`IN_PIPELINE`."""
    before = {name: getattr(IN_PIPELINE, name) for name in told}
    vars(IN_PIPELINE).update(told)
    try:
        yield
    finally:
        vars(IN_PIPELINE).update(before)

"""Whether a forward is computed again, for a backward: by ``torch.utils.checkpoint`` or by a pipeline."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch


class _Flags(threading.local):
    checkpointing = False
    recomputing = False


_flags = _Flags()


def is_checkpointing() -> bool:
    """Whether the forward that runs on this thread is a pipeline's that keeps no graph, and will be recomputed."""
    return _flags.checkpointing


def is_recomputing() -> bool:
    """Whether the forward that runs on this thread is a recomputation, for a backward.

    A layer that counts its calls, or updates a state in forward, should not do so in a recomputation.
    """
    return _flags.recomputing or torch._C._current_graph_task_id() >= 0


def recomputes_graph() -> bool:
    """In a recomputation: whether the forward before kept a graph, as in a checkpoint that is not reentrant.

    Such a checkpoint has hooks of its own. The forward before is not always the last one: an evaluation may lie between
    a forward and its backward.
    """
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks is not None and hooks[0].__module__ == "torch.utils.checkpoint"


@contextmanager
def flagged(flag: Literal["checkpointing", "recomputing"]) -> Iterator[None]:
    """What layers of a pipeline are told inside the block."""
    before = getattr(_flags, flag)
    setattr(_flags, flag, True)
    try:
        yield
    finally:
        setattr(_flags, flag, before)

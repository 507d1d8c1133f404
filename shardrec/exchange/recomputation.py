"""Forwards that activation checkpointing computes twice: first for the output, and again for the backward."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Literal

import torch
from torch.utils.checkpoint import CheckpointFunction

__all__ = ["checkpoint_around", "flagged", "in_recomputation", "is_checkpointing", "is_recomputing"]


class _Flags(threading.local):
    checkpointing = False
    recomputing = False


_flags = _Flags()


def is_checkpointing() -> bool:
    """Whether the forward that runs on this thread is checkpointed: it keeps no graph, and will be recomputed."""
    return _flags.checkpointing


def is_recomputing() -> bool:
    """Whether the forward that runs on this thread is a recomputation, for a backward.

    A layer that counts its calls, or updates a state in forward, should not do so in a recomputation.
    """
    return _flags.recomputing


@contextmanager
def flagged(flag: Literal["checkpointing", "recomputing"]) -> Iterator[None]:
    """What layers are told inside the block."""
    before = getattr(_flags, flag)
    setattr(_flags, flag, True)
    try:
        yield
    finally:
        setattr(_flags, flag, before)


def in_recomputation() -> bool:
    """Whether a forward that runs now has run before: in a backward, or in a Pipeline's recomputation."""
    return torch._C._current_graph_task_id() >= 0 or is_recomputing()


def checkpoint_around() -> Any:
    """Of the first forward of torch's reentrant checkpoint, which keeps no graph, the context: it lives until the
    backward. Else None."""
    context: Any = None
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code is CheckpointFunction.forward.__code__:
            context = frame.f_locals["ctx"]  # the outermost is the one that lives
        frame = frame.f_back
    return context

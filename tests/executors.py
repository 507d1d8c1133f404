"""A sharded model as each executor runs it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import shardrec
from shardrec._torchscript import quiet

__all__ = ["EXECUTORS", "TRAINING", "executed"]


def _eager(model: Any) -> Any:
    return model


def _scripted(model: Any) -> Any:
    with quiet():
        return shardrec.script(model)


def _traced(model: Any) -> Any:
    torch._dynamo.reset()
    shardrec.annotate_for_dynamo(model, mode="traced")
    # The operators' backward in a compiler's graph is for tests/compile, which takes its time.
    return torch.compile(model, backend="eager", fullgraph=True, dynamic=True)


def _portable(model: Any) -> Any:
    """A program for inference; the model may go on training, and the program has its weights."""
    with quiet():
        program = shardrec.script(model.eval())
    model.train()
    return program


TRAINING: dict[str, Callable[[Any], Any]] = {"eager": _eager, "live script": _scripted, "traced": _traced}
EXECUTORS = {**TRAINING, "portable": _portable}


def executed(model: Any, executor: str) -> Any:
    """What to call in place of a sharded model.

    Args:
        model: a ``ShardedModel``.
        executor: a key of :data:`EXECUTORS`.
    """
    return EXECUTORS[executor](model)

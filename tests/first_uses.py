"""What a process does once, when it first uses a model in some way: compile classes, import, look operators up."""

from __future__ import annotations

import warnings
from collections.abc import Collection

import torch

import shardrec
from tests.executors import executed
from tests.rpc.jobs import batch, make_model

__all__ = ["use"]


def use(executors: Collection[str]) -> None:
    """Before ranks are forked from this process, so that none of them does it again.

    Without a backward, for autograd's engine does not survive a fork.

    Args:
        executors: keys of ``tests.executors.EXECUTORS``.
    """
    with warnings.catch_warnings(action="ignore"):
        for executor in executors:
            model = shardrec.shard(make_model("sgd"))
            executed(model, executor)(batch(0, 0))
    torch._dynamo.reset()

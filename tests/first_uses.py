"""What a process does once, when it first uses a model in each way: compile classes, import, look operators up.

Imported by the process that ranks are forked from, so that no rank does it again. Without a backward, for autograd's
engine does not survive a fork, and not where the compiler would look for CUDA's state, which does not either.
"""

from __future__ import annotations

import warnings

import torch

import shardrec
from tests.executors import EXECUTORS, executed
from tests.rpc.jobs import batch, make_model

__all__: list[str] = []


def _use() -> None:
    for executor in EXECUTORS:
        model = shardrec.shard(make_model("sgd"))
        executed(model, executor)(batch(0, 0))
    torch._dynamo.reset()


if not torch.backends.cuda.is_built():
    with warnings.catch_warnings(action="ignore"):
        _use()

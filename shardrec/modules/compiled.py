"""What torch.compile needs to be told during a step of a sharded model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

__all__ = ["compiled_step"]

_TRACED = {
    # The numbers of ids that the ranks tell each other become numbers in the graph.
    "capture_scalar_outputs": True,
    # So does the number of distinct ids.
    "capture_dynamic_output_shape_ops": True,
    # It cuts a graph by its parameters' sizes, to reduce gradients early; ours has collectives, and sizes made in it.
    "optimize_ddp": False,
}

_BOUNDARY = {
    # A break inside a module inside the model is one break, not one for each function that is on the stack.
    "nested_graph_breaks": True,
}


@contextmanager
def compiled_step(inputs: Any, *, traced: bool) -> Iterator[None]:
    """Dynamo's settings for a forward, undone after it; they count only if it is compiled.

    Args:
        inputs: the forward's arguments. For traced modules, their numbers of ids are marked as ones that change, which
            spares a compilation with the first batch's.
        traced: whether sharded modules are.
    """
    config = torch._dynamo.config
    settings = {name: value for name, value in (_TRACED if traced else _BOUNDARY).items() if hasattr(config, name)}
    if traced:
        _mark(inputs)
    with config.patch(settings):
        yield


def _mark(inputs: Any) -> None:
    for one in _jagged(inputs):
        weights = one.weights_or_none()
        for tensor in (one.values(), weights):
            if tensor is not None and tensor.dim() > 0 and tensor.size(0) > 1:
                torch._dynamo.maybe_mark_dynamic(tensor, 0)


def _jagged(value: Any) -> Iterator[KeyedJaggedTensor | JaggedTensor]:
    if isinstance(value, KeyedJaggedTensor | JaggedTensor):
        yield value
    elif isinstance(value, Tensor):
        return
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _jagged(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _jagged(item)

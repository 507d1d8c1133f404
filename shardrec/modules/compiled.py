"""Settings of torch.compile during a step of a sharded model."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

_TRACED = {
    # The numbers of ids that the ranks tell each other become numbers in the graph.
    "capture_scalar_outputs": True,
    # So does the number of distinct ids.
    "capture_dynamic_output_shape_ops": True,
}

_BOUNDARY = {
    # A break inside a module inside the model is one break, not one for each function that is on the stack.
    "nested_graph_breaks": True,
}


@contextmanager
def compiled_step(inputs: Any, *, traced: bool) -> Iterator[None]:
    """Dynamo's settings for a forward, restored after it. They have an effect only if it is compiled.

    Args:
        inputs: the forward's arguments. For traced modules, their numbers of ids are marked as dynamic, which avoids a
            compilation for the first batch's number.
        traced: whether sharded modules are traced.
    """
    config = torch._dynamo.config
    settings = {name: value for name, value in (_TRACED if traced else _BOUNDARY).items() if hasattr(config, name)}
    if traced:
        _mark(inputs)
    with config.patch(settings):
        yield


def _mark(inputs: Any) -> None:
    for leaf in leaves(inputs):
        if isinstance(leaf, KeyedJaggedTensor | JaggedTensor):
            for tensor in (leaf.values(), leaf.weights_or_none()):
                if tensor is not None and tensor.dim() > 0 and tensor.size(0) > 1:
                    torch._dynamo.maybe_mark_dynamic(tensor, 0)


def leaves(value: Any) -> list[Any]:
    """The leaves of a forward's arguments in mappings, lists, tuples and dataclasses. A jagged tensor is one leaf."""
    leaf_values, left = [], [value]
    while left:
        value = left.pop()
        if isinstance(value, list | tuple):
            left += reversed(value)
        elif isinstance(value, Tensor) or type(value) is KeyedJaggedTensor:
            leaf_values.append(value)
        elif isinstance(value, dict | Mapping):
            left += reversed(list(value.values()))
        elif dataclasses.is_dataclass(value):
            left += reversed([getattr(value, field.name, None) for field in dataclasses.fields(value)])
        else:
            leaf_values.append(value)
    return leaf_values

"""A remote collection for TorchScript: two Python operators around the eager lookup, and an Await between them.

A program of these needs the process that made it, which holds the connection to the servers; nothing of it is saved.
"""

from __future__ import annotations

from collections import OrderedDict
from itertools import count
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from shardrec.errors import ConfigError
from shardrec.pending import Await, awaitable

__all__ = ["RemoteBagsTwin", "RemoteSequencesTwin"]

_MOST_PENDING = 64
_NUMBERS = count()
_LIVE: WeakValueDictionary[int, Any] = WeakValueDictionary()

_LIBRARY = torch.library.Library("shardrec", "FRAGMENT")
_LIBRARY.define(
    "remote_lookup(str[] keys, Tensor values, Tensor lengths, Tensor? weights, int stride, int number) -> Tensor",
    tags=torch.Tag.cudagraph_unsafe,
)
_LIBRARY.define("remote_rows(Tensor ticket, int number) -> Tensor[]", tags=torch.Tag.cudagraph_unsafe)


class _Pending(OrderedDict[int, Any]):
    """What has been looked up and not been used yet, by ticket."""


def _collection(number: int) -> Any:
    found = _LIVE.get(number)
    if found is None:
        raise ConfigError("this scripted model looks up tables of a model that is gone; script it again")
    return found


def _lookup(
    keys: list[str], values: Tensor, lengths: Tensor, weights: Tensor | None, stride: int, number: int
) -> Tensor:
    collection = _collection(number)
    features = KeyedJaggedTensor(keys=keys, values=values, lengths=lengths, weights=weights, stride=stride)
    pending: _Pending = collection.__dict__.setdefault("_pending_scripted", _Pending())
    ticket = next(_NUMBERS)
    pending[ticket] = collection(features)
    while len(pending) > _MOST_PENDING:  # values that nobody uses
        pending.popitem(last=False)
    return torch.tensor(ticket)


def _rows(ticket: Tensor, number: int) -> list[Tensor]:
    value = _collection(number).__dict__["_pending_scripted"].pop(int(ticket)).wait()
    if isinstance(value, KeyedTensor):
        return [value.values()]
    return [
        part
        for one in value.values()
        for part in (one.values(), one.lengths(), one.weights_or_none())
        if part is not None
    ]


_LIBRARY.impl("remote_lookup", _lookup, "CompositeImplicitAutograd")
_LIBRARY.impl("remote_rows", _rows, "CompositeImplicitAutograd")


class _Twin(nn.Module):
    """What both have in common: the ids on their way.

    Args:
        collection: the eager module, which outlives this one.
    """

    def __init__(self, collection: Any) -> None:
        super().__init__()
        self.number = next(_NUMBERS)
        _LIVE[self.number] = collection
        for name, parameter in collection.named_parameters():  # of replicated tables
            self.register_parameter(name.replace(".", "_"), parameter)

    def begin(self, features: KeyedJaggedTensor) -> Tensor:
        """A ticket for the rows."""
        if features.variable_stride_per_key():
            raise RuntimeError("the features have a batch size each, which scripted models do not take")
        ticket: Tensor = torch.ops.shardrec.remote_lookup(
            features.keys(),
            features.values(),
            features.lengths(),
            features.weights_or_none(),
            features.stride(),
            self.number,
        )
        return ticket


class RemoteBagsTwin(_Twin):
    """The scripted twin of a :class:`RemoteEmbeddingBagCollection`."""

    def __init__(self, collection: Any) -> None:
        super().__init__(collection)
        self.keys: list[str] = list(collection._embedding_names)
        self.dims: list[int] = list(collection._dims)

    def forward(self, features: KeyedJaggedTensor) -> Await[KeyedTensor]:
        """Look up the local batch."""
        return awaitable(finish_bags, self.begin(features), self.number, self.keys, self.dims)


class RemoteSequencesTwin(_Twin):
    """The scripted twin of a :class:`RemoteEmbeddingCollection`."""

    def __init__(self, collection: Any) -> None:
        super().__init__(collection)
        self.names: list[str] = [one.output for one in collection._lookups]
        self.need_indices: bool = collection.need_indices()

    def forward(self, features: KeyedJaggedTensor) -> Await[dict[str, JaggedTensor]]:
        """Look up the local batch."""
        return awaitable(finish_sequences, self.begin(features), self.number, self.names, self.need_indices)


def finish_bags(ticket: Tensor, number: int, keys: list[str], dims: list[int]) -> KeyedTensor:
    """Wait for the rows."""
    found: list[Tensor] = torch.ops.shardrec.remote_rows(ticket, number)
    return KeyedTensor(keys, dims, found[0])


def finish_sequences(ticket: Tensor, number: int, names: list[str], need_indices: bool) -> dict[str, JaggedTensor]:
    """Wait for the rows."""
    found: list[Tensor] = torch.ops.shardrec.remote_rows(ticket, number)
    each = 3 if need_indices else 2
    output: dict[str, JaggedTensor] = {}
    for place, name in enumerate(names):
        indices: Tensor | None = None
        if need_indices:
            indices = found[each * place + 2]
        output[name] = JaggedTensor(values=found[each * place], lengths=found[each * place + 1], weights=indices)
    return output

"""Deferred values: outputs in compiled code that are waited for at their first use.

An eager model gets a ``LazyAwaitable`` from a sharded module, which waits in ``__getattr__`` and similar methods, with
locks. A tracer cannot trace that. So compiled code gets values of the unsharded module's type. Their methods get the
tensors at their first use. In boundary mode the first use is a graph break::

    compiled       x = bottom(dense)
    eager          emb = model.embeddings(ids)      graph break: the exchange is issued, and under way
    compiled       y = middle(x)                    while the rows travel
    eager          emb.values()                     graph break: the first use waits
    compiled       top(y, emb.values())

and in traced mode it is the position of an operator in the graph.

A dict of rows per id is waited for immediately in boundary mode. Models take it apart in loops, and dynamo gives up on
a whole function that has a graph break in a loop. (The same happens if the *first* use of a KeyedTensor is in a loop:
call ``.values()`` or ``.to_dict()`` before it.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedTensor


class Deferred:
    """A module's output, which a function computes at its first use."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self._function = function
        self._args = args
        self._output: Any = None

    def wait(self) -> Any:
        """The output."""
        if self._output is None:
            self._output = self._function(*self._args)
        return self._output


class DeferredKeyedTensor(KeyedTensor):  # type: ignore[misc]  # torchrec has no types
    """A KeyedTensor that waits for its values at its first use."""

    def __init__(self, pending: Deferred, keys: list[str], dims: list[int]) -> None:
        # The attributes that KeyedTensor's __init__ sets, without the values: dynamo of torch 2.11 does not call a
        # property's setter, and uses the assigned value instead of the property.
        self._pending = pending
        self._keys = keys
        self._length_per_key = dims
        self._key_dim = 1
        self._offset_per_key = None
        self._index_per_key = None

    def values(self) -> Tensor:
        """(B, D) values. Waits for them the first time."""
        values: Tensor = self._pending.wait().values()
        return values

    @property
    def _values(self) -> Tensor:
        # Where KeyedTensor's own methods look for them.
        return self.values()


class DeferredJaggedTensor(JaggedTensor):  # type: ignore[misc]  # torchrec has no types
    """A JaggedTensor that waits for its values at its first use.

    Args:
        pending: of the dict that it is in.
        name: key of the output.
        lengths: (B,) rows per sample.
    """

    def __init__(self, pending: Deferred, name: str, lengths: Tensor) -> None:
        # The attributes that JaggedTensor's __init__ sets, without the values: see DeferredKeyedTensor.
        self._pending = pending
        self._name = name
        self._lengths = lengths
        self._offsets = None

    @property
    def _values(self) -> Tensor:
        # Where JaggedTensor's own methods look for them.
        values: Tensor = self._pending.wait()[self._name]._values
        return values

    @property
    def _weights(self) -> Tensor | None:
        weights: Tensor | None = self._pending.wait()[self._name]._weights
        return weights

"""Values in compiled code that are waited for at their first use.

An eager model gets a ``LazyAwaitable`` from a sharded module, which waits in ``__getattr__`` and the like, with locks
and threads in mind. A tracer gets lost there. So compiled code gets values of the unsharded module's kind, whose
methods ask for the tensors at their first use. In boundary mode that is a graph break::

    compiled       x = bottom(dense)
    eager          emb = model.embeddings(ids)      graph break: the exchange is issued, and under way
    compiled       y = middle(x)                    while the rows travel
    eager          emb.values()                     graph break: the first use waits
    compiled       top(y, emb.values())

and in traced mode the place of an operator in the graph.

A dict of rows per id is waited for at once in boundary mode. Models take it apart in loops, and dynamo gives up on a
whole function that has a graph break in a loop. (So, too, where the *first* use of a KeyedTensor is in a loop: take
``.values()`` or ``.to_dict()`` before it.)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedTensor

from shardrec._dynamo import left_alone
from shardrec.pending import LazyAwaitable

if TYPE_CHECKING:
    from shardrec.modules.collection import ShardedCollection

__all__ = ["LateJaggedTensor", "LateKeyedTensor", "look_up_outside"]


@left_alone
def look_up_outside(collection: ShardedCollection, features: Any) -> Any:
    """An eager lookup whose value goes on into compiled code: a KeyedTensor, or a dict of JaggedTensors."""
    pending = collection(features)
    columns = collection.late_columns()
    return pending.wait() if columns is None else LateKeyedTensor(_Outside(pending), *columns)


@left_alone
def _waited(pending: LazyAwaitable[Any]) -> Any:
    return pending.wait()


class _Outside:
    """Columns of an eager lookup."""

    def __init__(self, pending: LazyAwaitable[KeyedTensor]) -> None:
        self._pending = pending

    def wait(self) -> Tensor:
        values: Tensor = _waited(self._pending).values()
        return values


class _Columns(Protocol):
    def wait(self) -> Tensor:
        """(B, D) values."""


class _Rows(Protocol):
    def wait(self, name: str) -> JaggedTensor:
        """One output's rows."""


class LateKeyedTensor(KeyedTensor):  # type: ignore[misc]  # torchrec has no types
    """A KeyedTensor whose values are waited for when they are first asked for.

    Args:
        pending: gives them.
        keys: output keys.
        dims: columns of each key.
    """

    def __init__(self, pending: _Columns, keys: list[str], dims: list[int]) -> None:
        # What KeyedTensor's own would set, less the values: dynamo of torch 2.11 does not call a property's setter, and
        # takes what was assigned for the property's value.
        self._pending = pending
        self._arrived: Tensor | None = None
        self._keys = keys
        self._length_per_key = dims
        self._key_dim = 1
        self._offset_per_key = None
        self._index_per_key = None

    def values(self) -> Tensor:
        """(B, D) values; waits for them the first time."""
        if self._arrived is None:
            self._arrived = self._pending.wait()
        return self._arrived

    @property
    def _values(self) -> Tensor:
        # Where KeyedTensor's own methods look for them.
        return self.values()


class LateJaggedTensor(JaggedTensor):  # type: ignore[misc]  # torchrec has no types
    """A JaggedTensor whose values are waited for when they are first asked for.

    Args:
        pending: gives it.
        name: key of the output.
        lengths: (B,) rows of each sample.
    """

    def __init__(self, pending: _Rows, name: str, lengths: Tensor) -> None:
        # What JaggedTensor's own would set, less the values: see LateKeyedTensor.
        self._pending = pending
        self._name = name
        self._lengths = lengths
        self._offsets = None

    @property
    def _values(self) -> Tensor:
        # Where JaggedTensor's own methods look for them.
        values: Tensor = self._pending.wait(self._name)._values
        return values

    @property
    def _weights(self) -> Tensor | None:
        weights: Tensor | None = self._pending.wait(self._name)._weights
        return weights

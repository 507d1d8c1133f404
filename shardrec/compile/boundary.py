"""The boundary between compiled code and an eager lookup, and the values that cross it.

::

    compiled       x = bottom(dense)
    eager          emb = model.embeddings(ids)      graph break: the exchange is issued, and under way
    compiled       y = middle(x)                    while the rows travel
    eager          emb.values()                     graph break: the first use waits
    compiled       top(y, emb.values())

An eager model gets a ``LazyAwaitable`` from a sharded module, which waits in ``__getattr__`` and the like, with locks
and threads in mind. A tracer gets lost there. So compiled code gets a value of the unsharded module's kind, whose
methods ask for the tensor at their first use, in a function that tracers are told to leave alone.

A dict of rows per id is waited for at once. Models take it apart in loops, and dynamo gives up on a whole function that
has a graph break in a loop. (So, too, where the *first* use of a KeyedTensor is in a loop: take ``.values()`` or
``.to_dict()`` before it.)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedTensor

from shardrec.compile.frames import left_alone
from shardrec.pending import LazyAwaitable

if TYPE_CHECKING:
    from shardrec.modules.collection import ShardedCollection

__all__ = ["LateKeyedTensor", "look_up_outside"]


@left_alone
def look_up_outside(collection: ShardedCollection, features: Any) -> Any:
    """An eager lookup whose value goes on into compiled code: a KeyedTensor, or a dict of JaggedTensors."""
    pending = collection(features)
    columns = collection.late_columns()
    return pending.wait() if columns is None else LateKeyedTensor(pending, *columns)


@left_alone
def _waited(pending: LazyAwaitable[Any]) -> Any:
    return pending.wait()


class LateKeyedTensor(KeyedTensor):  # type: ignore[misc]  # torchrec has no types
    """A KeyedTensor whose values are waited for when they are first asked for.

    Args:
        pending: gives the KeyedTensor.
        keys: output keys.
        dims: columns of each key.
    """

    def __init__(self, pending: LazyAwaitable[KeyedTensor], keys: list[str], dims: list[int]) -> None:
        self._pending = pending
        self._arrived: Tensor | None = None
        super().__init__(keys, dims, torch.empty(0))
        self._arrived = None

    def values(self) -> Tensor:
        """(B, D) values; waits for them the first time."""
        if self._arrived is None:
            self._arrived = _waited(self._pending).values()
        return self._arrived

    @property
    def _values(self) -> Tensor:
        # Where KeyedTensor's own methods look for them.
        return self.values()

    @_values.setter
    def _values(self, values: Tensor) -> None:
        self._arrived = values

"""The pending output of a sharded embedding bag collection."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedTensor

from shardrec.exchange.blocks import BlocksInFlight
from shardrec.exchange.queue import QueuedCall
from shardrec.pending import LazyAwaitable

if TYPE_CHECKING:
    _Base = LazyAwaitable[KeyedTensor]
else:
    _Base = LazyAwaitable

__all__ = ["PooledEmbeddings"]


class PooledEmbeddings(_Base):
    """A KeyedTensor whose all-to-all is under way, or about to be; it waits at first use.

    Args:
        queued: the call.
        finish: puts the (B, D) values together, from the exchange and the number of the call's stream in it.
        keys: output keys.
        dims: columns of each key.
    """

    def __init__(
        self,
        *,
        queued: QueuedCall,
        finish: Callable[[BlocksInFlight, int], Tensor],
        keys: Sequence[str],
        dims: Sequence[int],
    ) -> None:
        super().__init__()
        self._queued = queued
        self._finish = finish
        self._keys = list(keys)
        self._dims = list(dims)

    def _wait_impl(self) -> KeyedTensor:
        flight, stream = self._queued.flight()
        with self._queued.mode():
            values = self._finish(flight, stream)
        return KeyedTensor(keys=self._keys, length_per_key=self._dims, values=values)

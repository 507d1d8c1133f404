"""The pending output of a sharded embedding bag collection."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
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

__all__ = ["OutputColumns", "PooledEmbeddings"]


@dataclass(frozen=True, kw_only=True)
class OutputColumns:
    """Keys of a KeyedTensor, and the columns of each."""

    keys: tuple[str, ...]
    dims: tuple[int, ...]


class PooledEmbeddings(_Base):
    """A KeyedTensor whose all-to-all is under way, or about to be; it waits at first use.

    Args:
        queued: the call.
        finish: puts the (B, D) values together, from the exchange and the number of the call's stream in it.
        columns: keys of the output and the columns of each.
    """

    def __init__(
        self,
        *,
        queued: QueuedCall,
        finish: Callable[[BlocksInFlight, int], Tensor],
        columns: OutputColumns,
    ) -> None:
        super().__init__()
        self._queued = queued
        self._finish = finish
        self._columns = columns

    def _wait_impl(self) -> KeyedTensor:
        flight, stream = self._queued.flight()
        with self._queued.mode():
            values = self._finish(flight, stream)
        return KeyedTensor(keys=list(self._columns.keys), length_per_key=list(self._columns.dims), values=values)

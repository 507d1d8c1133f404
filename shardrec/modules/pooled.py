"""The pending output of a sharded embedding bag collection."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torchrec.sparse.jagged_tensor import KeyedTensor

from shardrec.exchange.step import Call
from shardrec.pending import LazyAwaitable

if TYPE_CHECKING:
    _Base = LazyAwaitable[KeyedTensor]
else:
    _Base = LazyAwaitable

__all__ = ["PooledEmbeddings"]


class PooledEmbeddings(_Base):
    """A KeyedTensor whose all-to-all is under way, or about to be; it waits at first use.

    Args:
        call: gives the (B, D) values.
        keys: of the output.
        dims: columns of each.
    """

    def __init__(self, call: Call, *, keys: Sequence[str], dims: Sequence[int]) -> None:
        super().__init__()
        self._call = call
        self._keys = keys
        self._dims = dims

    def _wait_impl(self) -> KeyedTensor:
        return KeyedTensor(keys=list(self._keys), length_per_key=list(self._dims), values=self._call.value())

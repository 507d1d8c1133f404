"""The pending output of a sharded embedding bag collection."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedTensor

from shardrec.awaitable import LazyAwaitable
from shardrec.exchange.output import OutputExchange, PendingOutput

if TYPE_CHECKING:
    _Base = LazyAwaitable[KeyedTensor]
else:
    _Base = LazyAwaitable

__all__ = ["PooledEmbeddings"]


class PooledEmbeddings(_Base):
    """A KeyedTensor whose all-to-all is under way; it waits at first use.

    Args:
        exchange: the module's output exchange.
        token: carries the gradient's way back.
        pending: the all-to-all under way.
        replicated: (B, D_r) pooled columns of replicated tables, or None.
        lengths: (B, D) number of ids behind each mean-pooled column, 1 for sums; None without mean pooling.
        keys: output keys.
        dims: columns of each key.
    """

    def __init__(
        self,
        *,
        exchange: OutputExchange,
        token: Tensor,
        pending: PendingOutput,
        replicated: Tensor | None,
        lengths: Tensor | None,
        keys: Sequence[str],
        dims: Sequence[int],
    ) -> None:
        super().__init__()
        self._exchange = exchange
        self._token = token
        self._pending = pending
        self._replicated = replicated
        self._lengths = lengths
        self._keys = list(keys)
        self._dims = list(dims)
        self._with_gradients = torch.is_grad_enabled()

    def _wait_impl(self) -> KeyedTensor:
        # The value belongs to the forward that made it, whatever the mode it is first used in.
        with torch.set_grad_enabled(self._with_gradients):
            values = self._exchange.finish(self._token, self._pending, self._replicated)
            if self._lengths is not None:
                values = values / self._lengths
        return KeyedTensor(keys=self._keys, length_per_key=self._dims, values=values)

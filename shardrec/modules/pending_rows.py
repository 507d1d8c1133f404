"""The pending output of a sharded embedding collection."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import JaggedTensor

from shardrec.awaitable import LazyAwaitable, LazyGetItemMixin
from shardrec.exchange.rows import PendingRows, RowExchange

if TYPE_CHECKING:

    class _Base(LazyGetItemMixin[str, JaggedTensor], LazyAwaitable[dict[str, JaggedTensor]]): ...
else:

    class _Base(LazyGetItemMixin, LazyAwaitable):
        pass


__all__ = ["SequenceEmbeddings", "SequenceKey"]


class SequenceKey:
    """One entry of the output.

    Args:
        name: key of the output dict.
        ids: (N_f,) ids of the feature.
        lengths: (B,) ids per sample.
        replica: (N_f, D) rows, where the table is replicated; else None.
    """

    __slots__ = ("ids", "lengths", "name", "replica")

    def __init__(self, *, name: str, ids: Tensor, lengths: Tensor, replica: Tensor | None) -> None:
        self.name = name
        self.ids = ids
        self.lengths = lengths
        self.replica = replica


class SequenceEmbeddings(_Base):
    """A dict of JaggedTensors whose all-to-all is under way; it waits at first use, of ``pending["f"]`` too.

    Args:
        exchange: the module's row exchange.
        token: carries the gradient's way back.
        pending: the all-to-all under way.
        inverse: (N,) place of each id's row among the rows that come back, or None if they are in place.
        entries: the output's keys, in order.
        need_indices: give each JaggedTensor its ids as weights.
    """

    def __init__(
        self,
        *,
        exchange: RowExchange,
        token: Tensor,
        pending: PendingRows,
        inverse: Tensor | None,
        entries: Sequence[SequenceKey],
        need_indices: bool,
    ) -> None:
        super().__init__()
        self._exchange = exchange
        self._token = token
        self._pending = pending
        self._inverse = inverse
        self._entries = list(entries)
        self._need_indices = need_indices
        self._with_gradients = torch.is_grad_enabled()

    def _wait_impl(self) -> dict[str, JaggedTensor]:
        # The value belongs to the forward that made it, whatever the mode it is first used in.
        with torch.set_grad_enabled(self._with_gradients):
            rows = self._exchange.finish(self._token, self._pending)
            if self._inverse is not None:
                rows = rows.index_select(0, self._inverse)
            sizes = [entry.ids.numel() for entry in self._entries if entry.replica is None]
            parts = iter(rows.split(sizes))
            return {
                entry.name: JaggedTensor(
                    values=next(parts) if entry.replica is None else entry.replica,
                    lengths=entry.lengths,
                    weights=entry.ids if self._need_indices else None,
                )
                for entry in self._entries
            }

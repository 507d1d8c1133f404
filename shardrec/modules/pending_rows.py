"""The pending output of a sharded embedding collection."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor
from torchrec.sparse.jagged_tensor import JaggedTensor

from shardrec.exchange.step import Call
from shardrec.pending import LazyAwaitable, LazyGetItemMixin

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
    """A dict of JaggedTensors whose all-to-all is under way, or about to be; it waits at first use, of ``pending["f"]``
    too.

    Args:
        call: gives the (N, D) rows of the cut tables' lookups and the output's entries.
        need_indices: give each JaggedTensor its ids as weights.
    """

    def __init__(self, call: Call, *, need_indices: bool) -> None:
        super().__init__()
        self._call = call
        self._need_indices = need_indices

    def _wait_impl(self) -> dict[str, JaggedTensor]:
        rows, entries = self._call.value()
        with self._call.mode():
            parts = iter(rows.split([entry.ids.numel() for entry in entries if entry.replica is None]))
            return {
                entry.name: JaggedTensor(
                    values=next(parts) if entry.replica is None else entry.replica,
                    lengths=entry.lengths,
                    weights=entry.ids if self._need_indices else None,
                )
                for entry in entries
            }

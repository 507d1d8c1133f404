"""The lookups whose optimizer is Python code, as an operator that TorchScript can call.

Used while a scripted model trains, for what fbgemm's kernels cannot do (see :mod:`shardrec.lookup.groups`). The
operator is Python's, so a file that was saved with it needs shardrec to be loaded, and the tables that it knows to be
there still: to save a model for other programs, script it in eval mode, in which such tables are only looked up.
"""

from __future__ import annotations

from itertools import count
from typing import Protocol
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from shardrec.errors import ConfigError

__all__ = ["RowsLookup"]


class Lookup(Protocol):
    """What a scripted model calls back to."""

    def look_up(self, ids: Tensor, lengths: Tensor, weights: Tensor | None) -> Tensor:
        """(B_all, D) pooled columns or (N, w) rows, of ids (N,), lengths (S, B_all) and weights (N,) or None."""


_NUMBERS = count()

_LIBRARY = torch.library.Library("shardrec", "FRAGMENT")
_LIBRARY.define(
    "look_up_rows(Tensor ids, Tensor lengths, Tensor? weights, int number) -> Tensor",
    tags=torch.Tag.cudagraph_unsafe,
)

_LIVE: WeakValueDictionary[int, Lookup] = WeakValueDictionary()


def _look_up_rows(ids: Tensor, lengths: Tensor, weights: Tensor | None, number: int) -> Tensor:
    lookup = _LIVE.get(number)
    if lookup is None:
        raise ConfigError(
            "this scripted model updates tables of a model that is gone; script it again with shardrec.script, in eval "
            "mode if it is to be saved"
        )
    return lookup.look_up(ids, lengths, weights)


_LIBRARY.impl("look_up_rows", _look_up_rows, "CompositeImplicitAutograd")


class RowsLookup(nn.Module):
    """Calls back to a lookup whose backward updates its tables.

    Args:
        lookup: is not kept alive by this.
    """

    def __init__(self, lookup: Lookup) -> None:
        super().__init__()
        self.number = next(_NUMBERS)
        _LIVE[self.number] = lookup

    def forward(self, ids: Tensor, lengths: Tensor, weights: Tensor | None) -> Tensor:
        """(B_all, D) or (N, w) float32."""
        rows: Tensor = torch.ops.shardrec.look_up_rows(ids, lengths, weights, self.number)
        return rows

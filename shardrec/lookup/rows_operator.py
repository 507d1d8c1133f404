"""The lookups whose optimizer is Python code, as an operator that TorchScript can call.

Used while a scripted model trains, for what fbgemm's kernels cannot do (see :mod:`shardrec.lookup.groups`). The
operator is Python's, so a file that was saved with it needs shardrec to be loaded, and the tables that it knows to be
there still: to save a model for other programs, script it in eval mode, in which such tables are only looked up.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from shardrec.errors import ConfigError

__all__ = ["RowsLookup"]

Look = Callable[[Tensor, Tensor, Tensor | None], Tensor]

_NUMBERS = count()

_LIBRARY = torch.library.Library("shardrec", "FRAGMENT")
_LIBRARY.define(
    "look_up_rows(Tensor ids, Tensor lengths, Tensor? weights, int number) -> Tensor",
    tags=torch.Tag.cudagraph_unsafe,
)


_LIVE: WeakValueDictionary[int, Look] = WeakValueDictionary()
"""Lookups, for as long as their owners live."""


def _look_up_rows(ids: Tensor, lengths: Tensor, weights: Tensor | None, number: int) -> Tensor:
    look_up = _LIVE.get(number)
    if look_up is None:
        raise ConfigError(
            "this scripted model updates tables of a model that is gone; script it again with shardrec.script, in eval "
            "mode if it is to be saved"
        )
    return look_up(ids, lengths, weights)


_LIBRARY.impl("look_up_rows", _look_up_rows, "CompositeImplicitAutograd")


class RowsLookup(nn.Module):
    """Calls back to a lookup whose backward updates its tables.

    Args:
        look_up: takes ids (N,), lengths (S, B_all), weights (N,) or None; gives pooled columns or rows.
        owner: keeps the lookup alive.
    """

    def __init__(self, look_up: Look, owner: object) -> None:
        super().__init__()
        self.number = next(_NUMBERS)
        _LIVE[self.number] = look_up
        owner.__dict__.setdefault("_scripted_lookups", []).append(look_up)

    def forward(self, ids: Tensor, lengths: Tensor, weights: Tensor | None) -> Tensor:
        """(B_all, D) or (N, w) float32."""
        rows: Tensor = torch.ops.shardrec.look_up_rows(ids, lengths, weights, self.number)
        return rows

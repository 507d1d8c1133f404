"""Blocks of pooled columns with a batch size per slot.

::

    padded (B, sum of columns)       stripped
    │ a a │ b │ c c c │              a (2, 2) | b (3, 1) | c (1, 3), one after the other
    │ a a │ b │ 0 0 0 │
    │ 0 0 │ b │ 0 0 0 │
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shardrec.exchange.wire_format import Shape


@dataclass(frozen=True, kw_only=True)
class Ragged:
    """The shape of such a block.

    Args:
        rows: B, at least the largest size.
        sizes: batch size per slot.
        columns: columns per slot.
    """

    rows: int
    sizes: Sequence[int]
    columns: Sequence[int]

    @property
    def shapes(self) -> list[Shape]:
        """(rows, columns) per slot."""
        return list(zip(self.sizes, self.columns, strict=True))

    def strip(self, padded: Tensor) -> Tensor:
        """Flat, from (B, sum of columns): each slot's own rows, slot after slot."""
        parts = padded.split(list(self.columns), dim=1)
        flats = [part[:size].reshape(-1) for part, size in zip(parts, self.sizes, strict=True)]
        return torch.cat(flats) if flats else padded.reshape(-1)

    def pad(self, flat: Tensor) -> Tensor:
        """(B, sum of columns), from flat. Zeros where a slot lacks a row."""
        padded = flat.new_zeros((self.rows, sum(self.columns)))
        parts = flat.split([size * columns for size, columns in self.shapes])
        start = 0
        for part, (size, columns) in zip(parts, self.shapes, strict=True):
            padded[:size, start : start + columns] = part.view(size, columns)
            start += columns
        return padded

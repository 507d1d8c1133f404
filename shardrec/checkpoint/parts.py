"""Tensors in parts that are spread over ranks, as a checkpoint holds them.

Every tensor is taken as a matrix: of its first dimension and all the others, (R, C) for shape (R, ...), (n, 1) for (n,)
and (1, 1) for (). A part is a rectangle of it. So tables cut in any way, states kept per row, FSDP2's parameters and
unsharded tensors are handled in the same way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from shardrec.errors import ConfigError
from shardrec.layout import Shard


class Rect(NamedTuple):
    """Rows ``[row_start, row_end)`` and columns ``[col_start, col_end)`` of a matrix."""

    row_start: int
    row_end: int
    col_start: int
    col_end: int

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Self:
        """All of a tensor."""
        return cls(0, shape[0] if shape else 1, 0, math.prod(shape[1:]))

    @classmethod
    def of(cls, shard: Shard) -> Self:
        """A shard's place in its table."""
        return cls(shard.row_start, shard.row_end, shard.col_start, shard.col_end)

    @property
    def cols(self) -> int:
        """Number of columns."""
        return self.col_end - self.col_start

    @property
    def numel(self) -> int:
        """Number of values."""
        return (self.row_end - self.row_start) * self.cols

    def common(self, other: Rect) -> Rect | None:
        """The intersection. None if it is empty."""
        top, left = max(self.row_start, other.row_start), max(self.col_start, other.col_start)
        bottom, right = min(self.row_end, other.row_end), min(self.col_end, other.col_end)
        return Rect(top, bottom, left, right) if top < bottom and left < right else None

    def rows_in(self, outer: Rect) -> slice:
        """These rows, counted from the first of ``outer``."""
        return slice(self.row_start - outer.row_start, self.row_end - outer.row_start)

    def cols_in(self, outer: Rect) -> slice:
        """These columns, counted from the first of ``outer``."""
        return slice(self.col_start - outer.col_start, self.col_end - outer.col_start)


@dataclass(frozen=True, kw_only=True)
class Part:
    """A part of a tensor on a rank.

    Args:
        rect: its position.
        values: this rank's memory; of the shape of the rectangle, or of the tensor. On meta if rows are encoded.
        saved: whether this rank writes it.
        encode: gives the rows to be written by their numbers, counted from the first, if they are not in memory so.
    """

    rect: Rect
    values: Tensor
    saved: bool
    encode: Callable[[slice | Tensor], Tensor] | None = None

    def blocks(self, rows: Tensor | None, most_bytes: int) -> Iterator[Tensor]:
        """All rows, or those with the numbers ``rows`` (n,), in blocks of at most ``most_bytes``, or of one row."""
        matrix = as_matrix(self.values)
        length = max(1, most_bytes // (matrix.size(1) * matrix.itemsize))
        for start in range(0, len(matrix) if rows is None else len(rows), length):
            block: slice | Tensor = slice(start, start + length)
            if rows is not None:
                block = rows[block].to(matrix.device if self.encode is None else "cpu")
            yield matrix[block] if self.encode is None else self.encode(block)


@dataclass(frozen=True, kw_only=True)
class HeldTensor:
    """A tensor of the model. This rank holds some of its parts.

    Args:
        shape: of the whole.
        dtype: of the values.
        parts: this rank's. Possibly none.
        rows_of: the name of the table that its rows belong to, so that they change together. "" if changes are
            not tracked by row.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: tuple[Part, ...]
    rows_of: str = ""


def held(tensor: Tensor, *, saved: bool) -> HeldTensor:
    """A tensor that is equal on every rank, or that FSDP2 has sharded.

    Args:
        tensor: this rank's.
        saved: whether this rank writes it, if it is equal on all ranks.

    Raises:
        ConfigError: if it is sharded in a dimension other than the first.
    """
    shape, values, rect = tuple(tensor.shape), tensor.detach(), Rect.whole(tensor.shape)
    if isinstance(values, DTensor):
        mesh, placements = values.device_mesh, values.placements
        size, offset = compute_local_shape_and_global_offset(shape, mesh, placements)
        if size[1:] != shape[1:]:
            raise ConfigError(
                f"a tensor of shape {shape} is sharded in another dimension than the first ({placements}), which a "
                "checkpoint cannot hold. Let shardrec.shard(..., dense='fsdp') shard the dense part"
            )
        values = values.to_local()
        if shape:
            rect = rect._replace(row_start=offset[0], row_end=offset[0] + size[0])
        coordinate = mesh.get_coordinate() or ()
        saved = not any(place for place, kind in zip(coordinate, placements, strict=False) if not kind.is_shard())
    parts = (Part(rect=rect, values=values, saved=saved),) if values.numel() else ()
    return HeldTensor(shape=shape, dtype=tensor.dtype, parts=parts)


def as_matrix(tensor: Tensor) -> Tensor:
    """A tensor as a matrix: a view, or a copy if its strides allow none."""
    return tensor.reshape(-1, 1) if tensor.dim() < 2 else tensor.flatten(1)

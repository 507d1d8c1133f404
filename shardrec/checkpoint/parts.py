"""A tensor in parts, each on some rank: what a checkpoint holds of a model.

Every tensor is taken as a matrix: of its first dimension and all the others, (R, C) for shape (R, ...), (n, 1) for (n,)
and (1, 1) for (). A part is a rectangle of it. So tables cut in any way, states kept per row, FSDP2's parameters and
whole tensors are one thing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from shardrec.errors import ConfigError
from shardrec.layout import Shard

__all__ = ["HeldTensor", "Part", "Rect", "as_matrix", "held", "local_part"]


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
    def rows(self) -> int:
        """Number of rows."""
        return self.row_end - self.row_start

    @property
    def cols(self) -> int:
        """Number of columns."""
        return self.col_end - self.col_start

    def common(self, other: Rect) -> Rect | None:
        """What both have; None for nothing."""
        found = Rect(
            max(self.row_start, other.row_start),
            min(self.row_end, other.row_end),
            max(self.col_start, other.col_start),
            min(self.col_end, other.col_end),
        )
        return found if found.rows > 0 and found.cols > 0 else None


@dataclass(frozen=True, kw_only=True)
class Part:
    """What a rank holds of a tensor.

    Args:
        rect: where.
        values: this rank's memory; of the shape of the rectangle, or of the tensor.
        saved: this rank is the one that writes it.
    """

    rect: Rect
    values: Tensor
    saved: bool


@dataclass(frozen=True, kw_only=True)
class HeldTensor:
    """A tensor of the model, of which this rank holds some parts.

    Args:
        shape: of the whole.
        dtype: of the values.
        parts: this rank's; possibly none.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: tuple[Part, ...]


def held(tensor: Tensor, *, saved: bool) -> HeldTensor:
    """A tensor that every rank has alike, or that FSDP2 has sharded.

    Args:
        tensor: this rank's.
        saved: this rank writes it, if all ranks have it alike.
    """
    part = local_part(tensor, saved=saved)
    return HeldTensor(shape=tuple(tensor.shape), dtype=tensor.dtype, parts=() if part is None else (part,))


def local_part(tensor: Tensor, *, saved: bool) -> Part | None:
    """This rank's part of a tensor as :func:`held` takes it; None where it has nothing of it."""
    if not isinstance(tensor, DTensor):
        return Part(rect=Rect.whole(tensor.shape), values=tensor.detach(), saved=saved) if tensor.numel() else None
    mesh = tensor.device_mesh
    size, offset = compute_local_shape_and_global_offset(tensor.shape, mesh, tensor.placements)
    if not math.prod(size):
        return None
    if tuple(size[2:]) != tuple(tensor.shape[2:]) or (tensor.dim() > 2 and size[1] != tensor.size(1)):
        raise ConfigError(
            f"a tensor of shape {tuple(tensor.shape)} is sharded in another dimension than the first "
            f"({tensor.placements}); shard the dense part with dense='fsdp'"
        )
    start = [*offset, 0, 0]
    cols = math.prod(size[1:])
    rect = Rect(start[0], start[0] + (size[0] if size else 1), start[1], start[1] + cols)
    coordinate = mesh.get_coordinate()
    assert coordinate is not None, "a rank that has a part is in the mesh"
    copies = [place for place, kind in zip(coordinate, tensor.placements, strict=True) if not kind.is_shard()]
    return Part(rect=rect, values=tensor.to_local().detach(), saved=not any(copies))


def as_matrix(tensor: Tensor) -> Tensor:
    """A tensor as a matrix: a view, or a copy if its strides allow none."""
    return tensor.reshape(-1, 1) if tensor.dim() < 2 else tensor.flatten(1)

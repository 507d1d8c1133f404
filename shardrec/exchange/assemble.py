"""Columns put together from blocks, and their gradient taken apart again, piece by piece."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shardrec.exchange.route import Piece, Source

__all__ = ["assemble", "distribute"]


def assemble(blocks: Sequence[Tensor], pieces: Sequence[Piece]) -> Tensor:
    """(B, D): each piece a sum of columns of the blocks, which all have B rows; there is at least one piece."""
    columns = []
    for piece in pieces:
        first, *others = piece.sources
        column = _columns(blocks, first, piece.width)
        for number, source in enumerate(others):
            other = _columns(blocks, source, piece.width)
            column = column.add_(other) if number else column + other
        columns.append(column)
    return columns[0].contiguous() if len(columns) == 1 else torch.cat(columns, dim=1)


def distribute(gradient: Tensor, blocks: Sequence[Tensor], pieces: Sequence[Piece], scales: Sequence[float]) -> None:
    """The transpose of :func:`assemble`: writes the gradient of each block, from that (B, D) of the output.

    Args:
        gradient: of the output.
        blocks: where to write.
        pieces: as given to :func:`assemble`.
        scales: a factor for each block.
    """
    start = 0
    for piece in pieces:
        part = gradient[:, start : start + piece.width]
        for source in piece.sources:
            target = _columns(blocks, source, piece.width)
            if scales[source.block] == 1.0:
                target.copy_(part)
            else:
                torch.mul(part, scales[source.block], out=target)
        start += piece.width


def _columns(blocks: Sequence[Tensor], source: Source, width: int) -> Tensor:
    return blocks[source.block][:, source.start : source.start + width]

"""Assembly of output columns from blocks, and its transpose for their gradient.

[Note: one pass over the rows]
Copying columns piece by piece passes over all rows, and all pages of their memory, once per piece: 26 pieces of 64
columns took 19 ms, and one pass over the rows takes 6 ms (4096 rows, one thread). Hence the C++ operators
(:mod:`shardrec.native`). The Python below gives the same results where they are not available, and on CUDA.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import pairwise

import torch
from torch import Tensor

from shardrec import native
from shardrec.exchange.route import Piece, Source


class Columns:
    """Output columns, each a sum of columns of blocks.

    Args:
        pieces: the columns from left to right.
        scales: a factor per block for its gradient. Default: 1.
    """

    def __init__(self, pieces: Sequence[Piece], scales: Sequence[float] = ()) -> None:
        self.pieces = tuple(pieces)
        self.width = sum(piece.width for piece in pieces)
        self._scales = list(scales)
        self._places = cache(self._new_places)
        self._steps = [_step(piece.sources) for piece in pieces]
        self._flat: list[int] = []
        for piece in pieces:
            self._flat += (piece.width, len(piece.sources))
            for source in piece.sources:
                self._flat += (source.block, source.start)

    @property
    def is_identity(self) -> bool:
        """Whether the output columns equal the first block."""
        return self._flat == [self.width, 1, 0, 0]

    def assemble(self, blocks: Sequence[Tensor]) -> Tensor:
        """(B, D) float32: each piece a sum of columns of the (B, ...) blocks. Never a view of a block."""
        if _is_native(blocks[0]):
            output: Tensor = torch.ops.shardrec.assemble(list(blocks), self._flat, blocks[0].size(0), self.width)
            return output
        columns = []
        for piece, step in zip(self.pieces, self._steps, strict=True):
            first, *others = piece.sources
            if step and blocks[first.block].is_cuda:
                around = blocks[first.block][:, first.start : others[-1].start + piece.width]
                columns.append(around.unfold(1, piece.width, step).sum(dim=1))
                continue
            column = _columns(blocks, first, piece.width)
            for number, source in enumerate(others):
                other = _columns(blocks, source, piece.width)
                column = column.add_(other) if number else column + other
            columns.append(column)
        return torch.cat(columns, dim=1) if columns else blocks[0].new_empty((blocks[0].size(0), 0))

    def distribute(self, gradient: Tensor, blocks: Sequence[Tensor]) -> None:
        """The transpose of :meth:`assemble`: write the blocks' gradients, from the output's gradient (B, D).

        Args:
            gradient: of the output.
            blocks: the memory to write to. One for each scale.
        """
        scales = self._scales or [1.0] * len(blocks)
        if _is_native(gradient):
            if gradient.stride(1) != 1:
                gradient = gradient.contiguous()
            torch.ops.shardrec.distribute(gradient, list(blocks), self._flat, scales[: len(blocks)])
            return
        for block, (places, columns), scale in zip(blocks, self._places(gradient.device), scales, strict=False):
            if columns.numel() == block.size(1):
                torch.index_select(gradient, 1, columns, out=block)
                if scale != 1.0:
                    block.mul_(scale)
            else:
                block.index_copy_(1, places, gradient.index_select(1, columns).mul_(scale))

    def _new_places(self, device: torch.device) -> list[tuple[Tensor, Tensor]]:
        """Per block, its columns that pieces are made of, and their output columns: one kernel for all pieces."""
        by_block: dict[int, dict[int, int]] = {}
        start = 0
        for piece in self.pieces:
            columns = range(start, start + piece.width)
            for source in piece.sources:
                places = range(source.start, source.start + piece.width)
                by_block.setdefault(source.block, {}).update(zip(places, columns, strict=True))
            start += piece.width
        pairs = [sorted(by_block.get(block, {}).items()) for block in range(max(by_block, default=-1) + 1)]
        made = [
            torch.tensor(block_pairs, dtype=torch.int64, device=device).view(-1, 2).unbind(1) for block_pairs in pairs
        ]
        return [(places.contiguous(), columns.contiguous()) for places, columns in made]


def _is_native(values: Tensor) -> bool:
    return values.device.type == "cpu" and values.dtype is torch.float32 and native.has_operators()


def _step(sources: Sequence[Source]) -> int:
    """Columns from each source to the next, if they are in one block and as far from each other; else 0."""
    steps = {after.start - before.start for before, after in pairwise(sources)}
    return max(0, *steps) if len(steps) == 1 and len({source.block for source in sources}) == 1 else 0


def _columns(blocks: Sequence[Tensor], source: Source, width: int) -> Tensor:
    return blocks[source.block][:, source.start : source.start + width]

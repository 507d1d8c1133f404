"""A few numbers that stand for an output, so that sides in different processes can be compared.

Of each table, the output's columns are multiplied with a fixed pattern of samples and columns and added up, in float64,
and so are their squares. A wrong row, a wrong order or a missed update changes the first sum by far more than rounding
does. The second one is the scale to compare with.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import torch
from torch import Tensor

__all__ = ["Digest", "differing", "digest"]

Digest = dict[str, tuple[float, float]]
"""By key: sum over the pattern, and root of the sum of squares."""

_TOLERANCE = 2e-5
_BYTES = 65_536
"""Of a piece's temporaries: below glibc's smallest mmap threshold, see ``inputs.py``."""


@torch.no_grad()
def digest(value: Tensor, keys: Sequence[str], widths: Sequence[int]) -> Digest:
    """The digest of an output.

    Args:
        value: (B, sum(widths)) floats.
        keys: of each run of columns.
        widths: columns of each.
    """
    columns = value.shape[1]
    edges = torch.cat([torch.cos(torch.arange(width, dtype=torch.float64) * 1.7) for width in widths])
    pattern = edges.to(value.device)
    sums = torch.zeros(columns, dtype=torch.float64, device=value.device)
    squares = torch.zeros_like(sums)
    rows = max(1, _BYTES // (8 * columns))
    for start in range(0, value.shape[0], rows):
        piece = value[start : start + rows].double()
        samples = torch.arange(start, start + piece.shape[0], dtype=torch.float64, device=value.device)
        sums += (piece * torch.cos(samples * 0.61)[:, None]).sum(0)
        squares += (piece * piece).sum(0)
    of_tables = zip(keys, (sums * pattern).split(list(widths)), squares.split(list(widths)), strict=True)
    return {key: (float(total.sum()), float(square.sum()) ** 0.5) for key, total, square in of_tables}


def differing(ours: Mapping[str, Sequence[float]], theirs: Mapping[str, Sequence[float]]) -> Collection[str]:
    """The keys whose outputs are not the same. A key that one of them has not is one.

    Two outputs are the same if their sums differ by no more than 2e-5 of the root of the sum of squares.
    """
    return [key for key in _either(ours, theirs) if not _same(ours.get(key), theirs.get(key))]


def _either(ours: Iterable[str], theirs: Iterable[str]) -> list[str]:
    return list(dict.fromkeys([*ours, *theirs]))


def _same(ours: Sequence[float] | None, theirs: Sequence[float] | None) -> bool:
    if ours is None or theirs is None:
        return False
    scale = max(ours[1], theirs[1])
    return all(abs(one - other) <= _TOLERANCE * scale for one, other in zip(ours, theirs, strict=True))

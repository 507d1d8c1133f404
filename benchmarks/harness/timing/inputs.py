"""The batches of a case, drawn once and kept in files, and weights and gradients that need no random numbers.

glibc raises its mmap threshold to the size of the largest block that was freed, which decides whether later blocks are
given back to the system after each step, and so what a step costs. What a measuring process does besides its steps must
therefore not free large blocks: batches are mapped from files, and everything else is written in place, by pieces.

Legend: B samples of a rank, F features, N ids, R rows, C columns.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from benchmarks.harness.batches import BatchMaker
from benchmarks.harness.timing.case import Case

__all__ = ["Batch", "draw_batches", "draw_inputs", "fill_gradient", "fill_weight", "number_of_batches", "read_batches"]

_MAX_IDS = 4_000_000
"""Of a rank's batches together. Above it there are fewer of them."""
_SMALL = 8192
"""Rows of a piece. The temporaries of one stay below the smallest mmap threshold."""


class Batch:
    """One rank's batch: ids and lengths.

    Args:
        keys: the features.
        values: (N,) int64 ids, feature by feature.
        lengths: (F * B,) int32 ids of each bag.
        stride: B.
    """

    def __init__(self, keys: Sequence[str], values: Tensor, lengths: Tensor, stride: int) -> None:
        self.keys = list(keys)
        self.values = values
        self.lengths = lengths
        self.stride = stride

    def features(self) -> KeyedJaggedTensor:
        """A new object, as a data loader makes one for each step: nothing is cached in it."""
        return KeyedJaggedTensor(keys=self.keys, values=self.values, lengths=self.lengths, stride=self.stride)


def number_of_batches(case: Case) -> int:
    """How many different batches a rank goes through: 2 to 4, and no fewer than parity needs."""
    ids = case.batch_size * sum(table.pooling for table in case.tables)
    return max(2, min(4, _MAX_IDS // max(ids, 1)))


def draw_inputs(case: Case, folder: Path, seed: int) -> Path:
    """Write the batches of all the ranks, if they are not there yet. Returns their folder."""
    target = folder / case.input_key
    if target.exists():
        return target
    maker = BatchMaker(case.tables, batch_size=case.batch_size, ids=case.ids, seed=seed)
    partial = folder / f"{case.input_key}.partial"
    partial.mkdir()
    for rank in range(case.ranks):
        for number in range(number_of_batches(case)):
            batch = maker.draw(rank, number)
            batch.values().numpy().tofile(partial / f"{rank}-{number}.values")
            batch.lengths().numpy().tofile(partial / f"{rank}-{number}.lengths")
    keys = [table.feature for table in case.tables]
    (partial / "keys.json").write_text(json.dumps(keys), encoding="utf-8")
    partial.rename(target)
    return target


def draw_batches(case: Case, rank: int, device: torch.device, seed: int) -> list[Batch]:
    """The same batches without files: for ranks that share no folder, and whose memory is not malloc's."""
    maker = BatchMaker(case.tables, batch_size=case.batch_size, ids=case.ids, seed=seed)
    drawn = [maker.draw(rank, number) for number in range(number_of_batches(case))]
    return [Batch(one.keys(), one.values().to(device), one.lengths().to(device), case.batch_size) for one in drawn]


def read_batches(case: Case, folder: Path, rank: int, device: torch.device) -> list[Batch]:
    """The batches of one rank, mapped from their files (copied, if they are to be on a device)."""
    keys = json.loads((folder / "keys.json").read_text(encoding="utf-8"))
    return [
        Batch(
            keys,
            _mapped(folder / f"{rank}-{number}.values", torch.int64).to(device),
            _mapped(folder / f"{rank}-{number}.lengths", torch.int32).to(device),
            case.batch_size,
        )
        for number in range(number_of_batches(case))
    ]


def _mapped(path: Path, dtype: torch.dtype) -> Tensor:
    count = path.stat().st_size // dtype.itemsize
    return torch.from_file(str(path), shared=False, size=count, dtype=dtype)


@torch.no_grad()
def fill_weight(weight: Tensor, number: int, row: int = 0, column: int = 0) -> None:
    """Write the initial values of a part of table ``number`` in place, the same under every cut: the sum of a number of
    the row and one of the column.

    Args:
        weight: (R, C) floats, whose first element is that of ``row`` and ``column`` of the table.
        number: of the table.
        row: first row.
        column: first column.
    """
    columns = torch.arange(column, column + weight.shape[1], device=weight.device)
    of_columns = _spread(columns * 7919 + number * 104_729).to(weight.dtype)
    for start in range(0, weight.shape[0], _SMALL):
        piece = weight[start : start + _SMALL]
        rows = torch.arange(row + start, row + start + piece.shape[0], device=weight.device)
        of_rows = _spread(rows * 31 + number * 15_485_863).to(weight.dtype)
        torch.add(of_rows[:, None], of_columns[None, :], out=piece)


@torch.no_grad()
def fill_gradient(gradient: Tensor, number: int, rank: int) -> None:
    """Write the gradient of a feature's columns in place.

    Args:
        gradient: (B, C) floats, maybe a view of columns.
        number: of the table.
        rank: whose samples these are.
    """
    samples, columns = gradient.shape
    of_samples = _spread(torch.arange(samples, device=gradient.device) * 613 + rank * 1_299_709)
    of_columns = _spread(torch.arange(columns, device=gradient.device) * 7919 + number * 104_729)
    torch.add(of_samples[:, None], of_columns[None, :], out=gradient)


def _spread(numbers: Tensor) -> Tensor:
    """Floats between -0.05 and 0.05 that look random enough for different rows to differ."""
    return (numbers * 2_654_435_761 % 100_003).to(torch.float32).div_(1_000_030).sub_(0.05)

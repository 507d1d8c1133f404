"""Incremental checkpoints: finds the rows that have changed since the last save, and the earlier files still needed.

A rank that saves again writes new tensors completely, and the changed rows of all other shards, which are
read on top of the file that has the other rows. That file is hard-linked into the new data folder::

    step-000000001000/data-8f…/  rank-00000.safetensors ──────────┐  all rows
    step-000000002000/data-03…/  rank-00000.0.safetensors ────────┤  the same file
                                 rank-00000.safetensors ────────┐ │  rows changed since
    step-000000003000/data-c1…/  rank-00000.0.safetensors ──────│─┘
                                 rank-00000.1.safetensors ──────┘
                                 rank-00000.safetensors            rows changed since

So every checkpoint is complete in its own folder and may be removed or replaced independently of others, and a file's
bytes are freed with its last link. (RocksDB's checkpoints share their immutable files in this way.) Each rank decides
for its own file: if a link cannot be made, it writes all of its rows.

[Note: changed rows are found by their contents]
A mask set by lookups would miss changes without a lookup: an edit in place, load_state_dict, weight decay, eviction. So
a rank keeps two 64-bit hashes per row of a shard, over its weights, its optimizer's states and its id, and
compares. A hash is the sum of the row's words of 32 bits, each times a random 64-bit number of its own, modulo 2^64
(multilinear hashing; Carter and Wegman, 1979). Let two rows differ in words with differences d_i that are 2^k times an
odd number, or multiples of it. K < 32. Then the sum of d_i · a_i is 0 for one in 2^(64-k) of all a_i. So a row that has
changed passes for one that has not with a probability of at most 2^-33 per hash and 2^-66 for both, whatever is in the
rows: if 10^9 rows change between two saves, once in 7 · 10^10 saves. The random numbers are drawn by each process.
"""

from __future__ import annotations

import os
import secrets
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from shardrec.checkpoint.data_files import SavedFile
from shardrec.checkpoint.manifest import SavedPart
from shardrec.checkpoint.parts import HeldTensor, Part, Rect, as_matrix

_BLOCK_BYTES = 2 * 2**20
_WORDS = (torch.int64, torch.int32, torch.int16, torch.int8)
_MAX_CHANGED = 0.5
"""A shard is written whole when its changed rows, together with those from earlier saves, take more than this share of
it."""

PartKey = tuple[str, Rect]
"""A tensor's name, and the part of it."""

Kept = dict[PartKey, tuple[SavedPart, Tensor]]
"""What is saved of parts, and (n,) int64 ascending, the rows that have changed since: one tensor for all of a shard."""


ShardKey = tuple[str, int, int, int]
"""A table, the first row of a shard of it, the row after the last, and the first column."""

ShardParts = dict[PartKey, Part]
"""Parts of tensors that have the same rows."""


def shards_of(tensors: Mapping[str, HeldTensor]) -> dict[ShardKey, ShardParts]:
    """The parts of tables that this rank writes, by table, rows and first column."""
    shards: dict[ShardKey, ShardParts] = {}
    for name, tensor in tensors.items():
        for part in tensor.parts if tensor.rows_of else ():
            if part.saved:
                shards.setdefault((tensor.rows_of, *part.rect[:3]), {})[name, part.rect] = part
    return shards


def _row_bytes(shard: ShardParts) -> int:
    return sum(part.rect.cols * part.values.itemsize for part in shard.values())


class SavedBefore:
    """A rank's record of its last save, for the next one: 16 bytes per row, on the host.

    Attributes:
        files: of the last save that changes can be read on top of, and where they are. The last is the newest.
        parts: what this rank wrote, with ``SavedPart.file`` as a place in ``files``.
        saves: number of consecutive saves that have written changes.
        complete: whether that save was completed; if not, the next one writes all rows.
    """

    def __init__(self) -> None:
        self.files: list[tuple[SavedFile, Path]] = []
        self.parts: dict[PartKey, SavedPart] = {}
        self.saves = 0
        self.complete = False
        self._random = torch.Generator().manual_seed(secrets.randbits(63))
        self._factors = torch.empty((2, 0), dtype=torch.int64)
        self._hashes: dict[ShardKey, tuple[list[tuple[str, Rect, torch.dtype]], Tensor]] = {}

    def kept(
        self,
        tensors: Mapping[str, HeldTensor],
        data: Path,
        number: int,
        most: int,
        changed: Mapping[PartKey, Tensor | None] | None = None,
    ) -> Kept:
        """Find the changed rows, and link the files into the data folder, unless they are there.

        Args:
            tensors: that are saved now.
            data: the data folder.
            number: of this rank's file in it.
            most: how many consecutive saves may write changes.
            changed: the changed rows per part, None for all, if they are known. Otherwise they are found by hashes.

        Returns: The parts that need not be written completely.
        """
        known = self.complete and self.saves < most
        self.complete = False
        kept: Kept = {}
        shards = shards_of(tensors)
        self._hashes = {key: self._hashes[key] for key in shards if key in self._hashes}
        for key, shard in shards.items():
            rows = self._update(key, shard) if changed is None else changed[next(iter(shard))]
            if known and rows is not None and shard.keys() <= self.parts.keys():
                before = sum(change.length for change in self.parts[next(iter(shard))].changes)
                row_bytes, (_, begin, end, _) = _row_bytes(shard), key
                if (len(rows) + before) * (row_bytes + 8) <= _MAX_CHANGED * (end - begin) * row_bytes:
                    kept |= {part_key: (self.parts[part_key], rows) for part_key in shard}
        used = sorted({file for part, _ in kept.values() for file in part.files})
        if not self._link([self.files[file] for file in used], data, number):
            kept, used = {}, []
        places = {file: place for place, file in enumerate(used)}
        self.files = [
            (
                self.files[file]
                if self.files[file][1] == data
                else (replace(self.files[file][0], name=_linked(number, place)), data)
            )
            for file, place in places.items()
        ]
        self.saves = self.saves + 1 if kept else 0
        return {key: (part.moved(places), rows) for key, (part, rows) in kept.items()}

    def _link(self, files: list[tuple[SavedFile, Path]], data: Path, number: int) -> bool:
        try:
            for place, (file, folder) in enumerate(files):
                if folder == data:
                    continue
                os.link(folder / file.name, data / _linked(number, place))
                if (folder / file.name).stat().st_size != file.size:
                    raise OSError(None, "it has another size than was written", folder / file.name)
        except OSError as error:
            warnings.warn(
                f"{error.filename}: {error.strerror}; so it cannot be linked into {data}, and rank {number} writes all "
                "of its rows: keep the last checkpoint until the next one is complete, and on a file system with hard "
                "links",
                stacklevel=2,
            )
            for place in range(len(files)):
                (data / _linked(number, place)).unlink(missing_ok=True)
            return False
        return True

    def _update(self, key: ShardKey, shard: ShardParts) -> Tensor | None:
        """(n,) the rows with changed hashes, or None without earlier hashes. Stores the new hashes."""
        kinds = [(*part_key, part.values.dtype) for part_key, part in shard.items()]
        matrices = [as_matrix(part.values) for part in shard.values()]
        count = len(matrices[0])
        before, hashes = self._hashes.get(key, (None, torch.empty(0)))
        if before != kinds:
            before, hashes = None, torch.empty((count, 2), dtype=torch.int64)
            self._hashes[key] = kinds, hashes
        changed = []
        length = max(1, _BLOCK_BYTES // _row_bytes(shard))
        for start in range(0, count, length):
            old, new = (
                hashes[start : start + length],
                self._hash([matrix[start : start + length] for matrix in matrices]),
            )
            if before is not None:
                changed.append((old != new).any(1).nonzero().squeeze(1) + start)
            old.copy_(new)
        return torch.cat(changed) if before is not None else None

    def _hash(self, parts: list[Tensor]) -> Tensor:
        """(N, 2) of N rows that lie in several matrices."""
        sums_2N, end = torch.zeros((2, len(parts[0])), dtype=torch.int64), 0
        for matrix in parts:
            words_NW = _words(matrix)
            begin, end = end, end + words_NW.size(1)
            factors_2W = self._factors_to(end)[:, begin:].to(words_NW.device)
            if words_NW.is_cuda:  # lacks a product of int64 matrices
                sums_2N += torch.stack([(words_NW * factors_W).sum(1) for factors_W in factors_2W]).cpu()
            else:
                sums_2N += torch.stack([torch.mv(words_NW, factors_W) for factors_W in factors_2W])
        return sums_2N.t()

    def _factors_to(self, count: int) -> Tensor:
        """(2, count) the random numbers of the first words of a row."""
        lacking = count - self._factors.size(1)
        if lacking > 0:
            fresh = torch.randint(-(2**63), 2**63 - 1, (2, lacking), dtype=torch.int64, generator=self._random)
            self._factors = torch.cat([self._factors, fresh], dim=1)
        return self._factors[:, :count]

    def wrote(self, file: SavedFile, data: Path, parts: Mapping[PartKey, SavedPart]) -> None:
        """Store what was written: this rank's file, and its parts with ``file`` as the last of ``files``."""
        self.files.append((file, data))
        self.parts = dict(parts)


def _linked(number: int, place: int) -> str:
    return f"rank-{number:05}.{place}.safetensors"


def _words(matrix: Tensor) -> Tensor:
    """(N, W) int64 the words of at most 32 bits that the rows of a matrix are made of."""
    return _as_words(matrix, _WORDS[1:]).to(torch.int64)


def _as_words(matrix: Tensor, kinds: Sequence[torch.dtype]) -> Tensor:
    """A matrix as the first kind of words that fill its rows."""
    matrix = matrix.contiguous()
    row_bytes = matrix.size(1) * matrix.itemsize
    kind = next(kind for kind in kinds if row_bytes % kind.itemsize == 0)
    if matrix.storage_offset() * matrix.itemsize % kind.itemsize:
        matrix = matrix.clone()
    return matrix.view(kind)


def different_rows(matrix: Tensor, other: Tensor) -> Tensor:
    """(n,) int64 the rows of two matrices of equal shape and dtype, on the CPU, that differ in a bit; ascending."""
    differ = _as_words(matrix, _WORDS) != _as_words(other, _WORDS)
    return _as_words(differ, _WORDS).any(1).nonzero().squeeze(1)

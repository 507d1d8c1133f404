"""The Gowalla check-ins: which users went to which places ("items"), split into train and test.

A file has one user a line, ``user item item ...``, plain or xz-compressed; ids count from 0. This is the format of the
split published with NGCF (Wang et al., 2019) and used for LightGCN and the BARS leaderboard.

Legend: U users, I items, N interactions, B users of a batch, M interactions of those.
"""

from __future__ import annotations

import lzma
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import torch
from torch import Tensor

from shardrec.errors import DataError

__all__ = ["Dataset", "Interactions", "read_dataset"]

_MAX_IDS = 2**31


@dataclass(frozen=True, kw_only=True, eq=False)
class Interactions:
    """Each user's items, as compressed sparse rows.

    Attributes:
        offsets: int64 (U + 1,), where each user's items start; the last is N.
        items: int64 (N,), user after user.
        num_items: I; every item is below it.
    """

    offsets: Tensor
    items: Tensor
    num_items: int

    @property
    def num_users(self) -> int:
        """U."""
        return len(self.offsets) - 1

    def counts(self) -> Tensor:
        """Items per user, int64 (U,)."""
        return self.offsets.diff()

    def popularity(self) -> Tensor:
        """Users per item, int64 (I,)."""
        return torch.bincount(self.items, minlength=self.num_items)

    def transposed(self) -> Interactions:
        """The same interactions as each item's users: users and items change places."""
        users = torch.arange(self.num_users).repeat_interleave(self.counts())
        ends = self.popularity().cumsum(0)
        return Interactions(
            offsets=torch.cat([ends.new_zeros(1), ends]),
            items=users[self.items.argsort(stable=True)],
            num_items=self.num_users,
        )

    def hold_out(self, share: float) -> Dataset:
        """Split at random, always in the same way: about ``share`` of the interactions into ``test``."""
        held = torch.rand(len(self.items), generator=torch.Generator().manual_seed(0)) < share
        return Dataset(train=self._where(~held), test=self._where(held))

    def _where(self, keep: Tensor) -> Interactions:
        kept = torch.cat([self.offsets.new_zeros(1), keep.cumsum(0)])
        return Interactions(offsets=kept[self.offsets], items=self.items[keep], num_items=self.num_items)

    def of(self, users: Tensor) -> tuple[Tensor, Tensor]:
        """The items of some users.

        Args:
            users: int64 (B,).

        Returns:
            The items, int64 (M,), user after user, and how many each user has, int64 (B,).
        """
        starts = self.offsets[users]
        lengths = self.offsets[users + 1] - starts
        first = lengths.cumsum(0) - lengths
        within = torch.arange(int(lengths.sum())) - first.repeat_interleave(lengths)
        return self.items[starts.repeat_interleave(lengths) + within], lengths


@dataclass(frozen=True, kw_only=True, eq=False)
class Dataset:
    """The two halves of the split, over the same users and items.

    Attributes:
        train: what the model may see.
        test: what it has to predict.
    """

    train: Interactions
    test: Interactions


def read_dataset(folder: Path, *, validate: float = 0.0) -> Dataset:
    """Read ``train.txt`` and ``test.txt``, or the same with ``.xz``, from a folder.

    Args:
        folder: holds both files.
        validate: share of the interactions of ``train.txt`` to hold out in place of ``test.txt``, which is not read
            then; 0 reads both files.

    Raises:
        DataError: if a file is missing or has a broken line (``file:line: what``), or if a user has an item in both.
    """
    train = _read_rows(_find(folder, "train.txt"))
    test = {} if validate else _read_rows(_find(folder, "test.txt"))
    if not any(train.values()):
        raise DataError(f"{folder}: train.txt has no interactions; there is nothing to learn from")
    for user, items in test.items():
        seen = set(items).intersection(train.get(user, ()))
        if seen:
            raise DataError(
                f"{folder}: user {user} has item {min(seen)} in train.txt and in test.txt; the halves of a split are "
                "disjoint: take the item out of one of them"
            )
    num_users = 1 + max((*train, *test))
    num_items = 1 + max(item for half in (train, test) for items in half.values() for item in items)
    both = Dataset(train=_interactions(train, num_users, num_items), test=_interactions(test, num_users, num_items))
    return both.train.hold_out(validate) if validate else both


def _find(folder: Path, name: str) -> Path:
    for path in (folder / f"{name}.xz", folder / name):
        if path.is_file():
            return path
    raise DataError(f"{folder} has neither {name}.xz nor {name}; point --data or SHARDREC_DATA to the folder above it")


def _open(path: Path) -> TextIO:
    if path.suffix == ".xz":
        return lzma.open(path, "rt", encoding="utf-8")
    return path.open(encoding="utf-8")


def _read_rows(path: Path) -> dict[int, list[int]]:
    rows: dict[int, list[int]] = {}
    try:
        with _open(path) as file:
            for where, (user, items) in _numbered_rows(path, file):
                if user in rows:
                    raise DataError(f"{where}: user {user} has a line already; put all of a user's items on one line")
                if len(set(items)) < len(items):
                    twice = next(item for item in items if items.count(item) > 1)
                    raise DataError(f"{where}: item {twice} stands twice; keep it once")
                rows[user] = items
    except (lzma.LZMAError, EOFError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be decompressed or decoded ({error}); copy the file again") from error
    return rows


def _numbered_rows(path: Path, file: TextIO) -> Iterator[tuple[str, tuple[int, list[int]]]]:
    for number, line in enumerate(file, 1):
        where = f"{path}:{number}"
        fields = line.split()
        if fields:
            ids = [_parse_id(field, f"{where}: field {column}") for column, field in enumerate(fields, 1)]
            yield where, (ids[0], ids[1:])


def _parse_id(field: str, where: str) -> int:
    # isdecimal() alone also accepts the digits of other scripts.
    if not (field.isascii() and field.isdecimal()):
        raise DataError(f"{where} is {field!r}; an id is a whole number from 0")
    value = int(field)
    if value >= _MAX_IDS:
        raise DataError(f"{where} is {value}; ids count from 0 and must be below {_MAX_IDS}")
    return value


def _interactions(rows: dict[int, list[int]], num_users: int, num_items: int) -> Interactions:
    per_user = [rows.get(user, []) for user in range(num_users)]
    offsets = torch.tensor([0, *(len(items) for items in per_user)]).cumsum(0)
    items = torch.tensor([item for items in per_user for item in items], dtype=torch.int64)
    return Interactions(offsets=offsets, items=items, num_items=num_items)

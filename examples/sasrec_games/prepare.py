"""Users' item sequences as Parquet files for ``shardrec train``: next items to predict, and candidates to rank.

The input has one ``user item`` a line, each user's in time order; ids count from 1. A user's last item is for the test,
the one before it for validation, the others are for training; users with fewer than three are trained on only.

| file | rows |
|---|---|
| ``train.parquet`` | one a user: the training items, the last as ``item``, those before as ``history`` |
| ``valid.parquet`` | the validation item and 100 random ones for each of 10,000 users, after the training items |
| ``test.parquet`` | the test item and 100 others for the same users, after the training and the validation items |

Random items are not among the user's training items. This is the protocol of SASRec's release ("Self-Attentive
Sequential Recommendation", Kang and McAuley, 2018).

Legend: U users, N interactions, K ranked items.
"""

from __future__ import annotations

import argparse
import lzma
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from pyarrow import csv

from shardrec.errors import DataError

__all__ = ["prepare", "read_sequences"]

Ints = NDArray[np.int64]

_FILE = "amazon_games_sasrec/Video.txt.xz"
_LONGEST = 50
"""Items of a history that the model sees (``max_length`` in features.yaml)."""


def read_sequences(path: Path) -> tuple[Ints, Ints]:
    """The interactions of a file, plain or compressed, user after user.

    Args:
        path: of lines ``user item``.

    Returns:
        Users and items, int64 (N,) each; a user's items in the file's order.

    Raises:
        DataError: if there is no such file, or one of other lines.
    """
    try:
        with lzma.open(path) if path.suffix == ".xz" else path.open("rb") as stream:
            table = csv.read_csv(
                stream,
                read_options=csv.ReadOptions(column_names=["user", "item"]),
                parse_options=csv.ParseOptions(delimiter=" "),
                convert_options=csv.ConvertOptions(column_types={"user": pa.int64(), "item": pa.int64()}),
            )
    except (OSError, EOFError, lzma.LZMAError, pa.ArrowException) as error:
        raise DataError(f"{path} cannot be read ({error}): give lines 'user item' (--data)") from error
    users, items = (np.asarray(table[name].to_numpy()) for name in ("user", "item"))
    if len(items) == 0 or items.min() < 1:
        raise DataError(
            f"{path} has {len(items)} interactions, the lowest item {items.min(initial=1)}: ids count from 1"
        )
    order = np.argsort(users, kind="stable")
    return users[order], items[order]


def prepare(path: Path, out: Path, *, users: int = 10_000, candidates: int = 100, seed: int = 0) -> dict[str, int]:
    """Write the three files.

    Args:
        path: of lines ``user item``.
        out: the folder, which is made.
        users: most users to rank items for, drawn from those with three items or more.
        candidates: random items for each.
        seed: of both.

    Returns:
        The rows of each file, by its name.

    Raises:
        DataError: for a file that :func:`read_sequences` refuses, or without a user to validate on.
    """
    user_N, item_N = read_sequences(path)
    first_U = np.flatnonzero(np.r_[True, user_N[1:] != user_N[:-1]])
    size_U = np.diff(np.r_[first_U, len(user_N)])
    ranked_U = size_U >= 3
    if not ranked_U.any():
        raise DataError(f"{path} has no user with three items: the last two of each are held out")
    kept_U = size_U - 2 * ranked_U
    name_U, most = user_N[first_U], int(item_N.max())
    if kept_U[ranked_U].max() >= most:
        raise DataError(f"{path}: a user has {kept_U[ranked_U].max()} training items of {most}: none is left to rank")
    draws = np.random.default_rng(seed)
    drawn = draws.permutation(np.flatnonzero(ranked_U))[:users]
    # A user and an item as one number.
    trained_N = np.arange(len(user_N)) - np.repeat(first_U, size_U) < np.repeat(kept_U, size_U)
    known = (user_N * (most + 1) + item_N)[trained_N]

    out.mkdir(parents=True, exist_ok=True)
    some = np.flatnonzero(kept_U >= 2)
    last = first_U[some] + kept_U[some] - 1
    rows = {"train": _write(out / "train.parquet", name_U[some], first_U[some], last, item_N, item_N[last][:, None])}
    for name, ahead in (("valid", 0), ("test", 1)):
        true = first_U[drawn] + kept_U[drawn] + ahead
        others = _unseen(name_U[drawn], candidates, most, known, draws)
        ranked = np.concatenate([item_N[true][:, None], others], axis=1)
        rows[name] = _write(out / f"{name}.parquet", name_U[drawn], first_U[drawn], true, item_N, ranked)
    return rows


def _unseen(users: Ints, count: int, most: int, known: Ints, draws: np.random.Generator) -> Ints:
    """``count`` random items from 1 to ``most`` for each user, none of the user's known ones: (U, count)."""
    found = np.zeros((len(users), count), dtype=np.int64)
    missing = np.ones(found.shape, dtype=np.bool_)
    while missing.any():
        found[missing] = draws.integers(1, most + 1, int(missing.sum()))
        missing = np.isin(users[:, None] * (most + 1) + found, known)
    return found


def _write(path: Path, users: Ints, starts: Ints, ends: Ints, item_N: Ints, ranked: Ints) -> int:
    """K rows for each user: the items between start and end as its history, and one of ``ranked`` (U, K)."""
    count = ranked.shape[1]
    starts = np.maximum(starts, ends - _LONGEST)
    starts, lengths = np.repeat(starts, count), np.repeat(ends - starts, count)
    offsets = np.r_[0, np.cumsum(lengths)]
    places = np.arange(offsets[-1]) - np.repeat(offsets[:-1] - starts, lengths)
    history = pa.ListArray.from_arrays(offsets.astype(np.int32), item_N[places].astype(np.int32))
    labels = np.zeros(ranked.shape, dtype=np.int8)
    labels[:, 0] = 1
    table = pa.table(
        {
            "user": np.repeat(users, count).astype(np.int32),
            "history": history,
            "item": ranked.reshape(-1).astype(np.int32),
            "label": labels.reshape(-1),
        }
    )
    pq.write_table(table, path, compression="zstd")
    return int(table.num_rows)


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the files, and say what they hold.

    Args:
        arguments: of the command line; default: this process's.
    """
    parser = argparse.ArgumentParser(prog="examples.sasrec_games.prepare", description=__doc__.splitlines()[0])
    data = os.environ.get("SHARDREC_DATA", "../shared/data")
    parser.add_argument("--data", type=Path, default=Path(data), help=f"folder that holds {_FILE} (%(default)s)")
    parser.add_argument("--out", type=Path, default=Path("runs/sasrec_games/data"), help="where to write (%(default)s)")
    options = parser.parse_args(arguments)
    for name, rows in prepare(options.data / _FILE, options.out).items():
        print(f"{options.out / name}.parquet: {rows:,} rows")


if __name__ == "__main__":
    main()

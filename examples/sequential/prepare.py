"""Users' item sequences as Parquet files for ``shardrec train``: next items to predict, and candidates to rank.

The input has lines ``user item item ...``, each user's items in time order, on one line or on several. Ids are any
texts. Items are numbered from 1. A user's last item is for the test, the one before it for validation, the others are
for training. Users with fewer than three are trained on only. The split may also be by time, for lines ``user item
time``: the first four fifths of all interactions are for training. In the last fifth, each user's first item of the
first half is for validation, and of the second half for the test.

| file | holds |
|---|---|
| ``train.parquet`` | a row for each user: the training items, the last as ``item``, those before as ``history`` |
| ``valid.parquet`` | the validation item and random ones for some users, after the training items |
| ``test.parquet`` | the test item and others for the same users, after the training and the validation items |
| ``features.yaml`` | what these columns are |
| ``items.txt`` | the items' ids in the input, number 1 in the first line |

Random items are not among the user's training items, which is the protocol of SASRec's release ("Self-Attentive
Sequential Recommendation", Kang and McAuley, 2018). With ``--negatives unseen`` they are not among any of the user's
items. Use ``--candidates 0`` for ``shardrec train --ranking catalogue``, which ranks all items.

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

from shardrec.errors import DataError

__all__ = ["prepare", "read_sequences"]

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

_FILE = "amazon_games_sasrec/Video.txt.xz"
_REMEDY = "give a file of lines 'user item item ...' (--data)"
_SPEC = """label: label
group: user
features:
  - {{name: history, kind: sequence, ids: number, rows: {rows}, max_length: {longest}}}
  - {{name: item, kind: id, ids: number, rows: {rows}}}
"""


def read_sequences(path: Path, *, timed: bool = False) -> tuple[list[str], Ints, list[str], Ints, Floats]:
    """The interactions of a file, plain or compressed (.xz), user after user.

    Args:
        path: of lines ``user item item ...``, with spaces, tabs or commas between them.
        timed: whether the lines are ``user item time``, the time a number.

    Returns:
        The users' ids, and the user's number of each interaction, int64 (N,), then the items' ids and numbers from 1
        on, then the times, or zeros. A user's items are in the order of their times, and with equal times in the file's
        order. Ids that are whole numbers are in numeric order.

    Raises:
        DataError: if the file is missing, or has other lines.
    """
    users: list[str] = []
    items: list[str] = []
    times: list[float] = []
    try:
        with lzma.open(path, "rt", encoding="utf-8") if path.suffix == ".xz" else path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                user, *some = line.replace(",", " ").split() or [""]
                if user and not some:
                    raise DataError(f"{path}:{number}: a user without an item: {_REMEDY}")
                if timed and user:
                    times.append(_time(some, f"{path}:{number}"))
                    some = some[:1]
                users += [user] * len(some)
                items += some
    except (OSError, EOFError, UnicodeDecodeError, lzma.LZMAError) as error:
        raise DataError(f"{path} cannot be read ({error}): {_REMEDY}") from error
    if not items:
        raise DataError(f"{path} has no interactions: {_REMEDY}")
    (user_ids, user_N), (item_ids, item_N) = _numbered(users), _numbered(items)
    time_N = np.array(times if timed else [0.0] * len(items))
    order = np.lexsort((time_N, user_N))
    return user_ids, user_N[order], item_ids, item_N[order] + 1, time_N[order]


def _time(fields: list[str], where: str) -> float:
    try:
        _, time = fields
        return float(time)
    except ValueError:
        raise DataError(f"{where}: {len(fields)} fields after the user: --split time takes 'user item time'") from None


def _numbered(texts: list[str]) -> tuple[list[str], Ints]:
    """The distinct texts, in order, and the number of each text in these."""
    are_numbers = all(text.isascii() and text.isdecimal() and len(text) < 19 for text in texts)
    ids, numbers = np.unique(np.array(texts, dtype=np.int64 if are_numbers else np.str_), return_inverse=True)
    return [str(text) for text in ids], numbers.astype(np.int64)


def prepare(
    path: Path,
    out: Path,
    *,
    users: int = 10_000,
    candidates: int = 100,
    unseen: bool = False,
    popular: bool = False,
    by_time: bool = False,
    longest: int = 50,
    seed: int = 0,
) -> dict[str, int]:
    """Write the files.

    Args:
        path: of lines ``user item item ...``, or, to split by time, ``user item time``.
        out: the folder, which is made.
        users: most users to rank items for, drawn from those with a held-out item.
        candidates: random items for each.
        unseen: whether the random items exclude all of the user's items. Otherwise they exclude the training items.
        popular: whether they are drawn by their frequency in the training data. Otherwise uniformly.
        by_time: whether the split is by time. Otherwise each user's last two items are held out.
        longest: items of a history that the model sees.
        seed: of both.

    Returns:
        The rows of each Parquet file, by its name.

    Raises:
        DataError: for a file that :func:`read_sequences` refuses, or without a user to validate on.
    """
    user_ids, user_N, item_ids, item_N, time_N = read_sequences(path, timed=by_time)
    first_U = np.flatnonzero(np.r_[True, user_N[1:] != user_N[:-1]])
    size_U = np.diff(np.r_[first_U, len(user_N)])
    if by_time:
        cuts = np.quantile(time_N, [0.8, 0.9])
        kept_U, before_test_U = (np.add.reduceat(time_N < cut, first_U, dtype=np.int64) for cut in cuts)
    else:
        kept_U = size_U - 2 * (size_U >= 3)
        before_test_U = kept_U + (size_U >= 3)
    ends = {"valid": (kept_U, before_test_U), "test": (before_test_U, size_U)}
    ranked = {name: (begin_U > 0) & (begin_U < end_U) for name, (begin_U, end_U) in ends.items()}
    for name, ranked_U in ranked.items():
        if not ranked_U.any():
            words = f"with items before and in the {name} part" if by_time else "with three items: two are held out"
            raise DataError(f"{path} has no user {words}")
    most = len(item_ids)
    known_U = size_U if unseen else kept_U
    known_N = np.arange(len(user_N)) - np.repeat(first_U, size_U) < np.repeat(known_U, size_U)
    # A user and an item as one number.
    known = np.unique((user_N * (most + 1) + item_N)[known_N])
    pool = item_N[np.arange(len(user_N)) - np.repeat(first_U, size_U) < np.repeat(kept_U, size_U)]
    pool = pool if popular else np.arange(1, most + 1)
    fullest = np.bincount(known // (most + 1), minlength=len(size_U))[ranked["valid"] | ranked["test"]].max()
    if fullest >= most and candidates:
        raise DataError(f"{path}: a user has {fullest} items of {most}: none is left to rank")
    draws = np.random.default_rng(seed)
    order = draws.permutation(np.flatnonzero(ranked["valid"] | ranked["test"]))

    out.mkdir(parents=True, exist_ok=True)
    (out / "features.yaml").write_text(_SPEC.format(rows=most + 1, longest=longest), encoding="utf-8")
    (out / "items.txt").write_text("".join(f"{item}\n" for item in item_ids), encoding="utf-8")
    some = np.flatnonzero(kept_U >= 2)
    if not len(some):
        raise DataError(f"{path} has no user with two training items: give a file of longer sequences (--data)")
    names_U = np.array(user_ids)

    def write(name: str, users_U: Ints, ends_U: Ints, ranked: Ints) -> int:
        starts_U = np.maximum(first_U[users_U], ends_U - longest)
        return _write(out / f"{name}.parquet", names_U[users_U], starts_U, ends_U, item_N, ranked)

    last_U = first_U[some] + kept_U[some] - 1
    rows = {"train": write("train", some, last_U, item_N[last_U][:, None])}
    for name, (begin_U, _) in ends.items():
        drawn = order[ranked[name][order]][:users]
        true_U = first_U[drawn] + begin_U[drawn]
        others = _unseen(drawn, candidates, most, known, pool, draws)
        rows[name] = write(name, drawn, true_U, np.concatenate([item_N[true_U][:, None], others], axis=1))
    return rows


def _unseen(users: Ints, count: int, most: int, known: Ints, pool: Ints, draws: np.random.Generator) -> Ints:
    """``count`` random items of the pool for each user, none of the user's known ones: (U, count)."""
    found = np.zeros((len(users), count), dtype=np.int64)
    missing = np.ones(found.shape, dtype=np.bool_)
    while missing.any():
        found[missing] = pool[draws.integers(0, len(pool), int(missing.sum()))]
        missing = np.isin(users[:, None] * (most + 1) + found, known)
    return found


def _write(path: Path, users: NDArray[np.str_], starts: Ints, ends: Ints, item_N: Ints, ranked: Ints) -> int:
    """K rows for each user: the items between start and end as its history, and one of ``ranked`` (U, K)."""
    count = ranked.shape[1]
    starts, lengths = np.repeat(starts, count), np.repeat(ends - starts, count)
    offsets = np.r_[0, np.cumsum(lengths)]
    places = np.arange(offsets[-1]) - np.repeat(offsets[:-1] - starts, lengths)
    history = pa.ListArray.from_arrays(offsets.astype(np.int32), item_N[places].astype(np.int32))
    labels = np.zeros(ranked.shape, dtype=np.int8)
    labels[:, 0] = 1
    table = pa.table(
        {
            "user": np.repeat(users, count),
            "history": history,
            "item": ranked.reshape(-1).astype(np.int32),
            "label": labels.reshape(-1),
        }
    )
    pq.write_table(table, path, compression="zstd")
    return int(table.num_rows)


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the files, and print their contents.

    Args:
        arguments: of the command line. Default: this process's.
    """
    parser = argparse.ArgumentParser(prog="examples.sequential.prepare", description=__doc__.splitlines()[0])
    data = Path(os.environ.get("SHARDREC_DATA", "../shared/data"), _FILE)
    parser.add_argument("--data", type=Path, default=data, help="file of lines 'user item item ...' (%(default)s)")
    parser.add_argument("--out", type=Path, default=Path("runs/sequential/data"), help="where to write (%(default)s)")
    parser.add_argument("--users", type=int, default=10_000, help="most users to rank items for (%(default)s)")
    parser.add_argument("--candidates", type=int, default=100, help="random items for each user (%(default)s)")
    text = "how random items are drawn: uniformly, or by their frequency in the training data (%(default)s)"
    parser.add_argument("--draw", choices=("uniform", "popularity"), default="uniform", help=text)
    text = "each user's last two items are held out, or what comes last of lines 'user item time' (%(default)s)"
    parser.add_argument("--split", choices=("leave-one-out", "time"), default="leave-one-out", help=text)
    text = "random items are none of the user's training items, or none of all the user's items (%(default)s)"
    parser.add_argument("--negatives", choices=("untrained", "unseen"), default="untrained", help=text)
    parser.add_argument("--max-length", type=int, default=50, help="items of a history that are kept (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of users and random items (%(default)s)")
    options = parser.parse_args(arguments)
    for name in ("users", "candidates", "max_length"):
        least = int(name != "candidates")
        if getattr(options, name) < least:
            parser.error(f"--{name.replace('_', '-')} is {getattr(options, name)}: give {least} or more")
    try:
        rows = prepare(
            options.data,
            options.out,
            users=options.users,
            candidates=options.candidates,
            unseen=options.negatives == "unseen",
            popular=options.draw == "popularity",
            by_time=options.split == "time",
            longest=options.max_length,
            seed=options.seed,
        )
    except (DataError, OSError) as error:
        parser.exit(1, f"{parser.prog}: error: {error}\n")
    for name, count in rows.items():
        print(f"{options.out / name}.parquet: {count:,} rows")


if __name__ == "__main__":
    main()

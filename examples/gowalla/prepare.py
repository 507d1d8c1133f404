"""The Gowalla check-ins as Parquet files for ``shardrec train``: the users' choices, and the items to find.

The folder has ``train.txt`` and ``test.txt``, plain or as ``.xz``, with lines ``user item item ...``, one for each
user. Ids count from 0. This is the format of the split published with NGCF (Wang et al., 2019) and used for LightGCN
and the BARS leaderboard.

| file | holds |
|---|---|
| ``train.parquet`` | a row for each user of ``train.txt``, with the user's items as ``history`` |
| ``test.parquet`` | a row for each interaction of ``test.txt``, with its item and the user's row |
| ``fit.parquet``, ``valid.parquet`` | the same of nine tenths and of one tenth of ``train.txt``, to choose settings |
| ``features.yaml`` | what these columns are |

Legend: U users, N interactions of train, M of test.
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

__all__ = ["prepare"]

Ints = NDArray[np.int64]

_MOST = 2**31 - 2
_SPEC = """label: label
group: user
features:
  - {{name: user, kind: id, ids: number, rows: {users}}}
  - {{name: history, kind: multi_hot, share: item}}
  - {{name: item, kind: id, ids: number, rows: {items}}}
"""


def prepare(folder: Path, out: Path) -> dict[str, int]:
    """Write the files.

    Args:
        folder: holds ``train.txt`` and ``test.txt``, or the same with ``.xz``.
        out: is made.

    Returns:
        The rows of each Parquet file, by its name.

    Raises:
        DataError: if a file is missing or has a broken line (``file:line: what``), or if a user has an item in both.
    """
    user_N, item_N = _read(folder, "train.txt")
    user_M, item_M = _read(folder, "test.txt")
    if not len(user_N):
        raise DataError(f"{folder}: train.txt has no interactions. Give a file with some")
    most = int(max(item_N.max(), item_M.max(initial=0))) + 1
    both = np.intersect1d(user_N * most + item_N, user_M * most + item_M)
    if len(both):
        raise DataError(
            f"{folder}: user {both[0] // most} has item {both[0] % most} in train.txt and in test.txt. The halves of a "
            "split are disjoint: take the item out of one of them"
        )
    out.mkdir(parents=True, exist_ok=True)
    users = int(max(user_N.max(), user_M.max(initial=0))) + 1
    (out / "features.yaml").write_text(_SPEC.format(users=users + 1, items=most + 1), encoding="utf-8")
    held_N = np.random.default_rng(0).random(len(user_N)) < 0.1
    rows = {}
    for names, train, test in (
        (("fit", "valid"), (user_N[~held_N], item_N[~held_N]), (user_N[held_N], item_N[held_N])),
        (("train", "test"), (user_N, item_N), (user_M, item_M)),
    ):
        ends_U = np.cumsum(np.bincount(train[0], minlength=users))
        history_U = pa.ListArray.from_arrays(np.r_[0, ends_U].astype(np.int32), (train[1] + 1).astype(np.int32))
        there = np.unique(train[0])
        for name, row_users, items in ((names[0], there, train[1][ends_U[there] - 1]), (names[1], *test)):
            columns = {"user": row_users + 1, "item": items + 1, "label": np.ones_like(items)}
            arrays = {column: pa.array(values.astype(np.int32)) for column, values in columns.items()}
            table = pa.table({**arrays, "history": history_U.take(pa.array(row_users))})
            pq.write_table(table, out / f"{name}.parquet", compression="zstd", row_group_size=1 << 12)
            rows[name] = len(items)
    return rows


def _read(folder: Path, name: str) -> tuple[Ints, Ints]:
    """Users, ascending, and items of all interactions: (N,) each."""
    path = next((path for path in (folder / f"{name}.xz", folder / name) if path.is_file()), None)
    if path is None:
        raise DataError(f"{folder} has neither {name}.xz nor {name}. Give the folder of the file with --data")
    rows: dict[int, list[int]] = {}
    try:
        with lzma.open(path, "rt", encoding="utf-8") if path.suffix == ".xz" else path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                where = f"{path}:{number}"
                ids = [_number(text, f"{where}: field {column}") for column, text in enumerate(line.split(), 1)]
                if ids and ids[0] in rows:
                    raise DataError(f"{where}: user {ids[0]} has a line already; put all of a user's items on one line")
                if len(set(ids[1:])) < len(ids[1:]):
                    twice = next(item for item in ids[1:] if ids[1:].count(item) > 1)
                    raise DataError(f"{where}: item {twice} stands twice; keep it once")
                rows.update({ids[0]: ids[1:]} if ids else {})
    except (lzma.LZMAError, EOFError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be decompressed or decoded ({error}); copy the file again") from error
    users = sorted(rows)
    items = [item for user in users for item in rows[user]]
    return np.repeat(users, [len(rows[user]) for user in users]).astype(np.int64), np.array(items, dtype=np.int64)


def _number(text: str, where: str) -> int:
    # isdecimal() alone also accepts the digits of other scripts.
    if not (text.isascii() and text.isdecimal()):
        raise DataError(f"{where} is {text!r}; an id is a whole number from 0")
    if int(text) > _MOST:
        raise DataError(f"{where} is {text}; ids count from 0 and are at most {_MOST}")
    return int(text)


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the files, and print their contents.

    Args:
        arguments: of the command line. Default: this process's.
    """
    parser = argparse.ArgumentParser(prog="examples.gowalla.prepare", description=__doc__.splitlines()[0])
    data = Path(os.environ.get("SHARDREC_DATA", "../shared/data"), "gowalla_m1")
    parser.add_argument("--data", type=Path, default=data, help="folder of train.txt and test.txt (%(default)s)")
    parser.add_argument("--out", type=Path, default=Path("runs/gowalla/data"), help="where to write (%(default)s)")
    options = parser.parse_args(arguments)
    try:
        rows = prepare(options.data, options.out)
    except (DataError, OSError) as error:
        parser.exit(1, f"{parser.prog}: error: {error}\n")
    for name, count in rows.items():
        print(f"{options.out / name}.parquet: {count:,} rows")


if __name__ == "__main__":
    main()

"""``shardrec sequences``: interactions as users' item sequences, next items to predict, and candidates to rank.

| file | holds |
|---|---|
| ``train.parquet`` | a row for each user: the last training item as ``item``, those before as ``history`` |
| ``valid.parquet``, ``test.parquet`` | a held-out item and random ones for some users, after the items before |
| ``users.parquet`` | a row for each user: all items as ``history``, for ``shardrec recommend`` |
| ``features.yaml``, ``vocabularies.json`` | what these columns are, and the ids of all items |

Random items are not among the user's training items, which is the protocol of SASRec's release ("Self-Attentive
Sequential Recommendation", Kang and McAuley, 2018); or, with ``unseen``, not among any of the user's.

Legend: U users, N interactions, K ranked items.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from shardrec import ConfigError, DataError
from shardrec.trainer.data.interactions import Interactions, Ints
from shardrec.trainer.data.spec import VOCABULARIES

if TYPE_CHECKING:
    import pyarrow as pa

_VALUES_AT_ONCE = 1 << 22
"""Values of histories that are in memory at once."""
_GROUP_ROWS = 1 << 12
"""Rows of a row group, so that ranks have parts of a file to share."""
_SPEC = """# Of shardrec sequences. Ids of items are in {vocabularies}; a history looks up the item's table.
label: label
group: user
features:
  - {{name: history, kind: sequence, share: item, max_length: {longest}}}
  - {{name: item, kind: id, vocabulary: from_data}}
"""


def check_unused(out: Path) -> None:
    """Raise a ``ConfigError`` if :func:`write_sequences` would write over a spec in the folder."""
    if (out / "features.yaml").exists():
        raise ConfigError(f"out (--out): {out}/features.yaml would be written over: give another folder")


def write_sequences(
    interactions: Interactions,
    out: Path,
    *,
    split: Literal["leave-one-out", "time"] = "leave-one-out",
    users: int = 10_000,
    candidates: int = 100,
    unseen: bool = False,
    popular: bool = False,
    longest: int = 50,
    seed: int = 0,
) -> dict[str, int]:
    """Write the files.

    Args:
        interactions: user after user, each user's in order.
        out: the folder, which is made.
        split: ``leave-one-out``: each user's last item is for the test, the one before it for validation, and users
            with fewer than three are trained on only. ``time``: what comes before the last fifth of all interactions is
            for training, each user's first item in its first half for validation, that in its second half for the test.
        users: most users to rank items for, drawn from those with a held-out item.
        candidates: random items for each.
        unseen: whether the random items are none of the user's, held-out ones among them; else, no training items.
        popular: whether they are drawn by how often they are in the training data; else, all alike.
        longest: items of a history that the model sees.
        seed: of both.

    Returns:
        The rows of each Parquet file, by its name.

    Raises:
        ConfigError: if files would be written over.
        DataError: without a user to train on, to validate on or to test on.
    """
    first_U = np.flatnonzero(np.r_[True, interactions.user_N[1:] != interactions.user_N[:-1]])
    size_U = np.diff(np.r_[first_U, len(interactions.user_N)])
    if split == "time":
        cuts = np.quantile(interactions.time_N, [0.8, 0.9])
        kept_U, before_test_U = (np.add.reduceat(interactions.time_N < cut, first_U, dtype=np.int64) for cut in cuts)
    else:
        kept_U = size_U - 2 * (size_U >= 3)
        before_test_U = kept_U + (size_U >= 3)
    ends = {"valid": (kept_U, before_test_U), "test": (before_test_U, size_U)}
    ranked = {name: (begin_U > 0) & (begin_U < end_U) for name, (begin_U, end_U) in ends.items()}
    for name, ranked_U in ranked.items():
        if not ranked_U.any():
            words = (
                f"with items before and in the {name} part" if split == "time" else "with three items: two are held out"
            )
            raise DataError(f"there is no user {words}. Give more interactions, or another --split")
    trained = np.flatnonzero(kept_U >= 2)
    if not len(trained):
        raise DataError("there is no user with two training items: give longer sequences")
    place_N = np.arange(len(interactions.user_N)) - np.repeat(first_U, size_U)
    is_known_N = place_N < np.repeat(size_U if unseen else kept_U, size_U)
    most = len(interactions.item_ids)
    # A user and an item as one number.
    known = np.unique((interactions.user_N * most + interactions.item_N)[is_known_N])
    fullest = np.bincount(known // most, minlength=len(size_U))[ranked["valid"] | ranked["test"]].max()
    if fullest >= most and candidates:
        raise DataError(f"a user has {fullest} items of {most}: none is left to rank. Give --candidates 0")
    pool = interactions.item_N[place_N < np.repeat(kept_U, size_U)] if popular else np.arange(most)
    draws = np.random.default_rng(seed)
    order = draws.permutation(np.flatnonzero(ranked["valid"] | ranked["test"]))

    check_unused(out)
    out.mkdir(parents=True, exist_ok=True)
    (out / "features.yaml").write_text(_SPEC.format(longest=longest, vocabularies=VOCABULARIES), encoding="utf-8")
    vocabulary = {"item": [str(item) for item in interactions.item_ids.to_pylist()]}
    (out / VOCABULARIES).write_text(json.dumps(vocabulary), encoding="utf-8")
    files = _Files(interactions, out)
    last_U = first_U[trained] + kept_U[trained] - 1
    starts_U = np.maximum(first_U[trained], last_U - longest)
    rows = {"train": files.write("train", trained, starts_U, last_U, interactions.item_N[last_U][:, None])}
    for name, (begin_U, _) in ends.items():
        drawn = order[ranked[name][order]][:users]
        true_U = first_U[drawn] + begin_U[drawn]
        others = _unseen(drawn, candidates, most, known, pool, draws)
        items = np.concatenate([interactions.item_N[true_U][:, None], others], axis=1)
        rows[name] = files.write(name, drawn, np.maximum(first_U[drawn], true_U - longest), true_U, items)
    rows["users"] = files.write("users", np.arange(len(size_U)), first_U, first_U + size_U)
    return rows


def _unseen(users: Ints, count: int, most: int, known: Ints, pool: Ints, draws: np.random.Generator) -> Ints:
    """``count`` random items of the pool for each user, none of the user's known ones: (U, count)."""
    drawn = np.zeros((len(users), count), dtype=np.int64)
    missing = np.ones(drawn.shape, dtype=np.bool_)
    while missing.any():
        drawn[missing] = pool[draws.integers(0, len(pool), int(missing.sum()))]
        missing = np.isin(users[:, None] * most + drawn, known)
    return drawn


class _Files:
    """Writes Parquet files of some users' interactions."""

    def __init__(self, interactions: Interactions, out: Path) -> None:
        self._interactions, self._out = interactions, out

    def write(self, name: str, users_U: Ints, starts_U: Ints, ends_U: Ints, items_UK: Ints | None = None) -> int:
        """A row for each user, or K: the interactions between start and end as its history, and an item of
        ``items_UK``, of which the first was clicked."""
        import pyarrow.parquet as pq

        writer, count, begin = None, 0, 0
        cost_U = np.cumsum((ends_U - starts_U + 1) * (1 if items_UK is None else items_UK.shape[1]))
        while begin < len(users_U):  # in blocks of a bounded number of values
            spent = cost_U[begin - 1] if begin else 0
            stop = max(begin + 1, int(np.searchsorted(cost_U, spent + _VALUES_AT_ONCE, side="right")))
            some = slice(begin, stop)
            table = self._table(
                users_U[some], starts_U[some], ends_U[some], None if items_UK is None else items_UK[some]
            )
            writer = writer or pq.ParquetWriter(self._out / f"{name}.parquet", table.schema, compression="zstd")
            writer.write_table(table, row_group_size=_GROUP_ROWS)
            begin, count = stop, count + table.num_rows
        if writer is not None:
            writer.close()
        return count

    def _table(self, users_U: Ints, starts_U: Ints, ends_U: Ints, items_UK: Ints | None) -> pa.Table:
        import pyarrow as pa

        each = 1 if items_UK is None else items_UK.shape[1]
        starts, lengths = np.repeat(starts_U, each), np.repeat(ends_U - starts_U, each)
        offsets = np.r_[0, np.cumsum(lengths)]
        places = np.arange(offsets[-1]) - np.repeat(offsets[:-1] - starts, lengths)
        ids, users = self._interactions.item_ids, self._interactions.user_ids
        history = ids.take(pa.array(self._interactions.item_N[places]))
        columns = {
            "user": users.take(pa.array(np.repeat(users_U, each))),
            "history": pa.ListArray.from_arrays(offsets.astype(np.int32), history),
        }
        if items_UK is not None:
            labels = np.zeros(items_UK.shape, dtype=np.int8)
            labels[:, 0] = 1
            columns |= {"item": ids.take(pa.array(items_UK.reshape(-1))), "label": pa.array(labels.reshape(-1))}
        return pa.table(columns)

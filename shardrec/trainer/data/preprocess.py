"""How raw columns become model inputs: pure functions over arrays, shared by the readers and the generator.

| raw | input |
|---|---|
| integer ``x`` | ``log(max(x, -1) + 3)``: -1 and below 0.69, 0 → 1.10, 1 → 1.39, a million → 13.8 |
| missing integer | 0.0, a value that no present integer has |
| category ``c`` (8 hex digits, read as a number) | ``c mod (n - 1) + 1`` in a table of ``n`` rows |
| missing category | row 0, which no present category has |

The logarithm of a shifted count is what the open DLRM implementation does with the same files ("Deep Learning
Recommendation Model for Personalization and Recommendation Systems", Naumov et al., 2019). The shift here is larger,
so that a missing value differs from a zero. Two categories that fall on the same row share it (the hashing trick).
"""

from __future__ import annotations

import math
from datetime import UTC, datetime

import numpy as np
from numpy.typing import NDArray


def days(text: bytes) -> float:
    """Days from 1970-01-01 UTC to a date or time in the format of ISO 8601. NaN for another text."""
    try:
        moment = datetime.fromisoformat(text.decode())
    except ValueError:
        return math.nan
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp() / 86_400


def transform_dense(raw: NDArray[np.float64], missing: NDArray[np.bool_]) -> NDArray[np.float32]:
    """Compresses counts to model inputs.

    Args:
        raw: numbers as they stand in the file, any shape. What is under ``missing`` is not read.
        missing: bool, the same shape.

    Returns:
        float32, the same shape: ``log(max(raw, -1) + 3)``, and 0 where missing.
    """
    present = np.where(missing, 0.0, raw).astype(np.float32)
    out = np.log(np.maximum(present, np.float32(-1.0)) + np.float32(3.0))
    return np.where(missing, np.float32(0.0), out)


def hash_categories(
    raw: NDArray[np.uint64], missing: NDArray[np.bool_], num_embeddings: NDArray[np.uint64]
) -> NDArray[np.int64]:
    """Folds categories into the rows of their embedding tables.

    Args:
        raw: the categories as numbers. What is under ``missing`` is not read.
        missing: bool, the same shape.
        num_embeddings: rows of each table, a shape that broadcasts with ``raw`` (``(F,)`` for ``(N, F)``).

    Returns:
        int64, the same shape: ``raw mod (num_embeddings - 1) + 1``, and 0 where missing.
    """
    ids = raw % (num_embeddings - np.uint64(1))
    ids += np.uint64(1)
    if missing.any():
        ids[missing] = 0
    return ids.view(np.int64)


def mixed(raw: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finalizer of SplitMix64 (Steele, Lea and Flood, 2014): every input bit flips half of the output bits."""
    raw = raw ^ (raw >> np.uint64(30))
    raw *= np.uint64(0xBF58476D1CE4E5B9)
    raw ^= raw >> np.uint64(27)
    raw *= np.uint64(0x94D049BB133111EB)
    raw ^= raw >> np.uint64(31)
    return raw

"""Lines of ``label index:value index:value ...``, as LIBSVM, libFM and SVMlight write them, as an Arrow table.

    1 qid:7 12:0.5 31:1 # a comment     →     label 1, qid 7, ids ["12", "31"], values ["0.5", "1"]

A spec names the columns ``label``, ``qid`` (for ``group``), ``ids`` and ``values``::

    group: qid
    features:
      - {name: words, kind: weighted, column: ids, weights: values, rows: 100_000, ids: number}
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import numpy as np

from shardrec.trainer.data.arrays import mask
from shardrec.trainer.data.fault import Reason, RowFault, shown

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["COLUMNS", "parse_svmlight"]

COLUMNS = ("label", "qid", "ids", "values")
_TOKEN = r"^[0-9A-Za-z_]+:[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?$"


def parse_svmlight(data: bytes) -> tuple[pa.Table, dict[int, RowFault]]:
    """The lines of a block of text.

    Args:
        data: whole lines.

    Returns:
        A table of the good lines with the columns :data:`COLUMNS`, and the faults of the others by their numbers, from
        0.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    lines = data.split(b"\n")
    if not lines[-1]:
        lines.pop()
    # Without comments, and with single spaces.
    texts = [line.partition(b"#")[0].split() for line in lines]
    lengths = np.fromiter((max(0, len(words) - 1) for words in texts), dtype=np.int64, count=len(texts))
    tokens = pa.array([word for words in texts for word in words[1:]], pa.binary())
    good = mask(pc.match_substring_regex(tokens, _TOKEN))
    row_V = np.repeat(np.arange(len(texts)), lengths)
    bad = np.bincount(row_V[~good], minlength=len(texts)) > 0
    empty = np.fromiter((not words for words in texts), dtype=np.bool_, count=len(texts))
    faults = {int(row): _fault(lines[row], texts[row]) for row in np.flatnonzero(bad | empty)}
    keep_N = ~(bad | empty)
    keep_V = keep_N[row_V]
    pairs = pc.split_pattern(tokens.filter(pa.array(keep_V)).cast(pa.string()), ":")
    indices, values = pc.list_element(pairs, 0), pc.list_element(pairs, 1)
    rows = row_V[keep_V]
    # A query's number is the first pair of a line, and no feature of it.
    is_query = mask(pc.equal(indices, "qid"))
    number = np.cumsum(keep_N) - 1
    places = np.full(int(keep_N.sum()), -1, dtype=np.int64)
    places[number[rows[is_query]]] = np.flatnonzero(is_query)
    queries = values.take(pa.array(places, mask=places < 0))
    feature = pa.array(~is_query)
    counts = np.bincount(number[rows[~is_query]], minlength=len(places)) if len(places) else places
    offsets = pa.array(np.r_[0, np.cumsum(counts)].astype(np.int32))
    columns = {
        "label": pa.array([words[0] for words, kept in zip(texts, keep_N, strict=True) if kept], pa.binary()),
        "qid": queries,
        "ids": pa.ListArray.from_arrays(offsets, indices.filter(feature)),
        "values": pa.ListArray.from_arrays(offsets, values.filter(feature)),
    }
    return pa.table(columns), faults


def _fault(line: bytes, words: list[bytes]) -> RowFault:
    if not words:
        where, remedy = "the line is empty", "leave it out"
    else:
        wrong = next(word for word in words[1:] if not re.match(_TOKEN, word.decode("utf-8", errors="replace")))
        field = f"pair {words.index(wrong)}" if b":" in wrong else f"word {words.index(wrong) + 1}"
        where, remedy = f"{field}: {shown(wrong)} is not index:value with a number", "correct it"
    return RowFault(reason=Reason.COLUMNS, where=where, remedy=remedy)

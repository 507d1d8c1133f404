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

COLUMNS = ("label", "qid", "ids", "values")
_TOKEN = r"^[0-9A-Za-z_]+:[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?$"


def parse_svmlight(lines: pa.Array) -> tuple[pa.Table, dict[int, RowFault]]:
    """Lines, of a binary array (N,), as a table.

    Returns:
        A table of the good lines with the columns :data:`COLUMNS`, and the faults of the others by their numbers, from
        0.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    texts = pc.replace_substring_regex(lines, "#.*", "").view(pa.string())
    words = pc.ascii_split_whitespace(pc.ascii_trim_whitespace(texts))
    labels, is_label = pc.list_element(words, 0), np.zeros(len(words.values), dtype=np.bool_)
    is_label[words.offsets.to_numpy()[:-1]] = True
    tokens = words.values.filter(pa.array(~is_label))
    row_V = pc.list_parent_indices(words).to_numpy()[~is_label]
    good = mask(pc.match_substring_regex(tokens, _TOKEN))
    bad = mask(pc.equal(labels, ""))
    bad[row_V[~good]] = True
    faults = {int(row): _fault(lines[row].as_py()) for row in np.flatnonzero(bad)}
    kept, of_kept = pa.array(~bad), ~bad[row_V]
    pairs = pc.split_pattern(tokens.filter(pa.array(of_kept)), ":")
    indices, values = pc.list_element(pairs, 0), pc.list_element(pairs, 1)
    rows = (np.cumsum(~bad) - 1)[row_V[of_kept]]
    # A query's number is the first pair of a line, and no feature of it.
    is_query, count = mask(pc.equal(indices, "qid")), int((~bad).sum())
    places = np.full(count, -1, dtype=np.int64)
    places[rows[is_query]] = np.flatnonzero(is_query)
    offsets = pa.array(np.r_[0, np.cumsum(np.bincount(rows[~is_query], minlength=count))].astype(np.int32))
    columns = {
        "label": labels.filter(kept).cast(pa.binary()),
        "qid": values.take(pa.array(places, mask=places < 0)),
        "ids": pa.ListArray.from_arrays(offsets, indices.filter(pa.array(~is_query))),
        "values": pa.ListArray.from_arrays(offsets, values.filter(pa.array(~is_query))),
    }
    return pa.table(columns), faults


def _fault(line: bytes) -> RowFault:
    words = line.partition(b"#")[0].split()
    if not words:
        where, remedy = "the line is empty", "leave it out"
    else:
        wrong = next(word for word in words[1:] if not re.match(_TOKEN, word.decode("utf-8", errors="replace")))
        field = f"pair {words.index(wrong)}" if b":" in wrong else f"word {words.index(wrong) + 1}"
        where, remedy = f"{field}: {shown(wrong)} is not index:value with a number", "correct it"
    return RowFault(reason=Reason.COLUMNS, where=where, remedy=remedy)

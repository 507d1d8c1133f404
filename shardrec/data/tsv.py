"""Rows of Criteo's text format: label, integers and hexadecimal categories, separated by tabs, without a header.

A block of lines is decoded as a whole; only the lines that fail are looked at one by one, for the message.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from shardrec.data.compression import FileKind
from shardrec.data.fault import FaultLog, Reason, RowFault, explain_line
from shardrec.data.fields import ByteFields, LineTable, split_lines
from shardrec.data.lines import LineBlock, LineStream
from shardrec.data.preprocess import hash_categories, transform_dense
from shardrec.data.rows import ClickRows, NumberedRows
from shardrec.data.schema import ClickSchema

__all__ = ["read_tsv"]


def read_tsv(path: Path, kind: FileKind, schema: ClickSchema, log: FaultLog) -> Iterator[NumberedRows]:
    """Reads one file, about 1 MiB of text at a time.

    Args:
        path: the file.
        kind: plain text, gzip or xz.
        schema: the columns after the label, in file order.
        log: takes the faults.

    Yields:
        The good rows, in file order.

    Raises:
        DataError: a broken row, line or stream, unless ``log`` skips them; after the rows before a broken stream.
    """
    stream = LineStream(path, kind)
    for block in stream:
        if block.too_long:
            log.report(path, block.first_line, _too_long(block))
            continue
        yield _decode(path, block, schema, log)
    if stream.damage is not None:
        fault = RowFault(reason=Reason.CUT_STREAM, where=stream.damage, remedy="copy or compress the file again")
        log.report(path, stream.lines + 1, fault)


def _decode(path: Path, block: LineBlock, schema: ClickSchema, log: FaultLog) -> NumberedRows:
    num_dense = len(schema.dense_names)
    table = split_lines(block.data, 1 + num_dense + len(schema.sparse_names))
    fields = ByteFields(block.data)
    labels, bad_label = fields.bits(table.starts[:, 0], table.lengths[:, 0])
    dense = slice(1, 1 + num_dense)
    counts, no_count, bad_count = fields.integers(table.starts[:, dense], table.lengths[:, dense])
    sparse = slice(1 + num_dense, None)
    names, no_name, bad_name = fields.categories(table.starts[:, sparse], table.lengths[:, sparse])
    bad = bad_label | bad_count.any(axis=1) | bad_name.any(axis=1)
    _report(path, block, table, bad, schema, log)
    sizes = np.array(schema.num_embeddings, dtype=np.uint64)
    rows = ClickRows(
        labels=labels,
        dense=transform_dense(counts, no_count),
        ids=hash_categories(names, no_name, sizes).reshape(-1),
    )
    lines = len(table.line_starts) - 1
    first = block.first_line - 1
    return NumberedRows(rows=rows.where(~bad), numbers=table.good[~bad] + first, seen=first + lines)


def _report(
    path: Path, block: LineBlock, table: LineTable, bad: NDArray[np.bool_], schema: ClickSchema, log: FaultLog
) -> None:
    """Tells ``log`` about the lines without the right columns and the rows with a bad field, in order."""
    lines = len(table.line_starts) - 1
    if len(table.good) == lines and not bad.any():
        return
    broken = np.ones(lines, dtype=np.bool_)
    broken[table.good[~bad]] = False
    for line in np.flatnonzero(broken):
        text = block.data[table.line_starts[line] : table.line_starts[line + 1] - 1]
        fault = explain_line(text, schema, cut=block.cut and line == lines - 1)
        assert fault is not None, f"{path}:{block.first_line + line}: found bad in a block but good by itself"
        log.report(path, block.first_line + int(line), fault)


def _too_long(block: LineBlock) -> RowFault:
    start = block.data[:40].decode("utf-8", errors="replace")
    return RowFault(
        reason=Reason.LONG_LINE,
        where=f"field 'label': value {start!r}... begins a line of more than 1 MiB",
        remedy="give a text file with a line feed after each row",
    )

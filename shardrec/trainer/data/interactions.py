"""Interactions of users with items, read from files of one a row: ``shardrec sequences`` before its split.

Which column is which is told by names or positions, or follows from the names of a header. A first line that may be a
header or not, and columns that may be others, are errors: nothing is guessed that would change the interactions.

Legend: N interactions.
"""

from __future__ import annotations

import csv as standard_csv
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardrec import DataError
from shardrec.trainer.data.arrays import plain
from shardrec.trainer.data.encode import encode
from shardrec.trainer.data.formats import Rows, file_kind, read_rows, text_head, undamaged
from shardrec.trainer.data.ids import are_whole, id_texts
from shardrec.trainer.data.rows import ClickRows
from shardrec.trainer.data.spec import Feature, FeatureSpec, Label
from shardrec.trainer.data.urls import files_of, open_input

if TYPE_CHECKING:
    import pyarrow as pa

Ints = NDArray[np.int64]

_NAMES = {
    "user": "user users userid uid customer customerid reviewer reviewerid visitorid memberid",
    "item": "item items itemid iid movie movieid product productid asin parentasin trackid artistid bookid isbn",
    "time": "time timestamp ts date datetime unixreviewtime",
    "rating": "rating ratings score stars overall",
}
"""Names of columns without marks between the words, and what they are."""
_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?|[0-9]{4}-[0-9]{2}-[0-9]{2}.*")
"""Or a date: what is no name of a column."""
_ONE = "without ratings"
_HEAD = 1 << 16


@dataclass(frozen=True, kw_only=True)
class Columns:
    """What is known of the files' columns: names, or positions from 1. None for what follows from a header.

    Attributes:
        user, item: of ids; without a header, those of a file of two columns are 1 and 2.
        time: a number of seconds or milliseconds since 1970, or a text in ISO 8601; else the files' order counts.
        rating: a number.
        above: interactions with a rating of at most this do not count. None for all ratings.
        separator: between the columns of a text. None for what the first line has.
        header: whether the first line has names. None for what follows from it.
    """

    user: str | None = None
    item: str | None = None
    time: str | None = None
    rating: str | None = None
    above: float | None = None
    separator: str | None = None
    header: bool | None = None


class Interactions(NamedTuple):
    """N interactions, user after user and each user's by time, those of equal times in the files' order.

    ``user_N`` and ``item_N`` are places in the sorted distinct ids. ``time_N`` is in seconds, 0 without times.
    ``columns`` are those that were read, by what they are. ``left_out`` is how many rows could not be read.
    """

    user_ids: pa.Array
    item_ids: pa.Array
    user_N: Ints
    item_N: Ints
    time_N: NDArray[np.float64]
    columns: Mapping[str, str]
    left_out: int

    def core(self, least: int) -> Interactions:
        """Those of users and items with at least that many, repeatedly until all have."""
        keep = np.ones(len(self.user_N), dtype=np.bool_)
        while True:
            counts = (np.bincount(of[keep], minlength=of.max(initial=0) + 1)[of] for of in (self.user_N, self.item_N))
            more = keep & np.logical_and(*(count >= least for count in counts))
            if more.sum() == keep.sum():
                break
            keep = more
        if not keep.any():
            raise DataError(f"no user and item have {least} interactions each: give a lower --core")
        user, user_N = np.unique(self.user_N[keep], return_inverse=True)
        item, item_N = np.unique(self.item_N[keep], return_inverse=True)
        users, items = self.user_ids.take(user), self.item_ids.take(item)
        return self._replace(user_ids=users, item_ids=items, user_N=user_N, item_N=item_N, time_N=self.time_N[keep])


def read_interactions(pattern: str, columns: Columns, *, skips: bool = False) -> Interactions:
    """The interactions of some files.

    Args:
        pattern: files of rows, as for ``shardrec train --data``, of an interaction each; in Parquet also of a list of
            items each, in order.
        columns: what is known of them.
        skips: whether a row that cannot be read is left out; else it is an error.

    Raises:
        DataError: for a file or a row that cannot be read, or columns that are not clear.
    """
    import pyarrow as pa

    users: list[pa.Array] = []
    items: list[pa.Array] = []
    times: list[NDArray[np.float64]] = []
    chosen: dict[str, str] = {}
    left_out = 0
    for path in files_of(pattern):
        with undamaged(path):
            before, (chosen, form) = chosen, _understood(path, columns)
            if before not in ({}, chosen):
                raise DataError(f"data file {path} has columns {chosen}, and others have {before}: give files alike")
            for table, rows, bad in _tables(path, chosen, columns.above, form):
                if bad and not skips:
                    raise DataError(f"{bad[0]}, or leave such rows out (--on-bad-row skip)")
                left_out += len(bad)
                keep = rows.labels > 0
                users.append(plain(table[chosen["user"]]).filter(pa.array(keep)).dictionary_encode())
                items.append(plain(table[chosen["item"]]).filter(pa.array(keep)).dictionary_encode())
                times.append(np.zeros(keep.sum()) if rows.times is None else rows.times[keep])
    if not sum(map(len, times)):
        raise DataError(f"data files {pattern} have no interactions: give others, or a lower --above")
    (user_ids, user_N), (item_ids, item_N), time_N = _numbered(users), _numbered(items), np.concatenate(times)
    order = np.lexsort((time_N, user_N))
    return Interactions(user_ids, item_ids, user_N[order], item_N[order], time_N[order], chosen, left_out)


def _numbered(blocks: Sequence[pa.Array]) -> tuple[pa.Array, Ints]:
    """The distinct ids, sorted, and the place of each value in them. Texts that are all whole numbers are numbers."""
    import pyarrow as pa
    import pyarrow.compute as pc

    column = pa.chunked_array(blocks).unify_dictionaries().combine_chunks()
    written, ids, _ = id_texts(column.dictionary)
    are_numbers = are_whole(column.dictionary)
    values = (ids if are_numbers else written).cast(pa.string())
    with suppress(pa.ArrowInvalid):  # of a number that is too large
        values = values.cast(pa.int64()) if are_numbers else values
    distinct = values.unique().sort()
    return distinct, pc.index_in(values, value_set=distinct).to_numpy().astype(np.int64)[column.indices.to_numpy()]


def _tables(
    path: str, chosen: Mapping[str, str], above: float | None, form: Mapping[str, Any]
) -> Iterator[tuple[pa.Table, ClickRows, list[str]]]:
    """The rows of a file that can be read, as a table and encoded, and what is wrong with the others.

    The user is read as a group, the time as an event time, and the rating as a label, which is 1 without ratings.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    item = Feature(name="item", column=chosen["item"], kind="id", rows=2**31 - 1, spelling="texts")
    label = Label(column=chosen.get("rating", _ONE), above=above)
    spec = FeatureSpec(features=(item,), group=chosen["user"], event_time=chosen.get("time"), label=label)
    columns, seen = [*dict.fromkeys(chosen.values())], 0
    if file_kind(path) == "parquet":
        batches = pq.ParquetFile(open_input(path)).iter_batches(columns=columns)
        blocks: Iterator[Rows] = ((_by_item(pa.Table.from_batches([batch]), chosen["item"]), {}) for batch in batches)
    else:
        of_text = FeatureSpec(features=(item,), label=Label(column=chosen["user"]), **form)
        blocks = read_rows(path, of_text, columns)
    first = 2 if file_kind(path) == "text" and "columns" not in form else 1
    for table, faults in blocks:
        begin, seen = seen, seen + len(table) + len(faults)
        numbers = np.delete(np.arange(begin, seen), list(faults))
        encoded = encode(table.append_column(_ONE, pa.array(np.ones(len(table), np.int8))), spec)
        lacks = encoded.rows.ids == 0
        bad = {int(numbers[row]): f"field {item.source!r} has no value. Correct it" for row in np.flatnonzero(lacks)}
        bad |= {int(numbers[row]): str(fault) for row, fault in encoded.faults.items()}
        good = ~np.isin(numbers, list(bad))
        bad |= {begin + row: str(fault) for row, fault in faults.items()}
        told = [f"{path}:{row + first}: {bad[row]}" for row in sorted(bad)]
        yield table.filter(pa.array(good)), encoded.rows.where(good), told


def _by_item(table: pa.Table, item: str) -> pa.Table:
    """Of rows with lists of items, a row for each item, also of other columns' lists, which are as long."""
    import pyarrow as pa
    import pyarrow.compute as pc

    lists = {name for name in table.column_names if pa.types.is_nested(table.schema.field(name).type)}
    if item not in lists:
        return table
    lengths = pc.list_value_length(table[item])
    for name in sorted(lists):
        if pc.list_value_length(table[name]) != lengths:
            raise DataError(f"columns {item!r} and {name!r} have lists of different lengths: make them equally long")
    rows = pc.list_parent_indices(table[item])
    columns = {
        name: pc.list_flatten(array) if name in lists else array.take(rows)
        for name, array in zip(table.column_names, table.columns, strict=True)
    }
    return pa.table(columns)


def _understood(path: str, columns: Columns) -> tuple[dict[str, str], dict[str, Any]]:
    """The columns that are read, by what they are; and how a text is written, in a spec's words."""
    import pyarrow.parquet as pq

    form: dict[str, Any] = {}
    if file_kind(path) == "parquet":
        names, line = pq.ParquetFile(open_input(path)).schema_arrow.names, ""
    elif file_kind(path) == "text":
        names, line, form = _form(path, columns)
    else:
        raise DataError(f"data file {path} has no columns of users and items: give Parquet, or text")
    is_needed = {"user": True, "item": True, "time": False, "rating": columns.above is not None}
    chosen = {}
    for kind in _NAMES:
        given, alike = getattr(columns, kind), [name for name in names if _kind(name) == kind]
        if given is not None and given not in names:
            if not (given.isdecimal() and 1 <= int(given) <= len(names)):
                raise DataError(f"data file {path} has no column {given!r} (--{kind}): it has {', '.join(names)}")
            given = names[int(given) - 1]
        elif given is None and "columns" in form and len(names) == 2 and kind in ("user", "item"):
            given = names[kind == "item"]
        elif given is None and len(alike) == 1:
            given = alike[0]
        elif given is None and (is_needed[kind] or (alike and kind != "rating")):
            raise DataError(
                f"data file {path} has {len(names)} columns, {', '.join(names)}{line}: say which of them has the "
                f"{kind} (--{kind} NAME, or --{kind} 1 for the first), and so for --user, --item, --time and --rating"
            )
        if given is not None and (kind != "rating" or is_needed[kind]):
            chosen[kind] = given
    twice = [name for name in chosen.values() if names.count(name) > 1 or [*chosen.values()].count(name) > 1]
    if twice:
        raise DataError(f"data file {path}: column {twice[0]!r} is there, or is named, twice: give one for each thing")
    return chosen, form


def _form(path: str, columns: Columns) -> tuple[list[str], str, dict[str, Any]]:
    """The names of a text's columns, their numbers if there is no header, whose first line is told then; and its form.

    Raises:
        DataError: if it cannot be told, or is not what is said of it.
    """
    data = text_head(path, _HEAD)
    text = data.decode("utf-8-sig", errors="replace")
    lines = [line for line in text.splitlines()[: -1 if len(data) == _HEAD else None] if line][:100]
    marks = [columns.separator] if columns.separator else ["::", "\t", ";", ",", "|", " "]
    separator = next((mark for mark in marks if lines and all(mark in line for line in lines)), "")
    if not separator:
        raise DataError(
            f"data file {path} has lines without {' or '.join(map(repr, marks))}, such as "
            f"{next((line for line in lines if marks[0] not in line), '')[:60]!r}: give --separator TEXT"
        )
    rows = (
        [*standard_csv.reader(lines, delimiter=separator)]
        if len(separator) == 1
        else [line.split(separator) for line in lines]
    )
    first, others = [name.strip() for name in rows[0]], rows[1:]
    is_named = len({*map(_kind, first)} - {None}) > 1 or any(
        getattr(columns, kind) in first and not getattr(columns, kind).isdecimal() for kind in _NAMES
    )
    has_numbers = any(map(_NUMBER.fullmatch, first))
    is_above_numbers = len(others) > 1 and any(
        not _NUMBER.fullmatch(name) and all(len(row) > place and _NUMBER.fullmatch(row[place]) for row in others)
        for place, name in enumerate(first)
    )
    header, line = columns.header, lines[0][:80]
    if header is None:
        header = is_named or (is_above_numbers and not has_numbers)
        if not header and not has_numbers:
            raise DataError(f"data file {path}: is its first line {line!r} a header? Give --header or --no-header")
    elif not header and (is_named or is_above_numbers):
        raise DataError(f"data file {path} has a header, {line!r}: leave --no-header out")
    elif header and has_numbers and not is_named:
        raise DataError(
            f"data file {path} has numbers or dates in its first line {line!r}, as rows have: give --no-header"
        )
    form: dict[str, Any] = {"delimiter": separator}
    if header:
        return first, "", form
    places = tuple(str(place) for place in range(1, len(first) + 1))
    return [*places], f" and no header (its first line is {line!r})", {**form, "columns": places}


def _kind(name: str) -> str | None:
    """What a column is by its name, such as ``userId`` or ``user_id:token``."""
    word = re.sub(r"[^a-z0-9]", "", name.partition(":")[0].lower())
    return next((kind for kind, words in _NAMES.items() if word in words.split()), None)

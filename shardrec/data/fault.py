"""What is wrong with a row, in words, and what to do about it: raise or count.

The readers find broken rows by vectorised checks, which say only *that* a row is bad. :func:`explain_line` then goes
through that one line field by field and finds the first fault; it is the definition of a good line.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from shardrec.data.schema import ClickSchema
from shardrec.errors import ConfigError, DataError

__all__ = ["FaultLog", "Reason", "RowFault", "explain_line"]

_INTEGER = re.compile(r"-?[0-9]{1,18}", re.ASCII)
_CATEGORY = re.compile(r"[0-9a-fA-F]{8}", re.ASCII)


class Reason(StrEnum):
    """Why a row is left out; the keys of ``skipped``."""

    COLUMNS = "wrong number of columns"
    LABEL = "bad label"
    INTEGER = "bad number"
    CATEGORY = "bad category"
    ENCODING = "not UTF-8"
    NUL = "NUL byte"
    LONG_LINE = "line too long"
    CUT_LINE = "truncated line"
    CUT_STREAM = "truncated stream"


@dataclass(frozen=True, kw_only=True)
class RowFault:
    """One fault.

    Attributes:
        reason: its kind.
        where: the field, or the part of the file, with the value that was seen.
        remedy: what to do about it.
    """

    reason: Reason
    where: str
    remedy: str


class FaultLog:
    """Raises the first fault, or counts them all.

    Args:
        on_bad_row: ``"raise"`` or ``"skip"``.

    Attributes:
        skipped: number of faults of each kind so far; the keys are the values of :class:`Reason`.

    Raises:
        ConfigError: ``on_bad_row`` is something else.
    """

    def __init__(self, on_bad_row: str) -> None:
        if on_bad_row not in ("raise", "skip"):
            raise ConfigError(f"on_bad_row is {on_bad_row!r}: give 'raise' or 'skip'")
        self._raises = on_bad_row == "raise"
        self.skipped: Counter[str] = Counter()

    def report(self, path: Path, line: int, fault: RowFault) -> None:
        """Takes note of a fault in a line (or, in Parquet, a row), counted from 1.

        Raises:
            DataError: unless faults are skipped; the message is ``path:line: where; remedy``.
        """
        if self._raises:
            raise DataError(f'{path}:{line}: {fault.where}; {fault.remedy}, or drop such rows with on_bad_row="skip"')
        self.skipped[fault.reason.value] += 1


def explain_line(line: bytes, schema: ClickSchema, *, cut: bool = False) -> RowFault | None:
    """The first fault of one line of Criteo's text format.

    Args:
        line: the line without its line feed; one carriage return at its end is allowed.
        schema: the columns after the label.
        cut: whether the file ends right after the line, without a line feed.

    Returns:
        The fault, or None for a good line.
    """
    names = ("label", *schema.dense_names, *schema.sparse_names)
    line = line.removesuffix(b"\r")
    try:
        fields = line.decode("utf-8").split("\t")
    except UnicodeDecodeError as error:
        column = line[: error.start].count(b"\t")
        return RowFault(
            reason=Reason.ENCODING,
            where=f"{_field(names, column)}: byte 0x{line[error.start]:02x} at position {error.start} is not UTF-8",
            remedy="give an uncompressed, .gz or .xz text file",
        )
    if b"\0" in line:
        column = line[: line.index(b"\0")].count(b"\t")
        return RowFault(
            reason=Reason.NUL,
            where=f"{_field(names, column)}: value {_shown(fields[column])} holds a NUL byte",
            remedy="the file is damaged or not a text file: copy it again",
        )
    if len(fields) != len(names):
        return _explain_columns(line, fields, names, cut)
    for column, (name, value) in enumerate(zip(names, fields, strict=True)):
        fault = _explain_field(name, value, column, len(schema.dense_names))
        if fault is not None:
            if cut and column == len(names) - 1 and len(value) < 8:
                return _cut_fault(fields, names)
            return fault
    return None


def _explain_columns(line: bytes, fields: list[str], names: tuple[str, ...], cut: bool) -> RowFault:
    if cut and len(fields) < len(names):
        return _cut_fault(fields, names)
    if not line:
        where = f"field 'label': the line is empty, {len(names)} columns are expected"
    elif len(fields) < len(names):
        where = f"{_field(names, len(fields))}: missing, the line has {len(fields)} of {len(names)} columns"
    else:
        extra = _shown(fields[len(names)])
        where = f"field {len(names) + 1}: value {extra} is extra, the line has {len(fields)} of {len(names)} columns"
    remedy = "separate columns by single tabs, with empty strings for missing values"
    if len(fields) == len(names) - 1:
        remedy += " (a test file without labels cannot be trained on)"
    return RowFault(reason=Reason.COLUMNS, where=where, remedy=remedy)


def _cut_fault(fields: list[str], names: tuple[str, ...]) -> RowFault:
    last = len(fields) - 1
    return RowFault(
        reason=Reason.CUT_LINE,
        where=f"{_field(names, last)}: value {_shown(fields[last])} is the end of the file, in column {last + 1} "
        f"of {len(names)}",
        remedy="the file is truncated: copy it again",
    )


def _explain_field(name: str, value: str, column: int, num_dense: int) -> RowFault | None:
    where = f"field {name!r}: value {_shown(value)}"
    if column == 0:
        if value in ("0", "1"):
            return None
        remedy = "remove the header line" if value.strip("\ufeff").lower() in ("label", "click") else "correct the line"
        if value.startswith("\ufeff"):
            remedy = "save the file without a byte order mark"
        return RowFault(reason=Reason.LABEL, where=f"{where} is not 0 or 1", remedy=remedy)
    if value == "":
        return None
    if column <= num_dense:
        if _INTEGER.fullmatch(value):
            return None
        return RowFault(
            reason=Reason.INTEGER,
            where=f"{where} is not an integer of at most 18 digits",
            remedy="correct it or leave it empty for a missing value",
        )
    if _CATEGORY.fullmatch(value):
        return None
    return RowFault(
        reason=Reason.CATEGORY,
        where=f"{where} is not 8 hexadecimal digits",
        remedy="correct it or leave it empty for a missing value",
    )


def _field(names: tuple[str, ...], column: int) -> str:
    return f"field {names[column]!r}" if column < len(names) else f"field {column + 1}"


def _shown(value: str) -> str:
    return repr(value if len(value) <= 40 else value[:37] + "...")

"""What is wrong with a row, in words."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pyarrow as pa

_SHOWN = 60


class Reason(StrEnum):
    """Why a row is left out. The keys of ``skipped``."""

    COLUMNS = "wrong number of columns"
    LABEL = "bad label"
    NUMBER = "bad number"
    ID = "bad id"
    TIME = "bad event time"
    LATE = "late row"
    DAMAGED = "damaged part of a file"
    OBJECT = "bad JSON object"


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

    def __str__(self) -> str:
        return f"{self.where}; {self.remedy}"


def shown(value: object) -> str:
    """A value in a message, cut short."""
    if isinstance(value, bytes):
        value = value.decode("utf-8", errors="backslashreplace")
    text = repr(value)
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."


def shown_scalar(scalar: pa.Scalar) -> str:
    """:func:`shown` of an Arrow scalar; of a text that is not UTF-8 its bytes, of a date after 9999 why it has none."""
    try:
        return shown(scalar.as_py())
    except UnicodeDecodeError as error:
        return shown(error.object)
    except (OverflowError, ValueError) as error:
        return f"({error})"

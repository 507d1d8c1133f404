"""What is wrong with a row, in words."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

__all__ = ["Reason", "RowFault"]


class Reason(StrEnum):
    """Why a row is left out; the keys of ``skipped``."""

    COLUMNS = "wrong number of columns"
    LABEL = "bad label"
    NUMBER = "bad number"
    ID = "bad id"


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

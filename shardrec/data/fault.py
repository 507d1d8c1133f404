"""What is wrong with a row, in words, and what to do about it: raise or count."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import StrEnum

from shardrec.errors import ConfigError, DataError

__all__ = ["FaultLog", "Reason", "RowFault"]


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

    def report(self, path: str, line: int, fault: RowFault) -> None:
        """Takes note of a fault in a line (or, in Parquet, a row), counted from 1.

        Raises:
            DataError: unless faults are skipped; the message is ``path:line: where; remedy``.
        """
        if self._raises:
            remedy = f"{fault.remedy}, or leave such rows out (on_bad_row: skip, --on-bad-row skip)"
            raise DataError(f"{path}:{line}: {fault.where}; {remedy}")
        self.skipped[fault.reason.value] += 1

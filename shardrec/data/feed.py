"""``Feed``: rows that go on arriving, such as files that a producer moves into a folder.

::

    poll()  a.parquet and b.parquet are there    arrival 0: their rows, as those of two files
    poll()  nothing has come since               None
    poll()  c.parquet has come                   arrival 1

An arrival is read like an epoch over its files (:mod:`shardrec.data.order`), so that a step of it says which rows are
read. With its position in a checkpoint, a run that goes on reads each row once.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from shardrec.data.files import FileClickData, check_kinds
from shardrec.data.spec import FeatureSpec
from shardrec.data.tables import check_file
from shardrec.data.urls import UnreachableError, check_listable, files_of, gone_from, path_of
from shardrec.errors import DataError

__all__ = ["Arrival", "Feed", "FolderFeed"]


@dataclass(frozen=True, kw_only=True)
class Arrival:
    """Rows that have arrived.

    Attributes:
        rows: one pass over them; none is held out.
        position: for :meth:`Feed.seek`, after which the next poll gives these rows again; JSON-compatible.
    """

    rows: FileClickData
    position: Any


class Feed(Protocol):
    """Rows that go on arriving. Every rank has one, makes the same calls and gets the same arrivals.

    Attributes:
        left_out: files without rows that can be read, so far.
    """

    left_out: int

    def poll(self, *, last: bool = False) -> Arrival | None:
        """The rows that have arrived since the last poll; None if there are none. Does not wait for any.

        Args:
            last: whether what cannot be reached is not tried again.

        Raises:
            DataError: on every rank, for what cannot be read.
            UnreachableError: on every rank, for what may be read later: the next poll goes on as if this one had not
                been.
        """

    def position(self) -> Any:
        """For :meth:`seek`: of the rows that follow those polled; JSON-compatible."""

    def seek(self, position: Any) -> None:
        """Go on from there, or from the position of an arrival."""


class FolderFeed:
    """The files of a folder, each of them once, as they arrive.

    A file has arrived when it has its name: a producer writes it under another (with ``.`` or ``_`` at the front, which
    no pattern takes) and renames it. The files of an arrival are in the order of their names, and one whose name is
    before those that were read is in the next arrival. Names of files that were removed are forgotten: those that their
    folder surely lacks, for a list may lack more. A file that a run may still go on with must stay as it is.

    Args:
        source: the folder, a pattern of names in it, or a URL of these.
        spec: what the columns are.
        opened: opens the files of an arrival.
        gathered: gives every rank the values of all ranks.
        is_lead: whether this is the first rank, which looks into the folder.
        most: files of an arrival.
        skips: whether a file that cannot be opened, or lacks columns, is left out with a warning, in place of an error.
    """

    def __init__(
        self,
        source: str,
        spec: FeatureSpec,
        opened: Callable[[Sequence[str]], FileClickData],
        *,
        gathered: Callable[[Any], list[Any]] = lambda value: [value],
        is_lead: bool = True,
        most: int = 64,
        skips: bool = False,
    ) -> None:
        self._source, self._spec, self._opened = source, spec, opened
        self._gathered, self._is_lead, self._was_there = gathered, is_lead, False
        self._most, self._skips = most, skips
        self._taken: set[str] = set()
        self._kinds: dict[str, tuple[str, str]] = {}
        self._again: list[str] = []
        self.left_out = 0

    def poll(self, *, last: bool = False) -> Arrival | None:
        """See :class:`Feed`."""
        files, kinds = self._again, self._kinds
        if not files:
            listing = self._gathered(self._listing(last) if self._is_lead else None)[0]
            if isinstance(listing, DataError):
                raise listing
            self._taken = self._taken.difference(listing["gone"]).union(listing["bad"])
            self.left_out += len(listing["bad"])
            files, kinds = listing["files"], listing["kinds"]
        if not files:
            return None
        position = {**self.position(), "kinds": dict(kinds), "files": files}
        rows, fault = None, None
        try:
            rows = self._opened(files)
        except DataError as error:
            fault = error
        faults = {rank: fault for rank, fault in enumerate(self._gathered(fault)) if fault is not None}
        if 0 in faults:
            raise faults[0]
        for rank, fault in faults.items():  # which may see the files a little later
            raise UnreachableError(f"rank {rank}: {fault}")
        assert rows is not None, "no rank has a fault"
        self._taken.update(files)
        self._again, self._kinds = [], kinds
        return Arrival(rows=rows, position=position)

    def position(self) -> dict[str, Any]:
        """See :class:`Feed`."""
        return {"taken": sorted(self._taken), "kinds": dict(self._kinds), "files": list(self._again)}

    def seek(self, position: Mapping[str, Any]) -> None:
        """See :class:`Feed`."""
        self._taken, self._again = set(position["taken"]), list(position["files"])
        self._kinds = {name: (kind, path) for name, (kind, path) in position["kinds"].items()}

    def _listing(self, last: bool) -> dict[str, Any] | DataError:
        """What has arrived and what is gone; or the fault."""
        files: list[str] = []
        bad: list[str] = []
        kinds = dict(self._kinds)
        try:
            names = files_of(self._source, least=0)
            if names in ([], [self._source]):
                check_listable(self._source)
            if names == [self._source]:
                kind = UnreachableError if self._was_there or self._taken else DataError
                raise kind(
                    f"data (--data) is feed:{self._source}, which is no folder and no pattern: make it first; where an "
                    "empty folder is none, as in object stores, give a pattern"
                )
            self._was_there = True
            for name in names:
                if name in self._taken or len(files) == self._most or _hidden(name):
                    continue
                kinds_with_file = dict(kinds)
                try:
                    check_kinds([check_file(name, self._spec)], kinds_with_file)
                except DataError as error:
                    if not self._skips or (isinstance(error, UnreachableError) and not last):
                        raise
                    warnings.warn(f"a file was left out: {error}", stacklevel=2)
                    bad.append(name)
                else:
                    files.append(name)
                    kinds = kinds_with_file
            gone = list(gone_from(self._taken.difference(names)))
        except DataError as error:
            return error
        return {"files": files, "bad": bad, "gone": gone, "kinds": kinds}


def _hidden(name: str) -> bool:
    return path_of(name).rpartition("/")[2].startswith((".", "_"))

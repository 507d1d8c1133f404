"""``Feed``: rows that go on arriving: files that a producer moves into a folder or lists in a manifest.

::

    poll()  a.parquet and b.parquet are there    arrival 0: their rows, as those of two files
    poll()  nothing has come since               None
    poll()  c.parquet has come                   arrival 1

An arrival is read like an epoch over its files (:mod:`shardrec.trainer.data.order`), so that a step of it says which
rows are read. With its position in a checkpoint, a run that goes on reads each row once. A topic is followed as the
folder of its ingester (:mod:`shardrec.trainer.data.ingest`).
"""

from __future__ import annotations

import os
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import accumulate, islice
from typing import Any, Protocol, TypeAlias, TypeVar

from shardrec import DataError
from shardrec.files import UnreachableError
from shardrec.trainer.data.files import FileClickData, check_kinds
from shardrec.trainer.data.ingest import IngestProcess, left_out_of, number_of
from shardrec.trainer.data.rows import NO_TIME
from shardrec.trainer.data.spec import FeatureSpec
from shardrec.trainer.data.tables import FileInfo, check_file
from shardrec.trainer.data.urls import TOPIC, check_listable, files_of, gone_of, open_input, path_of

_MANIFEST_BYTES = 1 << 20
"""Bytes of a manifest that are read at once."""

Position: TypeAlias = Mapping[str, Any]
"""What an arrival has and what is taken by then: ``files``, ``taken``, ``kinds`` and ``left_out``. JSON-compatible."""

_Value = TypeVar("_Value")


class Gathered(Protocol):
    """Gives every rank the values of all ranks."""

    def __call__(self, value: _Value, /) -> list[_Value]: ...


@dataclass(frozen=True, kw_only=True)
class Arrival:
    """Rows that have arrived.

    Attributes:
        rows: one pass over them. None is held out.
        listing: the position, without what is known of the files since their rows are counted.
    """

    rows: FileClickData
    listing: Position

    @property
    def position(self) -> Position:
        """For :meth:`Feed.seek`, after which the next poll gives these rows again. JSON-compatible."""
        return {**self.listing, "counted": [asdict(info) for info in self.rows.files]}


class Feed:
    """Rows that go on arriving, each of them once. Every rank has one, makes the same calls and gets the same arrivals.

    A file of a folder has arrived when it has its name: a producer writes it under another (with ``.`` or ``_`` at the
    front, which no pattern takes) and renames it. The files of an arrival are in the order of their names, and one
    whose name is before those that were read is in the next arrival. Names of files that were removed are forgotten:
    those that their folder surely lacks, for a list may lack more. A file of a manifest has arrived when its name
    stands there, in a whole line. They are read in the order of the lines. A file that a run may still go on with must
    stay as it is.

    Args:
        source: the folder, a pattern of names in it, a manifest (``…manifest.txt``), or a URL of these.
        spec: what the columns are.
        opened: opens the files of an arrival, of which the given things were known when they were begun with.
        gathered: gives every rank the values of all ranks.
        is_lead: whether this is the first rank, which looks for what has arrived.
        most: files of an arrival.
        skips: whether a file that cannot be opened, or lacks columns, is left out with a warning, in place of an error.
        ingester: on the first rank, of a folder that a topic is written to for this feed alone.

    Attributes:
        left_out: files without rows that can be read, so far.
    """

    def __init__(
        self,
        source: str,
        spec: FeatureSpec,
        opened: Callable[[Sequence[str], Sequence[FileInfo]], FileClickData],
        *,
        gathered: Gathered = lambda value: [value],
        is_lead: bool = True,
        most: int = 64,
        skips: bool = False,
        ingester: IngestProcess | None = None,
    ) -> None:
        self._source, self._spec, self._opened = source, spec, opened
        self._gathered, self._is_lead, self._was_there = gathered, is_lead, False
        self._most, self._skips, self._ingester = most, skips, ingester
        self._taken: set[str] = set()
        self._kinds: dict[str, tuple[str, str]] = {}
        self._next: Position | None = None
        self.left_out = 0

    def poll(self, *, last: bool = False) -> Arrival | None:
        """The rows that have arrived since the last poll. None if there are none. Does not wait for any.

        Args:
            last: whether what cannot be reached is not tried again.

        Raises:
            DataError: on every rank, for what cannot be read.
            UnreachableError: on every rank, for what may be read later: the next poll goes on as if this one had not
                been.
        """
        listing = self._gathered(self._listing(last) if self._is_lead else None)[0]
        assert listing is not None, "the first rank has looked"
        if isinstance(listing, DataError):
            raise listing
        rows, fault = None, None
        if listing["files"]:
            try:
                counted = listing.get("counted", ())
                known = [FileInfo(**{**info, "groups": tuple(info["groups"])}) for info in counted]
                rows = self._opened(listing["files"], known)
            except DataError as error:
                fault = error
            faults = {rank: fault for rank, fault in enumerate(self._gathered(fault)) if fault is not None}
            if 0 in faults:
                raise faults[0]
            for rank, fault in faults.items():  # which may see the files a little later
                raise UnreachableError(f"rank {rank}: {fault}")
        self.seek({**listing, "files": []})
        self.left_out += listing["left_out"]
        return None if rows is None else Arrival(rows=rows, listing=listing)

    def position(self) -> Position:
        """For :meth:`seek`: of the rows that follow those polled. JSON-compatible."""
        return self._next or {"taken": sorted(self._taken), "kinds": self._kinds, "files": [], "left_out": 0}

    def seek(self, position: Position) -> None:
        """Go on from there, or from the position of an arrival.

        Raises:
            DataError: for a position in a topic, which earlier versions read themselves.
        """
        if any(name.startswith(TOPIC) for name in position["taken"]):
            raise DataError(
                f"the checkpoint is of a version of shardrec that read {self._source} itself: go on with that version, "
                "or start a new run in another folder (--out), which may have the weights of this one (--init-from)"
            )
        self._taken, self._next = set(position["taken"]), position if position["files"] else None
        self._kinds = {name: (kind, path) for name, (kind, path) in position["kinds"].items()}

    def remove_before(self, position: Position) -> None:
        """Remove the ingester's files that were read before a position, but for the last one."""
        for name in {*sorted(position["taken"], key=number_of)[:-1]}.difference(position["files"]):
            with suppress(OSError):  # it stays a little longer
                os.unlink(name)

    def _listing(self, last: bool) -> Position | DataError:
        """The position of what has arrived, after which ``taken`` is taken; or the fault."""
        try:
            if self._next is not None:
                return dict(self._next)
            if path_of(self._source).endswith("manifest.txt"):
                start = int(next(iter(self._taken), 0))
                lines = self._lines(start)
                arrived = self._arrived([_beside(self._source, name) for _, name in lines], last)
                count = len(arrived["files"]) + arrived["left_out"]
                return {**arrived, "taken": [str(lines[count - 1][0] if count else start)]}
            if self._ingester is not None:
                os.makedirs(self._source, exist_ok=True)
                self._ingester.wait()
                if self._taken.issuperset(self._names()):
                    self._ingester.ask()
                    self._ingester.wait()
            names = self._names()
            shown = (name for name in names if not path_of(name).rpartition("/")[2].startswith((".", "_")))
            new, lost = self._unbroken([name for name in shown if name not in self._taken])
            arrived = self._arrived(new, last)
            if self._ingester is not None and arrived["files"]:
                self._ingester.ask()  # for the file after these, while they are trained on
            gone = gone_of(self._taken.difference(names))
            taken = sorted(self._taken.difference(gone).union(arrived["taken"]))
            records = sum((Counter(left_out_of(name)) for name in arrived["files"]), Counter[str]())
            return {**arrived, "taken": taken, "left_out": arrived["left_out"] + lost, "records": dict(records)}
        except OSError as error:
            return UnreachableError(f"{self._source} cannot be read ({error}): give a name that can")
        except DataError as error:
            return error

    def _unbroken(self, names: list[str]) -> tuple[list[str], int]:
        """The new files, of an ingester those that follow on the last one read; and how many were removed unread."""
        last, lost = dict[str, int](), 0
        for name in sorted(self._taken, key=number_of):
            last[os.path.dirname(path_of(name))] = number_of(name)
        for place, name in enumerate(names):
            number, before = number_of(name), last.get(os.path.dirname(path_of(name)), -1)
            if -1 < number <= before:
                raise DataError(f"{name} is new, and later ones were read: its folder was begun anew. Begin a new run")
            if -1 < before < number - 1:
                if not [*gone_of([name.replace(f"{number:012}", f"{before + 1:012}")])]:
                    return names[:place], lost  # it is not listed yet
                where = f"{number - before - 1:,} files before {name} were removed before they were read"
                if not self._skips:
                    raise DataError(f"{where}: keep more (--keep), or go on without them (--on-bad-row skip)")
                warnings.warn(where, stacklevel=2)
                lost += number - before - 1
            last[os.path.dirname(path_of(name))] = number
        return names, lost

    def _arrived(self, names: Sequence[str], last: bool) -> Position:
        """Of the first files that can be read, the position if nothing else was taken before."""
        files: list[str] = []
        bad: list[str] = []
        kinds = dict(self._kinds)
        for name in names:
            if len(files) == self._most:
                break
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
        return {"files": files, "taken": [*files, *bad], "kinds": kinds, "left_out": len(bad)}

    def _names(self) -> list[str]:
        names = files_of(self._source, least=0)
        if names in ([], [self._source]):
            check_listable(self._source)
        if names == [self._source]:
            kind = UnreachableError if self._was_there or self._taken else DataError
            raise kind(
                f"data (--data) is feed:{self._source}, which is no folder and no pattern: make it first. Where an "
                "empty folder is none, as in object stores, give a pattern"
            )
        self._was_there = True
        return names

    def _lines(self, start: int) -> list[tuple[int, str]]:
        """The next whole lines of the manifest from a byte on that are not empty, each with the byte after it."""
        with open_input(self._source) as file:
            file.seek(max(start - 1, 0))
            text = (b"" if start else b"\n") + file.read(_MANIFEST_BYTES)
        if text[:1] != b"\n":  # as while it is written again
            raise UnreachableError(
                f"{self._source} has no line that ends at byte {start:,}, up to which it was read: only add lines to a "
                "manifest"
            )
        lines = text[1:].split(b"\n")[:-1]
        ends = accumulate((len(line) + 1 for line in lines), initial=start)
        names = (line.decode(errors="replace").removesuffix("\r") for line in lines)
        return [(end, name) for end, name in zip(islice(ends, 1, None), names, strict=True) if name]


def watermark(before: float, latest: Sequence[float], clock: float) -> float:
    """The least over the ranks of the ``latest`` event times that they have read, or the clock if that is less; but not
    less than before. ``NO_TIME`` stands for none, and a rank without any does not count."""
    times = [time for time in latest if time > NO_TIME]
    return max(before, min([*times, clock])) if times else before


def _beside(path: str, name: str) -> str:
    """The URL or the path that a line of a manifest names."""
    plain = path_of(path)
    return (
        name
        if "://" in name or os.path.isabs(name)
        else plain[: plain.rfind("/") + 1] + name + path.removeprefix(plain)
    )

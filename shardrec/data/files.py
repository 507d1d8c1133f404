"""``FileClickData``: batches from files of columns, by a spec of the features."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np

from shardrec.data.batch import ClickBatch
from shardrec.data.encode import encode
from shardrec.data.fault import RowFault
from shardrec.data.rows import ClickRows, bags_at, join_rows
from shardrec.data.schema import ClickSchema
from shardrec.data.source import ClickData
from shardrec.data.spec import FeatureSpec
from shardrec.data.split import BatchRequest, held_out
from shardrec.data.tables import check_file, count_rows, first_line, read_blocks
from shardrec.errors import ConfigError, DataError

__all__ = ["FileClickData"]


class FileClickData(ClickData):
    """Rows read from files, in constant memory; every call of a batches method is a separate pass.

    Every rank reads and checks every row, and keeps its share. That costs ranks the decoding of the others' rows, and
    buys that all ranks make the same steps, and fail at the same step with the same message, without exchanging
    anything.

    Args:
        paths: files, or URLs of them, read in this order as one stream: Parquet, or text by a delimiter, plain or
            ``.gz``, ``.xz``, ``.bz2``, ``.zst``.
        spec: what the columns are.
        holdout: expected share of held-out rows, from 0 to 1 (not included); see ``split.held_out``.
        on_bad_row: ``"raise"``, or ``"skip"`` to leave broken rows out and count them.
        shuffle: number of training rows that are put in a random order at a time; 0 for the order of the files.
        keep_groups: move neighbouring rows of a group together when shuffling.
        seed: of that order, with the number of the pass.

    Attributes:
        paths: the files.

    Raises:
        ConfigError: an option that is out of range.
        DataError: a file that is missing, empty, or without the columns.
    """

    def __init__(
        self,
        paths: Sequence[str | os.PathLike[str]],
        spec: FeatureSpec,
        *,
        holdout: float = 0.1,
        on_bad_row: str = "raise",
        shuffle: int = 0,
        keep_groups: bool = False,
        seed: int = 0,
    ) -> None:
        if not 0 <= holdout < 1:
            raise ConfigError(f"holdout is {holdout}: give a share from 0 to 1 (not included)")
        if on_bad_row not in ("raise", "skip"):
            raise ConfigError(f"on_bad_row is {on_bad_row!r}: give 'raise' or 'skip'")
        if not paths:
            raise ConfigError("paths is empty: give at least one file")
        self.paths = tuple(os.fspath(path) for path in paths)
        self.spec = spec
        self._holdout, self._on_bad_row = holdout, on_bad_row
        self._shuffle, self._keep_groups, self._seed = shuffle, keep_groups, seed
        self._skipped: Counter[str] = Counter()
        self._train_rows: int | None = None
        for path in self.paths:
            check_file(path, spec)

    @property
    def schema(self) -> ClickSchema:
        return self.spec.schema_

    @property
    def train_rows(self) -> int | None:
        """What :meth:`count` returned; None before it was called."""
        return self._train_rows

    def count(self) -> int:
        """About how many rows a pass trains on: broken ones count, and the expected share is held out."""
        rows = sum(count_rows(path, self.spec) for path in self.paths)
        self._train_rows = round(rows * (1 - self._holdout))
        return self._train_rows

    @property
    def skipped(self) -> dict[str, int]:
        """Rows left out so far by the pass that started last, by reason; empty with ``on_bad_row="raise"``."""
        return dict(self._skipped)

    def describe(self) -> str:
        """Files, columns and options in a few lines of text."""
        tables = dict(zip(self.schema.tables, self.schema.num_embeddings, strict=True)).values()
        shown = [*self.paths[:3], *([f"and {len(self.paths) - 3} more files"] if len(self.paths) > 3 else [])]
        order = f"; rows shuffled {self._shuffle:,} at a time" if self._shuffle else ""
        return "\n".join(
            [
                *shown,
                f"{len(self.spec.dense)} dense and {len(self.spec.sparse)} sparse features, {sum(tables):,} embedding "
                f"rows, the largest table {max(tables):,}",
                (f"{self._holdout:.1%} of the rows held out; " if self._holdout else "")
                + "a broken row "
                + ("ends the run" if self._on_bad_row == "raise" else "is left out and counted")
                + order,
            ]
        )

    def _batches(self, request: BatchRequest, epoch: int | None) -> Iterator[ClickBatch]:
        rows = self._selected_rows(held=epoch is None)
        if self._shuffle and epoch is not None:
            rows = self._shuffled(rows, epoch)
        for index, part in enumerate(_in_parts(rows, request.global_size)):
            if request.wants(index, len(part)):
                start, stop = request.share(len(part))
                yield part.between(start, stop).to_batch(self.schema)

    def _shuffled(self, rows: Iterator[ClickRows], epoch: int) -> Iterator[ClickRows]:
        """A function of the seed, the epoch and the files, so that a resumed run finds the same order."""
        for window, part in enumerate(_in_parts(rows, self._shuffle)):
            draws = np.random.Generator(np.random.Philox(key=self._seed, counter=[window, epoch, 0, 0]))
            if not self._keep_groups or part.groups is None:
                yield part.take(draws.permutation(len(part)))
                continue
            starts = np.flatnonzero(np.r_[True, part.groups[1:] != part.groups[:-1]])
            sizes = np.diff(np.r_[starts, len(part)])
            _, places, _ = bags_at(draws.permutation(len(starts)), sizes, np.arange(len(part)), None)
            yield part.take(places.numpy())

    def _selected_rows(self, *, held: bool) -> Iterator[ClickRows]:
        skipped = self._skipped = Counter()
        before, good = 0, 0
        for path in self.paths:
            first, seen = first_line(path, self.spec), 0
            for block in read_blocks(path, self.spec):
                encoded = encode(block.table, self.spec)
                keep = np.ones(len(block.numbers), dtype=np.bool_)
                keep[list(encoded.faults)] = False
                faults = {int(block.numbers[row]): fault for row, fault in encoded.faults.items()} | block.faults
                for number in sorted(faults):
                    if self._on_bad_row == "raise":
                        raise _error(path, number + first, faults[number])
                    skipped[faults[number].reason.value] += 1
                seen, good = block.seen, good + int(keep.sum())
                # A group is held out as a whole: half of it would be ranked on its own.
                units = encoded.rows.groups if encoded.rows.groups is not None else block.numbers + before
                yield encoded.rows.where(keep & (held_out(units, self._holdout) == held))
            before += seen
        if not good:
            counts = ", ".join(f"{count} {reason}" for reason, count in skipped.items()) or "none skipped"
            raise DataError(
                f"{', '.join(self.paths)}: no row could be read ({counts}): check that the files have the columns "
                f"{', '.join(self.spec.sources)}"
            )


def _error(path: str, line: int, fault: RowFault) -> DataError:
    remedy = f"{fault.remedy}, or leave such rows out (on_bad_row: skip, --on-bad-row skip)"
    return DataError(f"{path}:{line}: {fault.where}; {remedy}")


def _in_parts(rows: Iterator[ClickRows], size: int) -> Iterator[ClickRows]:
    """The rows, ``size`` at a time; what is left at the end is a smaller part."""
    waiting: list[ClickRows] = []
    count = 0
    for part in rows:
        waiting.append(part)
        count += len(part)
        if count < size:
            continue
        joined = join_rows(waiting)
        for start in range(0, count - size + 1, size):
            yield joined.between(start, start + size)
        waiting, count = [joined.between(count - count % size, count)], count % size
    if count:
        yield join_rows(waiting)

"""``FileClickData``: batches from Criteo-format text and Parquet files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from shardrec.data.batch import ClickBatch
from shardrec.data.compression import FileKind, detect_kind
from shardrec.data.fault import FaultLog
from shardrec.data.parquet import check_parquet, read_parquet
from shardrec.data.rows import ClickRows, NumberedRows, join_rows
from shardrec.data.schema import ClickSchema
from shardrec.data.split import BatchRequest, held_out
from shardrec.data.tsv import read_tsv
from shardrec.errors import ConfigError, DataError

__all__ = ["FileClickData"]


class FileClickData:
    """Click data read from files, in constant memory; every call of a batches method is a pass of its own.

    Every rank reads and checks every row, and keeps its share. That costs ranks the decoding of the others' rows, and
    buys that all ranks make the same steps, and fail at the same step with the same message, without exchanging
    anything.

    Args:
        paths: files, read in this order as one stream.
        schema: columns and table sizes.
        holdout: expected share of held-out rows, from 0 to 1 (not included); see ``split.held_out``.
        on_bad_row: ``"raise"``, or ``"skip"`` to leave broken rows out and count them.
        columns: names in Parquet files where they differ from the schema's: schema name (or ``label``) to file name.

    Attributes:
        paths: the files.

    Raises:
        ConfigError: an option that is out of range.
        DataError: a file that is missing, empty, or not what its suffix says; a Parquet file without the columns.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        schema: ClickSchema,
        *,
        holdout: float = 0.1,
        on_bad_row: str = "raise",
        columns: Mapping[str, str] | None = None,
    ) -> None:
        if not 0 <= holdout < 1:
            raise ConfigError(f"holdout is {holdout}: give a share from 0 to 1 (not included)")
        if not paths:
            raise ConfigError("paths is empty: give at least one file")
        self.paths = tuple(paths)
        self._schema = schema
        self._holdout, self._on_bad_row, self._columns = holdout, on_bad_row, dict(columns or {})
        self._log = FaultLog(on_bad_row)
        unknown = sorted(set(self._columns) - {"label", *schema.dense_names, *schema.sparse_names})
        if unknown:
            raise ConfigError(f"columns names {', '.join(unknown)}: give names of the schema, or 'label'")
        self._kinds = [detect_kind(path) for path in self.paths]
        if self._columns and FileKind.PARQUET not in self._kinds:
            raise ConfigError("columns is given for text files, which have no column names: leave it out")
        for path, kind in zip(self.paths, self._kinds, strict=True):
            if kind is FileKind.PARQUET:
                check_parquet(path, schema, self._columns)

    @property
    def schema(self) -> ClickSchema:
        """Names and table sizes."""
        return self._schema

    @property
    def train_rows(self) -> int | None:
        """None: the number of rows is not known before they are read."""
        return None

    @property
    def skipped(self) -> dict[str, int]:
        """Rows left out so far by the pass that started last, by reason; empty with ``on_bad_row="raise"``."""
        return dict(self._log.skipped)

    def train_batches(
        self,
        rank: int,
        world_size: int,
        batch_size: int,
        *,
        first_batch: int = 0,
        drop_last: bool = False,
        global_rows: int | None = None,
    ) -> Iterator[ClickBatch]:
        """One rank's training batches of one pass; see :class:`~shardrec.data.ClickData`."""
        request = BatchRequest(
            rank=rank,
            world_size=world_size,
            batch_size=batch_size,
            first_batch=first_batch,
            drop_last=drop_last,
            global_rows=global_rows,
        )
        return self._batches(request, held=False)

    def holdout_batches(
        self, rank: int, world_size: int, batch_size: int, *, global_rows: int | None = None
    ) -> Iterator[ClickBatch]:
        """One rank's share of the held-out rows; see :class:`~shardrec.data.ClickData`."""
        request = BatchRequest(rank=rank, world_size=world_size, batch_size=batch_size, global_rows=global_rows)
        return self._batches(request, held=True)

    def describe(self) -> str:
        """Files, columns and options in a few lines of text."""
        tables = self._schema.num_embeddings
        return "\n".join(
            [
                *(
                    f"{path}: {kind.value}, {path.stat().st_size:,} bytes"
                    for path, kind in zip(self.paths, self._kinds, strict=True)
                ),
                f"{len(self._schema.dense_names)} dense and {len(tables)} sparse features, {sum(tables):,} embedding "
                f"rows, the largest table {max(tables):,}",
                f"{self._holdout:.1%} of the rows held out; a broken row "
                + ("ends the run" if self._on_bad_row == "raise" else "is left out and counted"),
            ]
        )

    def _batches(self, request: BatchRequest, *, held: bool) -> Iterator[ClickBatch]:
        for index, rows in enumerate(self._global_batches(request.global_size, held=held)):
            if request.wants(index, len(rows)):
                start, stop = request.share(len(rows))
                yield rows.between(start, stop).to_batch(self._schema)

    def _global_batches(self, size: int, *, held: bool) -> Iterator[ClickRows]:
        """The training or held-out rows, ``size`` at a time; what is left at the end is a smaller one."""
        waiting: list[ClickRows] = []
        count = 0
        for rows in self._selected_rows(held=held):
            waiting.append(rows)
            count += len(rows)
            if count < size:
                continue
            joined = join_rows(waiting)
            for start in range(0, count - size + 1, size):
                yield joined.between(start, start + size)
            waiting, count = [joined.between(count - count % size, count)], count % size
        if count:
            yield join_rows(waiting)

    def _selected_rows(self, *, held: bool) -> Iterator[ClickRows]:
        log = self._log = FaultLog(self._on_bad_row)
        before, good = 0, 0
        for path, kind in zip(self.paths, self._kinds, strict=True):
            seen = 0
            for block in self._blocks(path, kind, log):
                seen, good = block.seen, good + len(block.rows)
                yield block.rows.where(held_out(block.numbers + before, self._holdout) == held)
            before += seen
        if not good:
            counts = ", ".join(f"{count} {reason}" for reason, count in log.skipped.items()) or "none skipped"
            raise DataError(
                f"{', '.join(map(str, self.paths))}: no row could be read ({counts}): check that the files have the "
                f"schema's {1 + len(self._schema.dense_names) + len(self._schema.sparse_names)} columns"
            )

    def _blocks(self, path: Path, kind: FileKind, log: FaultLog) -> Iterator[NumberedRows]:
        if kind is FileKind.PARQUET:
            return read_parquet(path, self._schema, log, self._columns)
        return read_tsv(path, kind, self._schema, log)

"""``FileClickData``: batches from files of columns, by a spec of the features. ``open_click_data`` opens them."""

from __future__ import annotations

import math
import os
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp
from typing import Any
from weakref import finalize

import numpy as np
from numpy.typing import NDArray

from shardrec import ConfigError, DataError
from shardrec.trainer.data.click_data import ClickBatch, ClickData
from shardrec.trainer.data.convert import counted
from shardrec.trainer.data.encode import encode
from shardrec.trainer.data.order import (
    STREAMS,
    BatchRequest,
    Chunk,
    batch_bounds,
    deal,
    slices,
    stream_count,
    stream_share,
)
from shardrec.trainer.data.planted import SyntheticConfig
from shardrec.trainer.data.reading import PartRange, Reader, StreamRows, joined, shuffled
from shardrec.trainer.data.rows import NO_TIME, ClickRows
from shardrec.trainer.data.schema import ClickSchema
from shardrec.trainer.data.spec import FeatureSpec, criteo_spec
from shardrec.trainer.data.spelling import Each, decided
from shardrec.trainer.data.synthetic import SyntheticClickData
from shardrec.trainer.data.tables import FileInfo, check_part, is_of_file
from shardrec.trainer.data.urls import files_of

_THREADS = 2
_QUICK_ROWS = 1_000_000
"""Rows that a rank decodes in about a second."""
_ROWS_AHEAD = 1 << 19
"""Most rows that a rank decodes at once, over its streams; as many are ready, and as many are taken from."""


class FileClickData(ClickData):
    """Rows read from files, in bounded memory. Every call of a batches method is a separate pass.

    The order of the rows (:mod:`shardrec.trainer.data.order`) is a function of the files, the seed, the pass and the
    rows of a global batch. A rank decodes the streams that its part of each batch comes from. A broken row is an error,
    or is left out, on the rank whose part it is in.

    Args:
        paths: files, or URLs of them: Parquet, or what is converted to it once: text by a delimiter, plain or ``.gz``,
            ``.xz``, ``.bz2``, ``.zst``, LIBSVM's text, or archives of NumPy.
        spec: what the columns are.
        holdout: expected share of held-out rows, from 0 to 1 (not included). See ``split.held_out``.
        on_bad_row: ``"raise"``, or ``"skip"`` to count broken rows and leave them out of their batches.
        shuffle: rows that are put in a random order at a time, over all streams, after the row groups were; 0 for the
            order of the files.
        keep_groups: move neighbouring rows of a group together when shuffling, and read fewer streams at a time.
        seed: of that order, with the number of the pass.
        streams: most row groups that a global batch has rows of. With 1, rows are in
            exactly the files' order, and every rank decodes all.
        needs_rows: whether a pass in which no row can be read is an error.
        known: ``files`` of another time, whose order of rows this is to have; with ``"skip"`` all rows of a file that
            is gone or has changed since are broken.
        folder: of converted files, which all ranks see. Default: one that is removed with this object.
        decides: whether the spellings of ids that the spec leaves open are decided by these files' values.

    Attributes:
        paths: the files.
        spec: what the columns are, with the spellings of ids after :meth:`count`.
        files: what is known of each, its rows only after :meth:`count`.
        event_bounds: event times, in seconds since 1970, before and after which rows are broken.
        latest: the largest event time of the rows that the pass that started last has had. ``NO_TIME`` for none.

    Raises:
        ConfigError: an option that is out of range.
        DataError: a file that is missing, empty, or without the columns, or with another type of column than others.
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
        streams: int = STREAMS,
        needs_rows: bool = True,
        known: Sequence[FileInfo] = (),
        folder: Path | None = None,
        decides: bool = True,
    ) -> None:
        if not 0 <= holdout < 1:
            raise ConfigError(f"holdout is {holdout}: give a share from 0 to 1 (not included)")
        if on_bad_row not in ("raise", "skip"):
            raise ConfigError(f"on_bad_row is {on_bad_row!r}: give 'raise' or 'skip'")
        if streams < 1:
            raise ConfigError(f"streams is {streams}: give at least 1")
        if not paths:
            raise ConfigError("paths is empty: give at least one file")
        self.paths = tuple(os.fspath(path) for path in paths)
        self.spec = spec
        self._holdout, self._skips, self._streams = holdout, on_bad_row == "skip", streams
        self._shuffle, self._keep_groups, self._seed = shuffle, keep_groups, seed
        self._needs_rows, self._decides = needs_rows, decides
        self.event_bounds, self.latest = (NO_TIME, math.inf), NO_TIME
        self._skipped: Counter[str] = Counter()
        self._reader: Reader | None = None
        self._chunks: dict[bool, list[Chunk]] = {}
        self._known = dict(zip(self.paths, known, strict=False)) if self._skips else {}
        self.files: Sequence[FileInfo] = [
            self._or_lost(partial(check_part, path, spec), self._known.get(path)) for path in self.paths
        ]
        self._folder = folder
        if folder is None and not all(info.parquet for info in self.files):
            self._folder = Path(mkdtemp(prefix="shardrec-"))
            finalize(self, rmtree, self._folder, ignore_errors=True)
        if needs_rows and not any(info.size or info.groups for info in self.files):
            raise DataError(f"data file {self.paths[0]} is empty: copy or write it again")
        check_kinds(self.files, {})

    @property
    def schema(self) -> ClickSchema:
        return self.spec.schema_

    @property
    def train_rows(self) -> int:
        """Rows that a pass trains on, broken ones included. See :meth:`count`."""
        self.count()
        return sum(chunk.kept for chunk in self._chunks[False])

    def count(self, each: Each = map, *, parts: int = 1, progress: Callable[[int], object] | None = None) -> None:
        """Count the rows, on which their order depends. The first pass does it otherwise.

        Parquet's footers tell them. Files of other formats are converted. Where groups of rows are held out, all rows
        are decoded once.

        Args:
            each: calls a function for each item, as ``map`` does; for instance with other ranks.
            parts: items into which the row groups are dealt for it, such as the number of ranks.
            progress: is told of the bytes of other formats that were read.

        Raises:
            DataError: a file that is damaged.
        """
        if self._chunks:
            return
        self.files = list(each(partial(self._counted, progress=progress or (lambda count: None)), self.files))
        if self._decides:
            self.spec = decided(self.files, self.spec, each=each, parts=parts)
        chunks, row = [], 0
        for number, info in enumerate(self.files):
            for group, rows in enumerate(info.groups):
                chunks.append(Chunk(file=number, group=group, row=row, rows=rows, kept=0))
                row += rows
        train = list(each(self._new_reader(held=False).kept, chunks))
        kept = [replace(chunk, kept=rows) for chunk, rows in zip(chunks, train, strict=True)]
        held = [replace(chunk, kept=chunk.rows - chunk.kept) for chunk in kept]
        self._chunks = {False: [chunk for chunk in kept if chunk.kept], True: [chunk for chunk in held if chunk.kept]}

    @property
    def skipped(self) -> dict[str, int]:
        """Rows left out so far by the pass that started last, by reason. Empty with ``on_bad_row="raise"``."""
        return dict(self._skipped)

    @property
    def decoded_bytes(self) -> int:
        """Bytes of Arrow tables that the pass that started last has decoded so far."""
        return 0 if self._reader is None else sum(self._reader.decoded.values())

    def describe(self) -> str:
        """Files, columns and options in a few lines of text."""
        tables = dict(zip(self.schema.tables, self.schema.num_embeddings, strict=True)).values()
        shown = [*self.paths[:3], *([f"and {len(self.paths) - 3} more files"] if len(self.paths) > 3 else [])]
        order = f". Rows shuffled {self._shuffle:,} at a time" if self._shuffle else ""
        missing = Counter[str]()
        for info in self.files:
            missing.update({name: count for name, count in info.missing.items() if name in self.spec.sources})
        nulls = [f"missing values: {', '.join(f'{name} {count:,}' for name, count in sorted(missing.items()))}"]
        return "\n".join(
            [
                *shown,
                f"{len(self.spec.dense)} dense and {len(self.spec.sparse)} sparse features, {sum(tables):,} embedding "
                f"rows, the largest table {max(tables):,}",
                (f"{self._holdout:.1%} of the rows held out; " if self._holdout else "")
                + "a broken row "
                + ("is left out and counted" if self._skips else "ends the run")
                + order,
                *(nulls if missing else []),
            ]
        )

    def uneven(self, world_size: int, batch_rows: int) -> str:
        """What to do where some rank would decode much more than its share of the training rows. Empty if none does."""
        _, lengths = self._dealt(batch_rows, None, held=False)
        share = stream_share(lengths, world_size)
        if share < 1.5 / world_size or lengths.sum() < _QUICK_ROWS:
            return ""
        largest = max(self._chunks[False], key=lambda chunk: chunk.kept)
        name, rows = self.files[largest.file].path, int(lengths.sum())
        return (
            f"each of the {world_size} ranks decodes up to {share:.0%} of the rows, because a row group of {name} has "
            f"{largest.kept / rows:.0%} of the rows: write it again as Parquet with smaller row groups "
            f"(shardrec convert {name} --out DIR)"
        )

    def _counted(self, info: FileInfo, progress: Callable[[int], object]) -> FileInfo:
        known = self._known.get(info.path)

        def as_known() -> FileInfo:
            now = counted(info, self.spec, self._folder or Path(), progress)
            if known is not None and (known.digest, known.groups) != (now.digest, now.groups):
                raise DataError(f"data file {info.path} is not the one that was begun with")
            return now

        return info if info.lost else self._or_lost(as_known, known or replace(info, groups=(1,)))

    def _or_lost(self, look: Callable[[], FileInfo], known: FileInfo | None) -> FileInfo:
        """What ``look`` gives; or, where broken rows are left out, for a fault of the file what is known, all lost."""
        try:
            return look()
        except DataError as error:
            if known is None or not self._skips or not is_of_file(error):
                raise
            warnings.warn(f"the rows of a file are left out: {error}", stacklevel=2)
            return replace(known, lost=str(error))

    def _new_reader(self, *, held: bool, part: float = 1.0) -> Reader:
        of_files = partial(Reader, files=self.files, spec=self.spec, bounds=self.event_bounds)
        return of_files(holdout=self._holdout, held=held, part=part, skips=self._skips)

    def _dealt(self, batch_rows: int, epoch: int | None, *, held: bool) -> tuple[list[list[Chunk]], NDArray[np.int64]]:
        """The chunks of each stream, and its rows."""
        self.count()
        streams = stream_count(self._streams, batch_rows, grouped=self._keep_groups)
        draws = None
        if self._shuffle and epoch is not None:
            draws = np.random.Generator(np.random.Philox(key=self._seed, counter=[0, epoch, 0, 1]))
        dealt = deal(self._chunks[held], streams, draws)
        return dealt, np.array([sum(chunk.kept for chunk in chunks) for chunks in dealt], dtype=np.int64)

    def _batches(self, request: BatchRequest, epoch: int | None) -> Iterator[ClickBatch]:
        skipped = self._skipped = Counter()
        self.latest = NO_TIME
        size = request.global_size
        dealt, lengths = self._dealt(size, epoch, held=epoch is None)
        at_once = -(-int((lengths > 0).sum()) // request.world_size)
        part = min(1.0, _ROWS_AHEAD / 16_384 / max(1, at_once))  # of a usual block
        reader = self._reader = self._new_reader(held=epoch is None, part=part)
        window = max(1, self._shuffle // len(dealt))
        opened: dict[int, StreamRows] = {}

        def rows_of(stream: int, start: int) -> StreamRows:
            if not self._shuffle or epoch is None:
                return StreamRows(reader.parts(stream, dealt[stream], start), start, pool)
            first = start // window
            parts = reader.parts(stream, dealt[stream], first * window)
            draws = (self._seed, epoch, stream, 0)
            return StreamRows(
                shuffled(parts, window, first, draws, keep_groups=self._keep_groups), first * window, pool
            )

        pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="decode")
        try:
            for index, before, after in batch_bounds(lengths, size, request.first_batch):
                count = int(after.sum() - before.sum())
                if not request.wants(index, count):
                    continue
                parts: list[PartRange] = []
                for rows in slices(before, after, request.share(count)):
                    if rows.stream not in opened:
                        opened[rows.stream] = rows_of(rows.stream, rows.start)
                    parts += opened[rows.stream].take(rows.start, rows.stop)
                yield self._batch(parts, skipped)
        finally:
            pool.shutdown(cancel_futures=True)
        # Of several ranks one may have none but broken rows.
        if (
            self._needs_rows
            and not reader.good
            and ((reader.decoded and request.world_size == 1) or not any(self._chunks.values()))
        ):
            counts = ", ".join(f"{count} {reason}" for reason, count in skipped.items()) or "none skipped"
            raise DataError(
                f"{', '.join(self.paths)}: no row could be read ({counts}): check that the files have the columns "
                f"{', '.join(self.spec.sources)}"
            )

    def _batch(self, parts: Sequence[PartRange], skipped: Counter[str]) -> ClickBatch:
        rows, faults = joined(parts) if parts else (self._no_rows(), {})
        for fault in faults.values():
            if not self._skips:
                raise DataError(str(fault))
            skipped[fault.reason.value] += 1
        if rows.times is not None:
            self.latest = float(rows.times.max(initial=self.latest))
        return rows.to_batch(self.schema)

    def _no_rows(self) -> ClickRows:
        import pyarrow as pa

        return encode(pa.table({name: pa.array([], pa.string()) for name in self.spec.sources}), self.spec).rows


def open_click_data(
    source: SyntheticConfig | str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    spec: FeatureSpec | None = None,
    **options: Any,
) -> FileClickData | SyntheticClickData:
    """Opens rows of clicks.

    Args:
        source: a :class:`SyntheticConfig`; or files, read as one stream: a name, a folder, a pattern, a URL of one of
            these, or a sequence of them.
        spec: what the files' columns are; :func:`criteo_spec` by default.
        options: of :class:`FileClickData`.

    Returns:
        The source, as a :class:`ClickData`. A synthetic one also has ``best_metrics()``, a file ``skipped``.

    Raises:
        ConfigError: an option out of range, or one for files given with a :class:`SyntheticConfig`.
        DataError: a file that cannot be read.
    """
    if isinstance(source, SyntheticConfig):
        option_names = [*options, *(["spec"] if spec is not None else [])]
        if option_names:
            raise ConfigError(f"{', '.join(option_names)} given with a SyntheticConfig: set its own fields instead")
        return SyntheticClickData(source)
    paths = [source] if isinstance(source, (str, os.PathLike)) else source
    files = [name for path in paths for name in files_of(os.fspath(path))]
    return FileClickData(files, criteo_spec() if spec is None else spec, **options)


def check_kinds(files: Sequence[FileInfo], kinds: dict[str, tuple[str, str]]) -> None:
    """Raise if a column has values of one kind in one file and of another in another, which would be other ids.

    Args:
        files: to compare with each other and with those before.
        kinds: per column the kind of its values and the first file that has any. Those of ``files`` are added.
    """
    for info in files:
        for name, kind in info.kinds.items():
            before, path = kinds.setdefault(name, (kind, info.path)) if kind else ("", "")
            if before != kind:
                raise DataError(
                    f"column {name!r} has {before} in {path} and {kind} in {info.path}: write values of one kind to "
                    "all the files"
                )

"""The rows of a run: what the options ask :mod:`shardrec.trainer.data` for, cut to the number of rows asked for."""

from __future__ import annotations

import math
import shlex
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from shardrec import ConfigError, DataError
from shardrec.files import UnreachableError
from shardrec.launch import RankInfo, all_gather, on_threads
from shardrec.trainer.data import (
    ClickBatch,
    ClickMetrics,
    FeatureSpec,
    FileClickData,
    SyntheticClickData,
    SyntheticConfig,
    criteo_schema,
    criteo_spec,
    load_spec,
    open_click_data,
)
from shardrec.trainer.data.convert import counted
from shardrec.trainer.data.feed import Arrival, Feed, watermark
from shardrec.trainer.data.ingest import IngestProcess, columns_of_records
from shardrec.trainer.data.rows import NO_TIME
from shardrec.trainer.data.spelling import decided
from shardrec.trainer.data.tables import FileInfo, MissingColumnsError, check_part
from shardrec.trainer.data.urls import TOPIC, files_of
from shardrec.trainer.run.config import TOPIC_FILES, TrainConfig
from shardrec.trainer.run.option_groups import FeedData, FiniteData

S = TypeVar("S")
T = TypeVar("T")

_SYNTHETIC_ROWS = 2_400_000
_SYNTHETIC_HOLDOUT_ROWS = 100_000
_SCORED_ROWS = 2048
"""Rows to score together on a rank, where a step has fewer: without gradients they need little memory."""

_ROWS = "count of rows"
"""What ranks that agree about rows wait for, in messages."""

_AHEAD_S = 3600.0
"""How far event times may be ahead of the clock of the first rank."""

_RETRY_S, _MAX_WAITS = 0.5, 60
"""A wait before a feed that could not be reached is tried again, and how many there are at most before a try."""


class Source:
    """One rank's batches of a run's rows.

    Args:
        config: which rows, and how many.
        rank_info: the rank.
        spec: what the columns are. Default: what the config's file says.
        folder: of converted files, which all ranks see. Default: a folder per source, which is removed with it.

    Attributes:
        left_out: broken rows of this rank that were left out, by reason, per pass over some rows: ``train 0`` is
            the first epoch, the others have the rows' name alone and are the longest passes, because they may end
            early. Of a feed all passes count as the first.
        refused: records of a topic, after its last file, that are no rows, by reason; on the first rank, at the end.

    Raises:
        DataError, ConfigError: if the file cannot be opened or the options do not fit it.
    """

    def __init__(
        self,
        config: TrainConfig,
        rank_info: RankInfo,
        spec: FeatureSpec | None = None,
        folder: Path | None = None,
    ) -> None:
        self._folder = folder
        self._rank_info = rank_info
        self._ranks = rank_info.world_size * config.replica_count
        self._batch_rows = config.learning.global_batch_size or config.learning.batch_size * self._ranks
        self._accumulate = config.learning.accumulate
        finite = config.data if isinstance(config.data, FiniteData) else None
        self._samples = None if finite is None else finite.samples
        self._holdout_samples = config.data.holdout_samples
        self._ingester: IngestProcess | None = None  # on the first rank of a run on a topic
        self._keeps_files = config.output.checkpoint != "none"
        spec = spec or spec_of(config)
        self._data = None if finite is None else _open(config, finite, spec, folder)
        self._feed: Feed | None = None if config.feed is None else self._opened_feed(config, config.feed, spec)
        self._arrival: Arrival | None = None
        # Held-out rows, and rows of the final metrics, in files of their own: all their rows.
        self._valid, self._test = (
            None if files is None else _opened(config, files, spec, folder, needs_rows=False)
            for files in (None if finite is None else finite.valid, config.data.test)
        )
        self.left_out: dict[str, Mapping[str, int]] = {}
        self.refused: Mapping[str, int] = {}
        self._left_out_before: dict[str, Mapping[str, int]] = {}
        late_after = None if config.feed is None else config.feed.late_after
        self._late_after = math.inf if late_after is None else late_after
        self._latest = self._watermark = NO_TIME

    @property
    def data(self) -> FileClickData | SyntheticClickData:
        """The rows to train on (for a feed, the last arrivals), and held-out rows without files of their own."""
        assert self._data is not None, "rows have arrived"
        return self._data

    def poll(self, wait: Callable[[float], None] = time.sleep) -> bool:
        """Whether there are rows of a feed to train on: the present arrival's, or else the next arrival's. Collective.

        Raises:
            DataError: on every rank, for a file that cannot be read, or a feed that could not be reached for as long as
                a rank waits for the others.
        """
        assert self._feed is not None, "the data is a feed"
        while self._arrival is None:
            before = self._feed.left_out
            self._arrival = self._polled(self._feed, wait)
            counts = Counter(self.left_out.get("train 0", {}))
            if self._rank_info.is_lead:
                counts["file that cannot be read"] += self._feed.left_out - before
                counts.update(self._arrival.listing.get("records", {}) if self._arrival is not None else {})
            self.left_out = {"train 0": dict(+counts)}
            self._left_out_before = dict(self.left_out)
            if self._arrival is None:
                self.refused = {} if self._ingester is None else self._ingester.left_out
                return False
            self.refused = {}
            times = {**self._agreed_times(), **self._arrival.listing}  # as of the first reading, also after a resume
            self._arrival = replace(self._arrival, listing=times)
            self._data = self._arrival.rows
            oldest = max(NO_TIME, times["watermark"] - self._late_after)
            self._data.event_bounds = oldest, times["clock"] + _AHEAD_S
            self.count()
            if not self.train_rows:
                self.end_arrival()
        return True

    def _polled(self, feed: Feed, wait: Callable[[float], None]) -> Arrival | None:
        waits, waited_s = 1, 0.0
        while True:
            last = waited_s >= self._rank_info.timeout
            try:
                return feed.poll(last=last)
            except UnreachableError as error:
                if last:
                    raise DataError(f"{error} (it was tried again for {waited_s:g} s, --timeout)") from error
                if self._rank_info.is_lead:
                    warnings.warn(f"{error}. It is tried again in {waits * _RETRY_S:g} s", stacklevel=2)
            for _ in range(waits):  # in parts, in which a run saves, and notices that it is to end
                wait(_RETRY_S)
            waited_s += waits * _RETRY_S
            waits = min(2 * waits, _MAX_WAITS)

    def latest(self) -> float:
        """The largest event time of the rows that this rank has read, also ahead of training. ``NO_TIME`` for none."""
        data = self._data
        self._latest = max(self._latest, data.latest if isinstance(data, FileClickData) else NO_TIME)
        return self._latest

    def _agreed_times(self) -> dict[str, float]:
        """The watermark, and the clock of the first rank. Collective."""
        latest, clocks = zip(*all_gather((self.latest(), time.time()), self._rank_info, _ROWS), strict=True)
        self._watermark = watermark(self._watermark, latest, clocks[0])
        return {"watermark": self._watermark, "clock": clocks[0]}

    def ends_interval(self, seconds: float, epoch_steps: int) -> bool:
        """Whether the arrival ends after these steps and moved the watermark past a multiple of seconds. Collective."""
        if self._arrival is None or epoch_steps < self.steps:
            return False
        before, now = self._arrival.listing["watermark"], self._agreed_times()["watermark"]
        return bool(before > NO_TIME and before // seconds < now // seconds)

    @property
    def lag(self) -> int | None:
        """Records that a topic had after the last file's, on the first rank of a run on a topic."""
        return None if self._ingester is None else self._ingester.lag

    def remove_before(self, position: Mapping[str, Any]) -> None:
        """Remove the files of a topic that were trained on before a :meth:`position`."""
        assert self._feed is not None, "the data is a feed"
        self._feed.remove_before(position)

    def end_arrival(self) -> None:
        """The arrival under way has been trained on: what its files were converted to is removed."""
        if self._arrival is not None and self._rank_info.is_lead:
            for info in self._arrival.rows.files:
                if info.parquet != info.path:
                    Path(info.parquet).unlink(missing_ok=True)
            if self._ingester is not None and not self._keeps_files:  # which no checkpoint would go on with
                self.remove_before(self._arrival.listing)
        self._arrival = None

    def position(self, epoch_steps: int) -> tuple[Mapping[str, Any], bool] | None:
        """Where a feed is after steps of the arrival under way, and whether that has further ones. Collective."""
        if self._feed is None:
            return None
        if self._arrival is None or epoch_steps >= self.steps:
            return {**self._feed.position(), "watermark": self._agreed_times()["watermark"]}, False
        return self._arrival.position, True

    def seek(self, position: Mapping[str, Any], *, in_arrival: bool, latest: float = NO_TIME) -> None:
        """Go on from :meth:`position`, and :meth:`latest` of the same number of ranks. Every rank calls it."""
        assert self._feed is not None, "the data is a feed"
        self._data, self._arrival, self._latest = None, None, latest
        self._watermark = position.get("watermark", NO_TIME)
        self._feed.seek(position)
        if not in_arrival:
            return
        try:
            self.poll()
        except DataError as error:
            raise DataError(
                f"{error}. The last checkpoint is in the middle of this file's rows: put the file back as it was, or "
                "leave its rows out (--on-bad-row skip), or start a new run with the weights of this one (--init-from) "
                "on the files that are left"
            ) from error

    def _opened_feed(self, config: TrainConfig, data: FeedData, spec: FeatureSpec) -> Feed:
        if spec.labels:
            raise ConfigError(
                f"data (--data) is {data.files!r}, and the features (--features) name several labels: the rows of a "
                "feed are scored by one. Give label: COLUMN"
            )
        if spec.event_time is None and (data.late_after, data.event_every) != (None, None):
            raise ConfigError(
                "late_after (--late-after) and event_every (--event-every) are for event times, and the features "
                "(--features) name no column of them: add event_time: COLUMN, or leave both out"
            )
        folder = source = data.source
        if source.startswith(TOPIC):
            columns_of_records(source, spec)
            folder = str(Path(str(config.output.out), TOPIC_FILES))
            if self._rank_info.is_lead:
                skips = config.data.on_bad_row == "skip"
                self._ingester = IngestProcess(source, spec, Path(folder), skips=skips)
        shuffle = config.data.shuffle or 0
        return Feed(
            folder,
            spec,
            lambda names, known: _opened(
                config, names, spec, self._folder, shuffle=shuffle, needs_rows=False, known=known
            ),
            gathered=partial(all_gather, ranks=self._rank_info, what=_ROWS),
            is_lead=self._rank_info.is_lead,
            most=1 if source.startswith(TOPIC) else config.data.streams,  # so that a resumed run has the same arrivals
            skips=config.data.on_bad_row == "skip",
            ingester=self._ingester,
        )

    @property
    def skipped(self) -> Mapping[str, int]:
        """Broken rows of this rank that the training files' present pass has left out so far, by reason."""
        return self._data.skipped if isinstance(self._data, FileClickData) else {}

    def left_out_of(self, epoch: int, counts: Mapping[str, int]) -> None:
        """Say how many rows of this rank an epoch has left out so far, since it began or the run was resumed."""
        name = f"train {epoch if self._feed is None else 0}"
        if counts:
            self.left_out[name] = dict(Counter(self._left_out_before.get(name, {})) + Counter(counts))

    def all_left_out(self) -> dict[str, dict[str, int]]:
        """:attr:`left_out` over all ranks. Every rank calls it."""
        total: dict[str, Counter[str]] = {}
        for left_out in all_gather(self.left_out, self._rank_info, _ROWS):
            for name, counts in left_out.items():
                total.setdefault(name, Counter()).update(counts)
        return {name: dict(counts) for name, counts in total.items()}

    def load_left_out(self, saved: Mapping[str, Mapping[str, int]]) -> None:
        """Continue from the result of :meth:`all_left_out`: rank 0 has the rows that any rank left out of epochs."""
        if self._rank_info.is_lead:
            self.left_out = {name: counts for name, counts in saved.items() if name.startswith("train ")}
            self._left_out_before = dict(self.left_out)

    def digests(self) -> dict[str, list[list[str]]]:
        """The names and checksums of the files, for a checkpoint."""
        return {name: [[info.path, info.digest] for info in data.files] for name, data in self._files.items()}

    def check_resumes(self, saved: Mapping[str, Sequence[Sequence[str]]]) -> None:
        """Check that a run would continue with the rows that it was started with.

        Args:
            saved: what :meth:`digests` gave.

        Raises:
            ConfigError: if a file was read in another order, by an older version.
            DataError: if a file is another.
        """
        for name, files in self.digests().items():
            before = saved.get(name, [])
            if len(files) != len(before):
                raise DataError(
                    f"{name} has {len(files)} files and had {len(before)} when the run was started: give the same"
                )
            for (path, digest), (_, old) in zip(files, before, strict=True):
                if digest.endswith("-rows") and not old.endswith("-rows"):
                    raise ConfigError(
                        f"data file {path} was read in another order by the version of shardrec with which the run was "
                        "started: start a new run in another folder (--out), with the weights of this one (--init-from)"
                    )
                if digest != old:
                    raise DataError(
                        f"data file {path} is not the file with which the run was started (checksum {digest}, then "
                        f"{old}): give that one, or start a new run in another folder (--out), which may have the "
                        "weights of this one (--init-from)"
                    )

    @property
    def steps(self) -> int:
        """Steps of an epoch."""
        return -(-self.train_rows // (self._batch_rows * self._accumulate))

    @property
    def train_rows(self) -> int:
        """Rows of an epoch, over all ranks."""
        rows = self.data.train_rows
        return rows if self._samples is None else min(rows, -(-self._samples // self._batch_rows) * self._batch_rows)

    def step_rows(self, epoch_steps: int) -> int:
        """Rows of the step after ``epoch_steps`` of an epoch, of one batch a step, over all ranks and replicas."""
        return min(self._batch_rows, self.train_rows - epoch_steps * self._batch_rows)

    def count(self, progress: Callable[[int], object] = lambda count: None) -> None:
        """Count the rows of files, each on one of the ranks. Every rank calls it before it asks for rows.

        Raises:
            DataError: on every rank, for a file that is damaged.
        """
        for data in self._files.values():
            data.count(partial(on_ranks, self._rank_info), parts=self._rank_info.world_size, progress=progress)

    def describe(self) -> str:
        """The rows in words, and a way to make reading them faster."""
        if self._feed is not None:
            return "rows, as they arrive"
        lines = [self.data.describe()]
        if isinstance(self.data, FileClickData):
            lines.append(self.data.uneven(self._rank_info.world_size, self._batch_rows))
        return "\n".join(filter(None, lines))

    @property
    def _files(self) -> dict[str, FileClickData]:
        sources = {"data": self._data, "valid": self._valid, "test": self._test}
        return {name: data for name, data in sources.items() if isinstance(data, FileClickData)}

    @property
    def batch_size(self) -> int:
        """Most rows of a batch on a rank, with all replicas."""
        return -(-self._batch_rows // self._ranks)

    def train_batches(
        self, first_step: int = 0, epoch: int = 0, *, replica: int = 0, replicas: int = 1
    ) -> Iterator[ClickBatch]:
        """This rank's batches of an epoch, as many as every other rank has, without the first steps' batches. The rows
        of a step are spread over the ranks of all replicas that there are, ``replica`` is the place of this one."""
        rank_info, first = self._rank_info, first_step * self._accumulate
        ranks = rank_info.world_size * replicas
        batches = self.data.train_batches(
            rank_info.world_size * replica + rank_info.rank,
            ranks,
            -(-self._batch_rows // ranks),
            first_batch=first,
            global_rows=self._batch_rows,
            epoch=epoch,
        )
        count = None if self._samples is None else max(0, -(-self._samples // self._batch_rows) - first)
        return islice(batches, count)

    def sampled(self, count: int) -> list[KeyedJaggedTensor]:
        """The ids of rank 0's first training batches with rows, which are the same for every rank that asks.

        Raises:
            DataError: if no row of any rank can be read.
        """
        sampled: list[KeyedJaggedTensor] = []
        for ranks in (self._ranks, 1):  # rank 0 may have only broken rows
            if not sampled:
                batches = self.data.train_batches(0, ranks, self.batch_size, global_rows=self._batch_rows)
                sampled = [batch.sparse for batch in islice((batch for batch in batches if batch.size), count)]
        return sampled

    def holdout_batches(self, limit: int | None = None) -> Iterator[ClickBatch]:
        """This rank's batches of the held-out rows, or of the first ``limit`` of them, to whole batches."""
        limit = limit or self._holdout_samples
        if self._valid is not None:
            return self._scored("valid", self._valid, limit)
        return self._scored("held", self.data, limit, held_out=True)

    def test_batches(self) -> Iterator[ClickBatch]:
        """This rank's batches for the final metrics: of the test files, or else the held-out rows."""
        return self.holdout_batches() if self._test is None else self._scored("test", self._test, None)

    def _scored(
        self, files: str, data: FileClickData | SyntheticClickData, limit: int | None, *, held_out: bool = False
    ) -> Iterator[ClickBatch]:
        """The rows of some files, or the held-out ones among them, or the first ``limit``, to whole batches."""
        rank, ranks = self._rank_info.rank, self._rank_info.world_size
        many = ranks * _SCORED_ROWS
        rows = max(self._batch_rows, many if limit is None else min(limit, many))
        read = data.holdout_batches if held_out else data.train_batches
        batches = read(rank, ranks, -(-rows // ranks), global_rows=rows)
        return self._counted(files, data, islice(batches, None if limit is None else -(-limit // rows)))

    def best_metrics(self) -> ClickMetrics | None:
        """The best that any model can have on the held-out rows. None for data with an unknown optimum."""
        return self._data.best_metrics().holdout if isinstance(self._data, SyntheticClickData) else None

    def _counted(
        self, files: str, data: FileClickData | SyntheticClickData, batches: Iterator[ClickBatch]
    ) -> Iterator[ClickBatch]:
        yield from batches
        if isinstance(data, FileClickData):
            counts = (self.left_out.get(files, {}), data.skipped)
            self.left_out[files] = max(counts, key=lambda skipped: sum(skipped.values()))


def total_left_out(left_out: Mapping[str, Mapping[str, int]]) -> dict[str, int]:
    """The rows left out of the files, by reason, however often they were read."""
    longest: dict[str, Mapping[str, int]] = {}
    for name, counts in left_out.items():
        rows = name.partition(" ")[0]
        longest[rows] = max(longest.get(rows, {}), counts, key=lambda reasons: sum(reasons.values()))
    return dict(sum(map(Counter, longest.values()), Counter()))


def spec_of(config: TrainConfig) -> FeatureSpec:
    """What the columns of the config's files are."""
    if config.data.features is None:
        return criteo_spec(max_embeddings=config.data.max_embeddings)
    return load_spec(Path(config.data.features))


def decided_spec(
    config: TrainConfig,
    spec: FeatureSpec,
    rank_info: RankInfo,
    folder: Path,
    progress: Callable[[int], object] = lambda count: None,
) -> FeatureSpec:
    """The spec with the properties that the rows to train on decide: vocabularies from data, and spellings of ids.

    Each rank reads some of the files' row groups. Every rank calls it.
    """
    from shardrec.trainer.data.vocabulary import count_vocabularies  # with pyarrow

    data = config.data
    if spec.uncounted and not isinstance(data, FiniteData):
        raise ConfigError(
            f"data (--data) is {data.files!r}, and the features (--features) have a vocabulary from data, which a "
            "feed never has all of: list the values, or give rows: N or dynamic_ids"
        )
    if not isinstance(data, FiniteData) or not (spec.uncounted or spec.undecided):
        return spec
    files = [check_part(path, spec) for path in files_of(data.files)]
    each, parts = partial(on_ranks, rank_info), rank_info.world_size
    files = each(partial(counted, spec=spec, folder=folder, progress=progress), files)
    spec = decided(files, spec, each=each, parts=parts)
    if not spec.uncounted:
        return spec
    return spec.with_vocabularies(count_vocabularies(files, spec, holdout=_holdout(data), each=each, parts=parts))


def on_ranks(rank_info: RankInfo, function: Callable[[S], T], items: Sequence[S]) -> list[T]:
    """The function's value for each item, which one of the ranks computes. Its error is raised on all."""
    rank, ranks = rank_info.rank, rank_info.world_size
    if ranks == 1:
        return list(map(function, items))
    values, fault = list[T](), ""
    # A share may be large, such as a file of text that is one item.
    share = on_threads(lambda: list(map(function, items[rank::ranks])), rank_info, _ROWS, rank_info.timeout / 4)
    try:
        values = share.result()
    except DataError as error:
        fault = str(error)
    gathered = all_gather((values, fault), rank_info, _ROWS)
    for _, fault in gathered:
        if fault:
            raise DataError(fault)
    return [gathered[number % ranks][0][number // ranks] for number in range(len(items))]


def _holdout(data: FiniteData) -> float:
    return data.holdout if data.valid is None else 0.0


def _opened(
    config: TrainConfig,
    names: str | Sequence[str],
    spec: FeatureSpec,
    folder: Path | None,
    *,
    holdout: float = 0.0,
    shuffle: int = 0,
    needs_rows: bool = True,
    known: Sequence[FileInfo] = (),
) -> FileClickData:
    if config.learning.needs_groups and spec.group is None:
        raise ConfigError(
            f"loss (--loss) is {config.learning.loss!r}, which ranks the rows of a group, and "
            f"{config.data.features} names none: add group: COLUMN, or give loss 'bce'"
        )
    on_bad_row = "raise" if config.data.on_bad_row == "error" else config.data.on_bad_row
    try:
        data = open_click_data(
            names,
            spec,
            holdout=holdout,
            on_bad_row=on_bad_row,
            shuffle=shuffle,
            keep_groups=config.learning.loss != "bce",
            seed=config.learning.seed,
            streams=config.data.streams,
            needs_rows=needs_rows,
            known=known,
            folder=folder,
            decides=config.feed is None,
        )
    except MissingColumnsError as error:
        if config.data.features is not None:
            raise
        raise DataError(
            f"{error}. Without --features the columns are those of Criteo's files: propose a spec of these with "
            f"shardrec inspect {shlex.quote(names if isinstance(names, str) else names[0])} --suggest --out proposed"
        ) from error
    assert isinstance(data, FileClickData), "only a SyntheticConfig gives generated rows"
    return data


def _open(
    config: TrainConfig, data: FiniteData, spec: FeatureSpec, folder: Path | None
) -> FileClickData | SyntheticClickData:
    if not data.is_synthetic:
        return _opened(config, data.files, spec, folder, holdout=_holdout(data), shuffle=data.shuffle or 0)
    return open_click_data(
        SyntheticConfig(
            rows=data.samples or _SYNTHETIC_ROWS,
            holdout_rows=data.holdout_samples or _SYNTHETIC_HOLDOUT_ROWS,
            seed=config.learning.seed,
            schema=criteo_schema(max_embeddings=data.max_embeddings),
        )
    )

"""``shardrec predict`` and ``recommend`` on one rank: a model's scores of all rows of some files, or the best items for
them, as Parquet files in the rows' order.

::

    files   a.parquet (5 rows)    b.csv (4)              ranks share what is left to do, in neighbouring parts
    parts   0 1 2 │ 3 4           0 1 2 │ 3
            part-00000.parquet, part-00001, ...          each is there whole, or not at all
            _job.json at the start, _manifest.json, which names all the parts, at the end

Parts depend on the files and the first start alone: a command that is given again, on any number of ranks, makes those
that are not there yet.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import cached_property, partial
from itertools import chain, groupby
from pathlib import Path
from shutil import rmtree
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
from pydantic import model_validator
from torch import Tensor, nn

from shardrec import ConfigError, DataError
from shardrec.files import Store, os_fault, parse_json
from shardrec.launch import RankInfo, joined_run, meet, on_first_rank
from shardrec.pipeline import TrainPipeline
from shardrec.trainer.data import ClickBatch, FeatureSpec
from shardrec.trainer.data.arrays import plain_column
from shardrec.trainer.data.convert import counted
from shardrec.trainer.data.encode import encode
from shardrec.trainer.data.rows import ClickRows
from shardrec.trainer.data.spec import sources_of
from shardrec.trainer.data.tables import FileInfo, check_part, rows_between
from shardrec.trainer.data.urls import files_of
from shardrec.trainer.run.catalogue import Seen
from shardrec.trainer.run.config import ROWS
from shardrec.trainer.run.prefetch import Prefetcher
from shardrec.trainer.run.recommend import Recommender
from shardrec.trainer.run.runs import RunFolder
from shardrec.trainer.run.source import on_ranks
from shardrec.trainer.run.task_metrics import predictions

if TYPE_CHECKING:
    import pyarrow as pa

_JOB, _MANIFEST = "_job.json", "_manifest.json"
_ROWS = 2048
"""Of a batch: without gradients they need little memory."""
_PART_BATCHES = 64
"""Most batches of a part. Fewer where ranks would be without a part."""


class _Keyed(FeatureSpec):
    """A spec without labels, of which the files need the keys and the features' columns but those of ``absent``."""

    keys: tuple[str, ...]
    absent: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _fits(self) -> _Keyed:
        """The run's spec was checked, and ``columns`` are of text files. Their check names a key that they lack."""
        return self

    @cached_property
    def sources(self) -> tuple[str, ...]:
        features = [feature for feature in self.features if feature.name not in self.absent]
        return tuple(dict.fromkeys((*self.keys, *sources_of(features))))

    @cached_property
    def forms(self) -> Mapping[str, Literal["ids", "numbers", "texts"]]:
        """Keys are written as they are read."""
        return {**super().forms, **dict.fromkeys(self.keys, "texts")}

    def completed(self, table: pa.Table) -> pa.Table:
        """The table with nulls in the columns that it lacks."""
        import pyarrow as pa

        for name in self.feature_sources:
            if name not in table.column_names:
                table = table.append_column(name, pa.nulls(len(table)))
        return table


class _Part(NamedTuple):
    """Rows ``start`` to ``stop`` (not included) of a file."""

    name: str
    info: FileInfo
    start: int
    stop: int


class _Scored(NamedTuple):
    """A batch, the keys of its rows (a ``pyarrow.Table``), its part, and whether it is the part's last; or padding."""

    batch: ClickBatch
    keys: pa.Table | None = None
    part: _Part | None = None
    ends: bool = False


class _Scores:
    """The columns of ``shardrec predict``."""

    absent: tuple[str, ...] = ()

    def __init__(self, spec: FeatureSpec, loss: str) -> None:
        self.spec, self._loss = spec, loss
        self._columns = {task.name: f"score_{task.name}" for task in spec.labels} or {"": "score"}
        self.names = [*self._columns.values()]

    def computed(self, model: nn.Module, batch: ClickBatch) -> dict[str, Tensor]:
        return predictions(model(batch.dense, batch.sparse), batch.size, self.spec.labels, self._loss)

    def columns(self, values: Mapping[str, Tensor]) -> dict[str, pa.Array]:
        """float32, of several classes lists of it."""
        import pyarrow as pa

        columns = {}
        for name, of_rows in values.items():
            flat = pa.array(of_rows.cpu().reshape(-1).numpy())
            columns[self._columns[name]] = (
                flat if of_rows.dim() == 1 else pa.FixedSizeListArray.from_arrays(flat, of_rows.size(1))
            )
        return columns


class _Top:
    """The columns of ``shardrec recommend``."""

    names = ("items", "scores")

    def __init__(self, recommender: Recommender, k: int, exclude_seen: bool) -> None:
        self.absent, self.spec, self.computed = recommender.absent, recommender.spec, recommender.asked
        self._recommender, self._k, self._exclude_seen = recommender, k, exclude_seen
        if exclude_seen:
            recommender.check_seen()
        recommender.catalogue.look_up()

    def columns(self, values: tuple[Tensor, Seen]) -> Mapping[str, pa.Array]:
        return self._recommender.best(*values, self._k, exclude_seen=self._exclude_seen)


def predict_rank(options: Mapping[str, Any]) -> dict[str, Any] | None:
    """This rank's share. Options and result as of :func:`shardrec.trainer.run.predict`."""
    folder, out = RunFolder(Path(options["run"])), Store(options["out"])
    config = folder.config.changed(device=options["device"])
    with joined_run(config.ranks.device, config.ranks.threads, timeout=config.ranks.timeout) as rank_info:
        spec, top = folder.spec, options["top"]
        model, checkpoint = folder.loaded(rank_info.device)
        results: _Scores | _Top = _Scores(spec, config.learning.loss)
        if top is not None:
            results = _Top(Recommender(model, spec, rank_info.device), top, options["exclude_seen"])
        of_files = ("columns", "delimiter", "quoted", "encoding", "decimal", "missing", "rules")
        fields = {name: getattr(results.spec, name) for name in ("features", *of_files)}
        keys: list[str] = [*filter(None, [spec.group])] if options["keys"] is None else options["keys"]
        keyed = _Keyed(keys=tuple(keys), absent=results.absent, **fields)
        job = {"run": str(folder.path.resolve()), "checkpoint": checkpoint, "keys": keys}
        job |= {"columns": [*results.names], "on_bad_row": options["on_bad_row"] or config.data.on_bad_row}
        if top is not None:
            job |= {"top": top, "exclude_seen": options["exclude_seen"]}
        converted = folder.path / f"{ROWS}_to_predict" if "://" in options["out"] else Path(options["out"], f".{ROWS}")
        files = on_ranks(rank_info, partial(_counted, spec=keyed, folder=converted), files_of(options["data"]))
        job = on_first_rank(partial(_begin, out, options, job, files, rank_info.world_size), rank_info, "start")
        done, parts = job.pop("done"), _parts(job)
        left = [part for part in parts if part.name not in done]

        def forward(model: nn.Module, item: _Scored) -> tuple[Any, _Scored]:
            return results.computed(model, item.batch), item

        steps = TrainPipeline(model, (), (), depth=0, device=rank_info.device)
        tables: list[pa.Table] = []
        complete: list[str] = []

        def written(batches: Iterator[_Scored]) -> Iterator[_Scored]:
            """The batches. A part is written before the next one, at which all ranks raise what a rank raises."""
            for item in chain(batches, (None,)):
                while complete:
                    out.write(complete.pop(), _parquet(tables))
                    tables.clear()
                if item is not None:
                    yield item

        with Prefetcher(_batches(left, keyed, rank_info, skips=job["on_bad_row"] == "skip")) as batches:
            for values, item in steps.predict(written(batches), forward):
                columns = results.columns(values)  # of padding, too: of several ranks, each has a part in it
                if item.part is None:
                    continue
                tables.append(_with_results(item.keys, columns))
                if item.ends:
                    complete.append(item.part.name)
        meet(rank_info, "end of the predictions")
        manifest = on_first_rank(partial(_finish, out, job, parts), rank_info, "manifest")
        if rank_info.is_lead:
            rmtree(converted, ignore_errors=True)
        return manifest if rank_info.is_lead else None


def _counted(path: str, spec: FeatureSpec, folder: Path) -> FileInfo:
    return counted(check_part(path, spec), spec, folder)


def _begin(
    out: Store, options: Mapping[str, Any], job: dict[str, Any], infos: Sequence[FileInfo], ranks: int
) -> dict[str, Any]:
    """What is to be done, and which parts are. Written down at the first start."""
    try:
        files = [{**asdict(info), "groups": [*info.groups], "rows": sum(info.groups)} for info in infos]
        if twice := {*job["keys"]} & {*job["columns"]}:
            raise ConfigError(f"keys (--keys) has {min(twice)!r}, the name of a column of scores: leave it out")
        rows = sum(file["rows"] for file in files)
        batches = min(_PART_BATCHES, max(1, -(-rows // (_ROWS * ranks))))
        job |= {"files": files, "part_rows": batches * _ROWS}
        names = sorted(name for name in out.names() if not name.startswith("."))
        if _JOB in names:
            begun = parse_json(out.read(_JOB))
            free = ("part_rows", "on_bad_row")  # as when training: a row that is left out moves no other
            changed = [name for name in job if name not in free and begun.get(name) != job[name]]
            if changed:
                raise ConfigError(
                    f"out (--out) is {options['out']!r}, which holds scores that differ in {changed[0]}: give another "
                    f"folder. There it is {begun.get(changed[0])}, here {job[changed[0]]}"
                )
            job = {**begun, "on_bad_row": job["on_bad_row"]}
        elif names:
            raise ConfigError(f"out (--out) is {options['out']!r}, which holds {names[0]}: give an empty folder")
        else:
            out.write(_JOB, json.dumps(job, indent=1).encode())
        return {**job, "done": names}
    except OSError as error:
        raise ConfigError(
            f"out (--out) is {options['out']!r}, which cannot be used ({os_fault(error)}): give another"
        ) from error


def _finish(out: Store, job: Mapping[str, Any], parts: Sequence[_Part]) -> dict[str, Any]:
    """Write the manifest, with the rows per part."""
    import pyarrow.parquet as pq

    rows = {part.name: pq.read_metadata(io.BytesIO(out.read(part.name))).num_rows for part in parts}
    count = sum(rows.values())
    manifest = {**job, "rows": count, "left_out": sum(file["rows"] for file in job["files"]) - count, "parts": rows}
    out.write(_MANIFEST, json.dumps(manifest, indent=1).encode())
    return manifest


def _parts(job: Mapping[str, Any]) -> list[_Part]:
    size = job["part_rows"]
    infos = [
        FileInfo(**{key: value for key, value in file.items() if key != "rows"} | {"groups": tuple(file["groups"])})
        for file in job["files"]
    ]
    starts = [(info, start) for info in infos for start in range(0, sum(info.groups), size)]
    return [
        _Part(f"part-{number:05}.parquet", info, start, min(start + size, sum(info.groups)))
        for number, (info, start) in enumerate(starts)
    ]


def _batches(parts: Sequence[_Part], spec: _Keyed, rank_info: RankInfo, *, skips: bool) -> Iterator[_Scored]:
    """This rank's batches, and empty ones until it has as many as every other rank; of several ranks at least one."""
    sizes = np.array([-(-(part.stop - part.start) // _ROWS) for part in parts], dtype=np.int64)
    rank_of = (np.cumsum(sizes) - sizes) * rank_info.world_size // max(1, sizes.sum())
    yield from _scored([part for part, rank in zip(parts, rank_of, strict=True) if rank == rank_info.rank], spec, skips)
    counts = np.bincount(rank_of, weights=sizes, minlength=rank_info.world_size).astype(np.int64)
    empty = ClickRows(
        labels=np.zeros(0, np.float32),
        dense=np.zeros((0, len(spec.schema_.dense_names)), np.float32),
        ids=np.zeros(0, np.int64),
        lengths=np.zeros((0, len(spec.sparse)), np.int64),
        weights=np.zeros(0, np.float32) if spec.schema_.weighted else None,
    )
    for _ in range(counts.max() - counts[rank_info.rank] + (rank_info.world_size > 1)):
        yield _Scored(empty.to_batch(spec.schema_))


def _scored(parts: Sequence[_Part], spec: _Keyed, skips: bool) -> Iterator[_Scored]:
    for info, of_file in groupby(parts, key=lambda part: part.info):
        ranges = [
            (part, start, min(start + _ROWS, part.stop))
            for part in of_file
            for start in range(part.start, part.stop, _ROWS)
        ]
        blocks = rows_between(info, spec, [(start, stop) for _, start, stop in ranges], skips=skips)
        for (part, _, stop), block in zip(ranges, blocks, strict=True):
            encoded = encode(spec.completed(block.table), spec, labelled=False)
            faults = {int(block.numbers[row]): fault for row, fault in encoded.faults.items()} | block.faults
            if faults and not skips:
                number = min(faults)
                remedy = f"{faults[number].remedy}, or leave such rows out (--on-bad-row skip)"
                raise DataError(f"{info.place(number)}: {faults[number].where}; {remedy}")
            keep = np.ones(len(block.numbers), dtype=np.bool_)
            keep[list(encoded.faults)] = False
            keys = block.table.select(list(spec.keys)).filter(keep)
            yield _Scored(encoded.rows.where(keep).to_batch(spec.schema_), keys, part, stop == part.stop)


def _with_results(keys: pa.Table, results: Mapping[str, pa.Array]) -> pa.Table:
    """A table of keys, texts and bytes as texts, and of results."""
    import pyarrow as pa

    columns = {name: plain_column(keys[name]) for name in keys.column_names}
    for name, column in columns.items():
        if pa.types.is_string(column.type) or pa.types.is_binary(column.type):
            try:
                columns[name] = column.cast(pa.binary()).cast(pa.string())
            except pa.ArrowInvalid as error:
                raise DataError(
                    f"column {name!r} of keys (--keys) has texts that are not UTF-8: convert them"
                ) from error
    return pa.table({**columns, **results})


def _parquet(tables: Sequence[pa.Table]) -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    file = io.BytesIO()
    pq.write_table(pa.concat_tables(tables), file)
    return file.getvalue()

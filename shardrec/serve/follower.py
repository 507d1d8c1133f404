"""Follows the versions of a :class:`shardrec.Publisher`: they are verified and read, and then applied in one go.

[Note: rows are set aside first] Everything of a version that may fail comes before the first byte of the model changes:
the manifest and each file that is read are verified, and the rows are set aside in memory. Of a part of which the model
has an earlier state, these are the rows of the deltas since; of any other, say of the first base of a trainer that was
started again, those that differ from the model's. So memory is taken for the rows that change, and for two blocks of 16
MiB. Then they are copied into the tables while no call of the model runs.
"""

from __future__ import annotations

import atexit
import threading
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardrec.checkpoint.changes import PartKey, different_rows
from shardrec.checkpoint.data_files import BLOCK_BYTES, CACHED_BYTES, DTYPES, OpenFile
from shardrec.checkpoint.ids import dynamic_tables
from shardrec.checkpoint.manifest import Manifest, SavedPart, read_manifest
from shardrec.checkpoint.parts import HeldTensor, Part, Rect, as_matrix
from shardrec.errors import CheckpointError, ConfigError
from shardrec.files import Store
from shardrec.modules.sharded_model import ShardedModel
from shardrec.serve.published import served_tensors, version_name, versions_in
from shardrec.serve.row_bytes import WeightFormat

_LONGEST_WAIT_S = 60.0

_Change = tuple[Tensor, Tensor, Tensor]
"""A tensor of the model, (n,) int64 rows of it, and their values."""

_Content = tuple[object, ...]
"""What identifies the values of a part, or of its changed rows: the file with its checksums, and where they are."""


class Follower:
    """Applies published versions to a served model; :meth:`shardrec.serve.ServedModel.follow` makes it.

    Args:
        model: on one rank.
        formats: of its tables, by their names in the plan.
        source: folder or URL.
        interval: seconds between two looks. After a fault, the time is doubled up to a minute.

    Attributes:
        version: that the model has; 0 for none.
        published: when it was published, in seconds since 1970 by the publisher's clock.
        extra: the publisher's data of the version.
        faults: number of looks that found a version which could not be applied.
        fault: the reason, if the last look was one; else "".
    """

    def __init__(
        self, model: ShardedModel, formats: Mapping[str, WeightFormat], source: str | Path, *, interval: float
    ) -> None:
        self._model, self._formats, self._source, self._interval = model, formats, source, interval
        self._store = Store(source)
        self._applied: dict[PartKey, list[_Content]] = {}
        self._turnstile, self._lock = threading.Lock(), threading.Lock()
        self._reader: int | None = None
        self._seen = threading.local()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="shardrec follower", daemon=True)
        self.version, self.published, self.faults, self.fault = 0, 0.0, 0, ""
        self.extra: dict[str, Any] = {}

    @property
    def age(self) -> float:
        """Seconds since the model's version was published. Infinite without one."""
        return _age(self.version, self.published)

    def seen(self) -> tuple[int, float]:
        """Version and age that this thread's last call saw. The model's if there was no call since ``seen``."""
        version, published = self._seen.__dict__.pop("by_call", (self.version, self.published))
        return version, _age(version, published)

    def start(self) -> None:
        """Apply the last version, and begin to look for further ones."""
        self.poll()
        self._thread.start()
        atexit.register(self.close)

    @property
    def closed(self) -> bool:
        """Whether it applies no further version."""
        return self._ended.is_set()

    def close(self) -> None:
        """Apply no further version. The model keeps its present version."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()
        atexit.unregister(self.close)

    @contextmanager
    def reading(self) -> Iterator[None]:
        """See :meth:`shardrec.serve.ServedModel.reading`."""
        if self._reader == threading.get_ident():
            yield
            return
        with self._turnstile:  # behind a version that waits for the calls before it
            pass
        with self._lock:
            self._reader, self._seen.by_call = threading.get_ident(), (self.version, self.published)
            try:
                yield
            finally:
                self._reader = None

    def _run(self) -> None:
        wait_s = self._interval
        while not self._ended.wait(wait_s):
            try:
                self.poll()
            except Exception as error:  # the model keeps its version, and the thread continues
                self._record(f"{type(error).__name__}: {error}")
            wait_s = min(_LONGEST_WAIT_S, 2 * wait_s) if self.fault else self._interval

    @torch.inference_mode(False)  # an inference tensor could not be written later
    def poll(self) -> bool:
        """Apply the newest good version that the model does not have, if there is one.

        Returns: Whether there was one.

        Raises:
            ConfigError: if it is one of another model.
        """
        before, fault = self.version, ""
        try:
            versions = versions_in(self._store.names())
        except OSError as error:
            versions, fault = [], f"{self._source} cannot be listed ({error})"
        if versions and versions[-1] < before:
            fault = (
                f"{self._source} has version {versions[-1]} as its last and the model has {before}: if publishing "
                "began again, close() the follower and follow again"
            )
        for version in reversed([version for version in versions if version > before]):
            try:
                self._take(version)
                break
            except (CheckpointError, OSError) as error:
                fault = fault or f"version {version} in {self._source} is not applied: {error}"
        self._record(fault)
        return self.version > before

    def _record(self, fault: str) -> None:
        is_known, self.fault = fault == self.fault, fault
        self.faults += bool(fault)
        if fault and not is_known:
            warnings.warn(f"{fault}. The model keeps version {self.version}", stacklevel=2)

    def _take(self, version: int) -> None:
        """Verify, read and apply a version. See [Note: rows are set aside first]."""
        with ExitStack() as stack:
            stack.enter_context(self._store.fetched(version_name(version)))
            manifest = read_manifest(self._store.folder, version_name(version))
            if manifest.extra.get("version") != version:
                raise CheckpointError(f"its manifest belongs to version {manifest.extra.get('version')}")
            targets = served_tensors(self._model, self._formats)
            self._check_fits(manifest, targets)
            reader = _Reader(self._store, manifest, self._applied, stack)
            replacements = []
            for table in dynamic_tables(self._model):
                name = f"ids.{table.path}.records"
                for part, (_, id_map) in zip(targets.pop(name).parts, table.blocks(), strict=True):
                    records = id_map.records.clone()
                    changes = list(reader.changes(name, part))
                    for _, rows, values in changes:
                        records[rows] = torch.nn.functional.pad(values, [0, 1])
                    replacements += [id_map.prepared(records)] if changes else []
            changes = [
                change
                for name, tensor in targets.items()
                for part in tensor.parts
                for change in reader.changes(name, part)
            ]
        with self._turnstile, self._lock:
            for change in changes:
                _apply(*change)
            for replace in replacements:
                replace()
            self.version, self.published = version, float(manifest.extra["published"])
            self.extra = manifest.extra["extra"]
        self._applied = {
            (name, part.rect): _contents(manifest, part)
            for name, tensor in manifest.tensors.items()
            for part in tensor.parts
        }

    def _check_fits(self, manifest: Manifest, targets: Mapping[str, HeldTensor]) -> None:
        served = {name: f"{tensor.dtype} {tensor.shape}" for name, tensor in targets.items()}
        published = {name: f"{DTYPES[tensor.dtype]} {tensor.shape}" for name, tensor in manifest.tensors.items()}
        served |= {f"table {table!r}": form.value for table, form in self._formats.items()}
        published |= {f"table {table!r}": form for table, form in manifest.extra["formats"].items()}
        faults = [
            f"{name} is published as {published.get(name, 'nothing')} and served as {served.get(name, 'nothing')}"
            for name in sorted(served.keys() | published.keys(), reverse=True)
            if served.get(name) != published.get(name)
        ]
        for table in dynamic_tables(self._model) if not faults else ():
            blocks = {part.rect[:2] for part in manifest.tensors[f"ids.{table.path}.records"].parts}
            row_blocks = {(shard.row_start, shard.row_end) for (shard, *_), _ in table.blocks()}
            inside = all(any(top <= start and end <= bottom for top, bottom in row_blocks) for start, end in blocks)
            if not inside or (table.maps.options[table.layout.name].fallback_rows and blocks != row_blocks):
                faults.append(
                    f"the rows of table {table.layout.name!r} with dynamic ids are cut at {sorted(blocks)} and the "
                    f"model's at {sorted(row_blocks)}. Shard the model by the trainer's plan.on_one_rank()"
                )
        if faults:
            raise ConfigError(f"{self._source} publishes another model than this one: {'; '.join(faults[:5])}")


class _Reader:
    """Reads what a version changes."""

    def __init__(
        self, store: Store, manifest: Manifest, applied: Mapping[PartKey, list[_Content]], stack: ExitStack
    ) -> None:
        self._store, self._manifest, self._applied, self._stack = store, manifest, applied, stack
        self._files: dict[int, OpenFile] = {}
        self._contents = manifest.contents()
        self._buffer = torch.empty(BLOCK_BYTES, dtype=torch.uint8)

    def _opened(self, number: int) -> OpenFile:
        """A file that was verified completely when it was opened."""
        if number not in self._files:
            file = self._manifest.all_files[number]
            self._stack.enter_context(self._store.fetched(f"{self._manifest.data}/{file.name}"))
            opened = OpenFile(self._store.folder / self._manifest.data, file, self._stack)
            for block in range(file.blocks):
                opened.verify(block, self._buffer[:CACHED_BYTES].numpy().data)
            opened.check_contents(self._contents.get(number, {}))
            self._files[number] = opened
        return self._files[number]

    def changes(self, name: str, part: Part) -> Iterator[_Change]:
        """The rows of a part of the model that a version changes."""
        values = part.values if part.values.dim() else part.values.view(1)
        for saved in self._manifest.tensors[name].parts:
            place = saved.rect.common(part.rect)
            if place is None:
                continue
            target = values[:, place.cols_in(part.rect)] if values.dim() == 2 else values
            contents = _contents(self._manifest, saved)
            applied = self._applied.get((name, saved.rect), [])
            if applied and contents[: len(applied)] == applied:
                rows_since = saved.changes[len(applied) - 1 :]
                blocks: Iterator[tuple[Tensor, Tensor]] = (
                    (rows, fresh.clone())
                    for change in rows_since
                    for rows, fresh in self._opened(change.file).rows(
                        change, saved.rect, values.dtype, place, self._buffer
                    )
                )
            else:
                blocks = self._different(saved, part, place)
            first = place.row_start - part.rect.row_start
            for rows, fresh in blocks:
                if len(rows):
                    yield target, rows + first, fresh.reshape(-1, *target.shape[1:])

    def _different(self, saved: SavedPart, part: Part, place: Rect) -> Iterator[tuple[Tensor, Tensor]]:
        """The rows of the intersection ``place`` with a saved part that differ, counted from its first."""
        dtype, matrix = part.values.dtype, as_matrix(part.values)
        length = max(1, BLOCK_BYTES // (place.cols * dtype.itemsize))
        for start in range(place.row_start, place.row_end, length):
            block = place._replace(row_start=start, row_end=min(start + length, place.row_end))
            values = torch.empty((block.row_end - start, place.cols), dtype=dtype)
            saved.read(self._opened, dtype, values, block, self._buffer)
            rows = different_rows(values, matrix[block.rows_in(part.rect), block.cols_in(part.rect)].cpu())
            yield rows + start - place.row_start, values[rows]


def _apply(target: Tensor, rows: Tensor, values: Tensor) -> None:
    with suppress(RuntimeError):  # words are copied faster than bytes, if they fit
        if target.dim() > 1:
            target, values = target.view(torch.int32), values.view(torch.int32)
    target.index_copy_(0, rows.to(target.device), values.to(target.device))


def _age(version: int, published: float) -> float:
    return max(0.0, time.time() - published) if version else float("inf")


def _contents(manifest: Manifest, part: SavedPart) -> list[_Content]:
    """What identifies the values of a part and then each of its changes, also in later manifests."""
    data, files = manifest.data, manifest.all_files
    return [(data, files[part.file], part.start), *((data, files[rows.file], *rows[1:]) for rows in part.changes)]

"""Follows what a :class:`shardrec.Publisher` publishes: versions are verified and read, and then applied at once.

[Note: rows are set aside first] Everything of a version that may fail comes before the first byte of the model changes:
the manifest and each file that is read are verified, and the rows are set aside in memory. Of a part of which the model
has an earlier state, these are the rows of the deltas since; of any other, say of the first base of a trainer that was
started again, those that differ from the model's. So memory is taken for the rows that change, and for a block of 16
MiB. Then they are copied into the tables while no call of the model runs.
"""

from __future__ import annotations

import atexit
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardrec.checkpoint.changes import different_rows
from shardrec.checkpoint.files import BLOCK_BYTES, CACHED_BYTES, DTYPES, OpenFile
from shardrec.checkpoint.ids import DynamicTable, dynamic_tables
from shardrec.checkpoint.manifest import Manifest, SavedPart, read_manifest
from shardrec.checkpoint.parts import HeldTensor, Part, Rect, as_matrix
from shardrec.errors import CheckpointError, ConfigError
from shardrec.modules.model import ShardedModel
from shardrec.serve.format import WeightFormat
from shardrec.serve.published import served_tensors, version_name, versions_in
from shardrec.serve.store import Store

__all__ = ["Follower", "published_formats"]

_LONGEST_WAIT_S = 60.0


@dataclass(frozen=True)
class _Change:
    """Rows that a version gives to a tensor of the model."""

    target: Tensor
    rows: Tensor
    values: Tensor

    def apply(self) -> None:
        target, values = self.target, self.values
        with suppress(RuntimeError):  # words are copied faster than bytes, if they fit
            if target.dim() > 1:
                target, values = target.view(torch.int32), values.view(torch.int32)
        target.index_copy_(0, self.rows.to(target.device), values.to(target.device))


_Content = tuple[Any, ...]
"""What identifies rows in a file: the file, with its checksums, and where they are in it."""


class Follower:
    """Applies published versions to a served model; :meth:`shardrec.serve.ServedModel.follow` makes it.

    Args:
        model: on one rank.
        formats: of its tables, by their names in the plan.
        source: folder or URL.
        every: seconds between two looks; after a fault, the time is doubled up to a minute.

    Attributes:
        version: that the model has; 0 for none.
        published: when it was published, in seconds since 1970 by the publisher's clock.
        faults: number of times that a version could not be applied.
        fault: the last reason; "" if the last look found none.
        extra: the publisher's data of the version.
    """

    def __init__(
        self, model: ShardedModel, formats: Mapping[str, WeightFormat], source: str | Path, *, every: float
    ) -> None:
        self._model, self._formats, self._source, self._every = model, formats, source, every
        self._store = Store(source)
        self._applied: dict[tuple[str, Rect], tuple[_Content, list[_Content]]] = {}
        self._turnstile, self._lock = threading.Lock(), threading.Lock()
        self._reader: int | None = None
        self._seen = threading.local()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="shardrec follower", daemon=True)
        self.version = 0
        self.published = 0.0
        self.faults = 0
        self.fault = ""
        self.extra: dict[str, Any] = {}

    @property
    def age(self) -> float:
        """Seconds since the model's version was published; infinite without one."""
        return _age(self.version, self.published)

    def seen(self) -> tuple[int, float]:
        """Version and age of what this thread's last call of the model saw; without a call since the last
        ``seen``, those of the model."""
        version, published = self._seen.__dict__.pop("by_call", (self.version, self.published))
        return version, _age(version, published)

    def start(self) -> None:
        """Apply the last version, and begin to look for further ones."""
        self.poll()
        self._thread.start()
        atexit.register(self.close)

    def close(self) -> None:
        """Apply no further version. The model keeps the one that it has."""
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
            self._reader = threading.get_ident()
            self._seen.by_call = self.version, self.published
            try:
                yield
            finally:
                self._reader = None

    def _run(self) -> None:
        wait_s = self._every
        while not self._ended.wait(wait_s):
            try:
                self.poll()
            except Exception as error:  # of a thread that goes on
                self._record(f"{type(error).__name__}: {error}")
            wait_s = min(_LONGEST_WAIT_S, 2 * wait_s) if self.fault else self._every

    def poll(self) -> bool:
        """Apply the newest good version that the model does not have, if there is one.

        Returns: Whether there was one.

        Raises:
            ConfigError: if it is one of another model.
        """
        try:
            versions = versions_in(self._store.names())
        except OSError as error:
            return self._record(f"{self._source} cannot be listed ({error})")
        fault = ""
        if versions and versions[-1] < self.version:
            fault = (
                f"{self._source} has version {versions[-1]} as its last and the model has {self.version}: if "
                "publishing began anew, close() the follower and follow again"
            )
        for version in reversed([version for version in versions if version > self.version]):
            try:
                self._take(version)
            except (CheckpointError, OSError) as error:
                fault = fault or f"version {version} in {self._source} is not applied: {error}"
            else:
                self._record(fault)
                return True
        return self._record(fault)

    def _record(self, fault: str) -> bool:
        if fault and fault != self.fault:
            warnings.warn(f"{fault}; the model keeps version {self.version}", stacklevel=2)
        self.faults += bool(fault)
        self.fault = fault
        return False

    def _take(self, version: int) -> None:
        """Verify, read and apply a version. See [Note: rows are set aside first]."""
        name = version_name(version)
        self._store.fetch(name)
        manifest = read_manifest(self._store.folder, name)
        self._store.forget(name)
        if manifest.extra.get("version") != version:
            raise CheckpointError(f"{name} is the manifest of version {manifest.extra.get('version')}")
        targets = served_tensors(self._model, self._formats)
        self._compare(manifest, targets)
        with ExitStack() as stack:
            opened = _opened(self._store, manifest, stack)
            ids: list[Callable[[], None]] = []
            changes: list[_Change] = []
            for table in dynamic_tables(self._model):
                ids += self._maps(table, manifest, targets.pop(f"ids.{table.path}.records"), opened)
            for tensor_name, tensor in targets.items():
                for part in tensor.parts:
                    changes += self._changes(tensor_name, tensor, part, manifest, opened)
        with self._turnstile, self._lock:
            for change in changes:
                change.apply()
            for replace in ids:
                replace()
            self.version, self.published = version, float(manifest.extra["published"])
            self.extra = manifest.extra["extra"]
        self._applied = {
            (tensor_name, part.rect): _contents(manifest, part)
            for tensor_name, saved in manifest.tensors.items()
            for part in saved.parts
        }

    def _compare(self, manifest: Manifest, targets: Mapping[str, HeldTensor]) -> None:
        saved = manifest.tensors
        formats = {table: form.value for table, form in self._formats.items()}
        faults = [
            f"table {table!r} is published as {form} and served as {formats[table]}"
            for table, form in manifest.extra["formats"].items()
            if formats.get(table, form) != form
        ]
        faults += [f"{name} is not published" for name in targets.keys() - saved.keys()]
        faults += [f"{name} is published, and the model lacks it" for name in saved.keys() - targets.keys()]
        if not faults:
            faults += [
                f"{name} is published as {saved[name].dtype} {saved[name].shape}, and the model's has {tensor.shape}"
                for name, tensor in targets.items()
                if (saved[name].shape, DTYPES[saved[name].dtype]) != (tensor.shape, tensor.dtype)
            ]
        for table in dynamic_tables(self._model) if not faults else ():
            blocks = {part.rect[:2] for part in saved[f"ids.{table.path}.records"].parts}
            own = {(shard.row_start, shard.row_end) for (shard, *_), _ in table.blocks()}
            inside = all(any(top <= start and end <= bottom for top, bottom in own) for start, end in blocks)
            if not inside or (table.maps.options[table.layout.name].fallback_rows and blocks != own):
                faults.append(
                    f"the rows of table {table.layout.name!r} with dynamic ids are cut at {sorted(blocks)} and the "
                    f"model's at {sorted(own)}; shard the model by the trainer's plan.on_one_rank()"
                )
        if faults:
            raise ConfigError(f"{self._source} publishes another model than this one: {'; '.join(sorted(faults)[:5])}")

    def _maps(
        self, table: DynamicTable, manifest: Manifest, tensor: HeldTensor, opened: Callable[[int], OpenFile]
    ) -> Iterator[Callable[[], None]]:
        """Functions that replace the maps of a table whose ids have changed."""
        for part, (_, id_map) in zip(tensor.parts, table.blocks(), strict=True):
            changes = list(self._changes(f"ids.{table.path}.records", tensor, part, manifest, opened))
            if changes:
                records = id_map.records.clone()
                for change in changes:
                    records[change.rows] = torch.nn.functional.pad(change.values, [0, 1])
                yield id_map.prepared(records)

    def _changes(
        self, name: str, tensor: HeldTensor, part: Part, manifest: Manifest, opened: Callable[[int], OpenFile]
    ) -> Iterator[_Change]:
        """The rows of a part of the model that a version changes."""
        saved, dtype, matrix = manifest.tensors[name], tensor.dtype, as_matrix(part.values)
        for saved_part in saved.parts:
            place = saved_part.rect.common(part.rect)
            if place is None:
                continue
            columns = place.cols_in(part.rect)
            target = part.values if part.values.dim() else part.values.view(1)
            target = target[:, columns] if target.dim() == 2 else target
            for rows, values in self._rows(name, saved_part, manifest, dtype, place, matrix, part, opened):
                if len(rows):
                    first = place.row_start - part.rect.row_start
                    yield _Change(target, rows + first, values.reshape(-1, *target.shape[1:]))

    def _rows(
        self,
        name: str,
        saved: SavedPart,
        manifest: Manifest,
        dtype: torch.dtype,
        place: Rect,
        matrix: Tensor,
        part: Part,
        opened: Callable[[int], OpenFile],
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Numbers, counted from the first row of ``place``, and values of its rows that a version changes."""
        buffer = torch.empty(BLOCK_BYTES, dtype=torch.uint8)
        whole, deltas = _contents(manifest, saved)
        known, applied = self._applied.get((name, saved.rect), ((), []))
        if whole == known and deltas[: len(applied)] == applied:
            for rows in saved.changes[len(applied) :]:
                for numbers, values in opened(rows.file).rows(rows, saved.rect, dtype, place, buffer):
                    yield numbers, values.clone()
            return
        length = max(1, BLOCK_BYTES // (place.cols * dtype.itemsize))
        for start in range(place.row_start, place.row_end, length):
            block = place._replace(row_start=start, row_end=min(start + length, place.row_end))
            values = torch.empty((block.row_end - start, place.cols), dtype=dtype)
            saved.read(opened, dtype, values, block, buffer)
            present = matrix[block.rows_in(part.rect), block.cols_in(part.rect)]
            different = different_rows(values, present.cpu())
            yield different + start - place.row_start, values[different]


def _age(version: int, published: float) -> float:
    return max(0.0, time.time() - published) if version else float("inf")


def published_formats(source: str | Path) -> dict[str, str]:
    """The format of each table in the last good version in a folder or at a URL, by the table's name in the plan.

    Raises:
        ConfigError: if there is none.
    """
    store = Store(source)
    for version in reversed(versions_in(store.names())):
        with suppress(CheckpointError, OSError):
            store.fetch(version_name(version))
            return dict(read_manifest(store.folder, version_name(version)).extra["formats"])
    raise ConfigError(
        f"{source} has no version of a model: start what publishes there first (shardrec train --publish {source})"
    )


def _contents(manifest: Manifest, part: SavedPart) -> tuple[_Content, list[_Content]]:
    """What identifies the values of a part and its changes, also in later manifests."""
    files, data = manifest.all_files, manifest.data
    deltas: list[_Content] = [(data, files[rows.file], *rows[1:]) for rows in part.changes]
    return (data, files[part.file], part.start), deltas


def _opened(store: Store, manifest: Manifest, stack: ExitStack) -> Callable[[int], OpenFile]:
    """A function that opens a file of a version by its number, the first time after every byte of it is verified."""
    files: dict[int, OpenFile] = {}
    contents = manifest.contents()
    buffer = memoryview(bytearray(CACHED_BYTES))

    def opened(number: int) -> OpenFile:
        if number not in files:
            file = manifest.all_files[number]
            name = f"{manifest.data}/{file.name}"
            store.fetch(name)
            stack.callback(store.forget, name)
            files[number] = OpenFile(store.folder / manifest.data, file, stack)
            for block in range(file.blocks):
                files[number].verify(block, buffer)
            files[number].check_contents(contents.get(number, {}))
        return files[number]

    return opened

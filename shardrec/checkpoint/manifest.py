"""The manifest of a checkpoint: its tensors, their positions in files, and the checksums of the files.

It is JSON, written last, and the only thing that makes a folder a checkpoint::

    checkpoint/
    ├── manifest.json
    └── data-<token>/
        ├── rank-00000.safetensors
        ├── rank-00000.0.safetensors      of an incremental checkpoint: a hard link to a file of an earlier one
        └── ...

A save writes a data folder with a new name, and then replaces the old manifest by the new one, which is atomic. Until
then the folder is the old checkpoint, and from then on the new one. A kill at any point leaves one of the two, and
possibly a data folder that no manifest names, which the next save removes.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import chain, islice, pairwise
from pathlib import Path
from types import UnionType
from typing import Any, TypedDict

import torch
from torch import Tensor

from shardrec.checkpoint.data_files import DTYPES, OpenFile, SavedFile, SavedRows, sync_folder
from shardrec.checkpoint.parts import Rect
from shardrec.errors import CheckpointError
from shardrec.files import naming, open_regular, parse_json, replacing

MANIFEST = "manifest.json"
_FORMAT, _LINKED_FORMAT = 2, 3
PARTIAL = MANIFEST + ".partial"
_DATA_FOLDER = re.compile(r"data-[0-9a-f]{16}")
_DIGEST = b',\n"sha256": '
_MAX_STEPS = 2**53
_PAIRS = "(pairs)"


Settings = Mapping[str, object]
"""Of an optimizer, by name: numbers, texts, None and lists of these."""


class ParamGroup(TypedDict):
    """A group of an ordinary optimizer: its settings, and its parameters by name."""

    settings: Settings
    parameters: list[str]


@dataclass(frozen=True, kw_only=True)
class SavedPart:
    """A rectangle of a tensor in a file.

    Args:
        rect: see :mod:`shardrec.checkpoint.parts`.
        file: its number.
        start: byte in the file.
        changes: to be read on top of it, one after the other.
    """

    rect: Rect
    file: int
    start: int
    changes: tuple[SavedRows, ...] = ()

    @property
    def files(self) -> set[int]:
        """Numbers of the files that it takes."""
        return {self.file, *(rows.file for rows in self.changes)}

    def moved(self, numbers: Mapping[int, int]) -> SavedPart:
        """The same with other numbers of files."""
        changes = tuple(rows._replace(file=numbers[rows.file]) for rows in self.changes)
        return replace(self, file=numbers[self.file], changes=changes)

    def read(
        self, file: Callable[[int], OpenFile], dtype: torch.dtype, into: Tensor, place: Rect, buffer: Tensor
    ) -> None:
        """Read the intersection with a matrix in memory.

        Args:
            file: opens a file by its number.
            dtype: of the saved values.
            into: a matrix of any dtype, on any device.
            place: which part of the tensor the matrix is.
            buffer: (n,) uint8 on the CPU, for values that cannot be read in place.
        """
        common = self.rect.common(place)
        if common is None:
            return
        into = into[common.rows_in(place), common.cols_in(place)]
        row_bytes = self.rect.cols * dtype.itemsize
        buffer = buffer if row_bytes <= len(buffer) else torch.empty(row_bytes, dtype=torch.uint8)
        file(self.file).read(self.start, self.rect, dtype, into, common, buffer)
        for rows in self.changes:
            for numbers, values in file(rows.file).rows(rows, self.rect, dtype, common, buffer):
                into[numbers.to(into.device)] = values.to(into.device, into.dtype)

    def extents(self, itemsize: int) -> tuple[list[tuple[int, int, int]], list[tuple[int, int, int]]]:
        """Where its values are, and the numbers of rows: file, first byte, and the end."""
        row_bytes = self.rect.cols * itemsize
        whole = (self.file, self.start, self.start + self.rect.numel * itemsize)
        return (
            [whole, *((rows.file, rows.start, rows.start + rows.length * row_bytes) for rows in self.changes)],
            [(rows.file, rows.numbers, rows.numbers + rows.length * 8) for rows in self.changes],
        )


@dataclass(frozen=True, kw_only=True)
class Read:
    """Values that are wanted of a saved part: its intersection with a matrix in memory, or some of its rows.

    Args:
        source: the saved part.
        dtype: of its values.
        place: the rectangle of the tensor that ``into`` is; of rows by number, only its columns count.
        into: a matrix of any dtype, on any device.
        rows: by number, (k,) int64 each: rows of the tensor, ascending, and the rows of ``into`` that they become.
        then: called when the values of this read and of all reads before it are there.
    """

    source: SavedPart
    dtype: torch.dtype
    place: Rect
    into: Tensor
    rows: tuple[Tensor, Tensor] | None = None
    then: Callable[[], None] | None = None


@dataclass(frozen=True, kw_only=True)
class SavedTensor:
    """A tensor of the checkpoint.

    Args:
        dtype: by its name in the safetensors format.
        shape: of the whole.
        parts: cover it exactly once.
    """

    dtype: str
    shape: tuple[int, ...]
    parts: tuple[SavedPart, ...]

    def to_json(self) -> dict[str, object]:
        """As JSON-compatible data. A part is ``[row_start, row_end, col_start, col_end, file, start, *changes]``."""
        parts = [[*part.rect, part.file, part.start, *map(list, part.changes)] for part in self.parts]
        return {"dtype": self.dtype, "shape": list(self.shape), "parts": parts}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> SavedTensor:
        """What :meth:`to_json` gave."""
        parts = []
        for part in value["parts"]:
            top, bottom, left, right, file, start = _integers(part[:6])
            changes = tuple(SavedRows(*_integers(rows)) for rows in part[6:])
            parts.append(SavedPart(rect=Rect(top, bottom, left, right), file=file, start=start, changes=changes))
        return cls(dtype=value["dtype"], shape=_integers(value["shape"]), parts=tuple(parts))

    def faults(self, name: str, files: Sequence[SavedFile]) -> Iterator[str]:
        """What is wrong with it, one sentence each."""
        if math.prod(max(size, 1) for size in self.shape) * DTYPES[self.dtype].itemsize >= 2**63:
            yield f"{name}: a tensor cannot have shape {self.shape}"
            return
        whole, itemsize = Rect.whole(self.shape), DTYPES[self.dtype].itemsize
        for part in self.parts:
            rect = part.rect
            if rect.common(whole) != rect:
                yield f"{name}: {rect} is not a part of shape {self.shape}"
            if any(not 0 < rows.length <= rect.row_end - rect.row_start for rows in part.changes):
                yield f"{name}: of {rect}, as many rows as that cannot have changed"
            for file, start, end in chain(*part.extents(itemsize)):
                if not (0 <= file < len(files) and files[file].header <= start <= end <= files[file].size):
                    yield f"{name}: bytes {start} to {end} of file {file} are outside of it"
        yield from self.uncovered(name)

    def uncovered(self, name: str) -> Iterator[str]:
        """What of it is in no part, or in two, one sentence each."""
        whole = Rect.whole(self.shape)
        # Layouts are column stripes, each cut into row blocks. The parts are cut in the same way.
        stripes: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for part in self.parts if whole.numel else ():
            stripes.setdefault(part.rect[2:], []).append(part.rect[:2])
        uncovered = _uncovered(stripes, whole.col_end if whole.numel else 0)
        if uncovered:
            yield f"{name}: columns {uncovered}"
        for (left, right), blocks in stripes.items():
            uncovered = _uncovered(blocks, whole.row_end)
            if uncovered:
                yield f"{name}: in columns {left}:{right}, rows {uncovered}"


def _uncovered(ranges: Iterable[tuple[int, int]], size: int) -> str:
    """A text with the first position where ranges do not cover ``[0, size)`` exactly once; empty if they do."""
    end = 0
    for start, stop in (*sorted(ranges), (size, size)):
        if start != end:
            return f"{end}:{start} are missing" if end < start else f"{start}:{end} are there twice"
        end = stop
    return ""


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The contents of a checkpoint.

    Args:
        data: the data folder's name.
        files: one per rank that saved, in order.
        linked: of an incremental checkpoint, files of earlier ones, which are in this data folder as hard links.
            Their numbers follow the numbers of ``files``.
        tensors: by name.
        numbers: states of an ordinary optimizer that are Python numbers, by name.
        plan: that the model had, as JSON.
        step_counts: per table the updates that its fused optimizer has made.
        fused_settings: per table, its fused optimizer's settings.
        param_groups: settings and parameter names of an ordinary optimizer's groups. None without one.
        extra: the caller's.
    """

    data: str
    files: tuple[SavedFile, ...] = ()
    linked: tuple[SavedFile, ...] = ()
    tensors: Mapping[str, SavedTensor] = field(default_factory=dict)
    numbers: Mapping[str, float]
    plan: Mapping[str, Any] = field(default_factory=dict)
    step_counts: Mapping[str, int]
    fused_settings: Mapping[str, Settings] = field(default_factory=dict)
    param_groups: Sequence[ParamGroup] | None
    extra: Mapping[str, Any]

    def contents(self) -> dict[int, dict[int, tuple[str, int]]]:
        """By file, what starts at which byte: the dtype by its name, and the byte after the last."""
        contents: dict[int, dict[int, tuple[str, int]]] = {}
        for tensor in self.tensors.values():
            for part in tensor.parts:
                of_values, of_numbers = part.extents(DTYPES[tensor.dtype].itemsize)
                for dtype, extents in ((tensor.dtype, of_values), ("I64", of_numbers)):
                    for file, start, end in extents:
                        contents.setdefault(file, {})[start] = dtype, end
        return contents

    @property
    def all_files(self) -> tuple[SavedFile, ...]:
        """Those in the data folder, by number."""
        return self.files + self.linked

    def faults(self) -> Iterator[str]:
        """What is wrong with it, one sentence each: parts that are missing, twice there, or not where they can be."""
        for file in self.all_files:
            if len(file.checksums) != file.blocks:
                yield f"{file.name}: {len(file.checksums)} checksums for {file.size} bytes"
        extents = []
        # Tensors with the same rows share the numbers of those that have changed.
        numbers: set[tuple[int, int, int]] = set()
        for name, tensor in self.tensors.items():
            yield from tensor.faults(name, self.all_files)
            for part in tensor.parts:
                of_values, of_numbers = part.extents(DTYPES[tensor.dtype].itemsize)
                extents += of_values
                numbers.update(of_numbers)
        for before, after in pairwise(sorted(chain(extents, numbers))):
            if before[0] == after[0] and after[1] < before[2]:
                yield f"two tensors share bytes {after[1]} to {before[2]} of file {before[0]}"

    def to_bytes(self) -> bytes:
        """As JSON, with a checksum of itself at the end."""
        values = {name: getattr(self, name) for name in self.__dataclass_fields__}
        values["files"], values["linked"] = ([asdict(file) for file in files] for files in (self.files, self.linked))
        if not self.linked:
            del values["linked"]
        values["tensors"] = {name: tensor.to_json() for name, tensor in self.tensors.items()}
        values["extra"] = with_pairs(self.extra)
        text = json.dumps({"format": _LINKED_FORMAT if self.linked else _FORMAT, **values}).encode()
        body = text.removesuffix(b"}")
        return body + _DIGEST + b'"%s"}\n' % hashlib.sha256(body).hexdigest().encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Manifest:
        """What :meth:`to_bytes` gave.

        Raises:
            ValueError: saying what is wrong with it.
        """
        body, separator, digest = data.rpartition(_DIGEST)
        if not separator:
            raise ValueError("it is not a manifest of a checkpoint")
        if digest != b'"%s"}\n' % hashlib.sha256(body).hexdigest().encode():
            raise ValueError("its checksum does not match its text")
        values = parse_json(body + b"}", object_hook=from_pairs)
        version = values.pop("format", None)
        if version not in (_FORMAT, _LINKED_FORMAT):
            raise ValueError(f"it has format {version!r}, and this release reads {_FORMAT} and {_LINKED_FORMAT}")
        for key in ("tensors", "numbers", "plan", "step_counts", "fused_settings", "extra"):
            _check(key, values[key], dict)
        for name, count in values["step_counts"].items():
            if type(count) is not int or not 0 <= count < _MAX_STEPS:
                raise ValueError(f"its step count of {name!r} is {count!r}")
        for name, number in values["numbers"].items():
            _check(name, number, int | float)
        for table, settings in values["fused_settings"].items():
            _check(f"fused settings of {table}", settings, dict)
        for group in values["param_groups"] or ():
            _check("settings", group["settings"], dict)
            for name in group["parameters"]:
                _check("parameters", name, str)
        values["linked"] = values["linked"] if version == _LINKED_FORMAT else []
        for key in ("files", "linked"):
            values[key] = tuple(
                SavedFile(**{**file, "checksums": _integers(file["checksums"])}) for file in values[key]
            )
            _integers([number for file in values[key] for number in (file.size, file.header)])
        values["tensors"] = {name: SavedTensor.from_json(value) for name, value in values["tensors"].items()}
        manifest = cls(**values)
        names = [manifest.data, *(file.name for file in manifest.all_files)]
        if not _DATA_FOLDER.fullmatch(names[0]) or any(Path(name).name != name for name in names):
            raise ValueError("it names files outside of the checkpoint")
        faults = list(islice(manifest.faults(), 3))
        if faults:
            raise ValueError("; ".join(faults))
        return manifest


def with_pairs(value: object) -> object:
    """A value for JSON, which only has texts as keys: a dict with other keys becomes a dict with a list of pairs as its
    only entry."""
    if isinstance(value, dict):
        pairs = [[key, with_pairs(item)] for key, item in value.items()]
        return (
            dict(pairs) if all(isinstance(key, str) for key in value) and value.keys() != {_PAIRS} else {_PAIRS: pairs}
        )
    return [with_pairs(item) for item in value] if isinstance(value, (list, tuple)) else value


def from_pairs(value: dict[str, Any]) -> dict[Any, Any]:
    """The dict that :func:`with_pairs` was given."""
    return dict(value[_PAIRS]) if value.keys() == {_PAIRS} else value


def _check(name: str, value: object, kind: type | UnionType) -> None:
    if not isinstance(value, kind):
        raise ValueError(f"its {name!r} is a {type(value).__name__}")


def _integers(values: Sequence[object]) -> tuple[int, ...]:
    """The values. Each must be a whole number. JSON's 1.0 and true would pass for whole numbers until they are used."""
    integers = tuple(value for value in values if type(value) is int)
    if len(integers) < len(values):
        raise ValueError(f"{next(value for value in values if type(value) is not int)!r} is not a whole number")
    return integers


def read_manifest(folder: Path, name: str = MANIFEST) -> Manifest:
    """The manifest of a checkpoint, verified. With another ``name``, the manifest of a published version.

    Raises:
        CheckpointError: if it is missing or damaged.
    """
    path = folder / name
    try:
        with open(open_regular(path), "rb") as file:
            data = file.read()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CheckpointError(
            f"{folder} is not a complete checkpoint: it lacks {name}. Give a folder that save_checkpoint wrote "
            "to its end"
        ) from error
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read: {error.strerror}. Load an older checkpoint, or restore this one from a copy"
        ) from error
    try:
        return Manifest.from_bytes(data)
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        kind = "" if type(error) is ValueError else f"{type(error).__name__}: "
        raise CheckpointError(
            f"{path} is damaged ({kind}{error}). Load an older checkpoint, or restore this one from a copy"
        ) from error


def write_manifest(folder: Path, manifest: Manifest, name: str = MANIFEST) -> None:
    """Atomically make ``folder`` the checkpoint that ``manifest`` describes, and wait until it is on disk."""
    with replacing(folder / name, PARTIAL, sync=True) as partial, naming(partial):
        partial.write_bytes(manifest.to_bytes())
    sync_folder(folder)


def leftovers(folder: Path, data: str) -> list[Path]:
    """The data folders in a checkpoint besides ``data``: of interrupted saves, and of the replaced save."""
    return [path for path in folder.iterdir() if _DATA_FOLDER.fullmatch(path.name) and path.name != data]

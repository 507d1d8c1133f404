"""Warm start: a changed model takes the parts that it shares with a checkpoint, and reports them.

Tensors are matched by their state_dict keys, after renaming. The result is a manifest in the model's own names, with
the tensors that are wanted and no others. It is loaded as any other (:mod:`shardrec.checkpoint.load`): the intersection
of saved and held rectangles is read, so that a table of another size needs no code of its own.
"""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from zlib_ng.zlib_ng import crc32

from shardrec.checkpoint.data_files import DTYPES
from shardrec.checkpoint.ids import dynamic_tables
from shardrec.checkpoint.load import Source, load_source
from shardrec.checkpoint.manifest import Manifest, SavedPart, SavedTensor
from shardrec.checkpoint.parts import HeldTensor, Rect
from shardrec.checkpoint.rows import RowFile, open_rows
from shardrec.checkpoint.save import step_counts, wait_for_save
from shardrec.errors import ConfigError
from shardrec.ids.id_map import RESERVE
from shardrec.modules.in_backward import dense_in_backward
from shardrec.modules.inventory import row_states
from shardrec.modules.sharded_model import ShardedModel

if TYPE_CHECKING:
    import pyarrow as pa

Resize = Literal["grow", "truncate"]
Number = Callable[[str, "pa.Array"], tuple[NDArray[np.int64], NDArray[np.bool_]]]
Outcome = Literal["loaded", "resized", "new", "left out"]

_TABLE = re.compile(r"((?:.*\.)?)(?:embedding_bags|embeddings)\.([^.]+)")
_MODEL = "model."


@dataclass(frozen=True, kw_only=True)
class WarmTensor:
    """What became of a table or of a tensor of the dense part.

    Args:
        name: its state_dict key in the model; of one that is left out, in the checkpoint.
        outcome: "loaded"; "resized", a table with only its common rows and columns loaded; "new", which keeps the
            values that it had; "left out", which only the checkpoint has.
        source: its key in the checkpoint; "" if it is new.
        saved_shape: its shape in the checkpoint, if it is there.
        shape: its shape in the model, if it is there.
        note: of rows from a file, how many were loaded, and which not.
    """

    name: str
    outcome: Outcome
    source: str = ""
    saved_shape: tuple[int, ...] | None = None
    shape: tuple[int, ...] | None = None
    note: str = ""

    def __str__(self) -> str:
        sizes = [str(size) for size in dict.fromkeys((self.saved_shape, self.shape)) if size is not None]
        renamed = f" from {self.source}" if self.source not in ("", self.name) else ""
        return f"{self.outcome:<8}  {self.name} {' -> '.join(sizes)}{renamed}{self.note}"


@dataclass(frozen=True, kw_only=True)
class WarmStart:
    """The result of :func:`warm_start`; as a text, a table of it.

    Args:
        tensors: of the model, in its order, and then what only the checkpoint has.
    """

    tensors: tuple[WarmTensor, ...]

    def names(self, *outcomes: Outcome) -> list[str]:
        """The state_dict keys with one of these outcomes."""
        return [tensor.name for tensor in self.tensors if tensor.outcome in outcomes]

    def __str__(self) -> str:
        counts = Counter(tensor.outcome for tensor in self.tensors)
        return "\n".join([*map(str, self.tensors), ", ".join(f"{count} {name}" for name, count in counts.items())])


def warm_start(
    path: str | Path | None,
    model: ShardedModel,
    *,
    rows: Mapping[str, str | Path] | None = None,
    rename: Mapping[str, str] | None = None,
    only: Collection[str] | None = None,
    resize: Resize | Collection[Resize] = (),
    optimizer: bool = False,
    strict: bool = False,
    accept: Callable[[Mapping[str, str]], None] | None = None,
    number: Number | None = None,
) -> WarmStart:
    """Give a model the weights that it shares with a checkpoint of another model. Every rank calls it.

    The model may have tables and layers that the checkpoint lacks, and lack others. Its plan, its number of ranks and
    the floating-point types may differ. What is not loaded keeps its values. A tensor of the dense part is loaded if
    its shape is the saved one. Dynamic ids are loaded with their tables. As with :func:`shardrec.load_checkpoint`,
    everything is verified on all ranks before the model changes.

    Args:
        path: the checkpoint's folder. None with ``rows`` alone.
        model: from :func:`shardrec.shard`.
        rows: tables, named as in ``rename``, and files of rows that they get instead of the checkpoint's: Parquet
            (``.parquet``) with the ids in its first column, and after it a column of lists, or one for each value.
            ``.npz`` with arrays ``ids`` (n,) and ``rows`` (n, columns). ``.npy`` (n, columns), where the id of a
            row is its number. An id is a row's number; of a table with dynamic ids, which then has these and no
            others, an int64. Ids that are null or not in the table are counted. States of optimizers begin again, and
            rows that are not in the file keep their values.
        rename: names in the checkpoint, and those that they have in the model. A name is a state_dict key, the path of
            a module, or a table's name.
        only: names of the model, as in ``rename``: what is loaded. Default: all.
        resize: which differences in the size of tables are accepted. "grow": the model's table has more rows or
            columns, and the further columns keep their values; "truncate": it has fewer, and the saved ones beyond
            are left out. Both can be given. A table with dynamic ids may always have another number of rows, to which
            its ids move. Its columns must be the saved ones.
        optimizer: whether states of fused optimizers, and averages of rows, are loaded with their tables, with their
            step counts; not the states of an optimizer of another kind. States that a loaded table is not given begin
            again, for all its rows. Learning rates stay. Tables that a rank updates together share the largest count.
        strict: whether it is an error that a tensor is new or left out.
        accept: is called on every rank, before anything is loaded, with the names in the checkpoint's plan of the
            tables that will be, by those in the model's. Raises a ConfigError if they are not the same tables.
        number: gives the ids of ``rows`` their meaning: of a table's name in the model's plan and its file's ids, a
            ``pyarrow.Array`` (n,), the row, or the dynamic id, per value, (n,) int64, and whether it lacks one, (n,)
            bool.

    Returns:
        What was loaded, resized, new and left out. It is equal on all ranks.

    Raises:
        CheckpointError: on every rank, naming the file, if the checkpoint is damaged or incomplete.
        ConfigError: on every rank, for names that neither has or that name several, for differences that are not
            accepted, and for rows of another width, with an id twice, or with values that are not finite numbers.
        PeerError: if another rank is gone or did not answer in time.
    """
    wait_for_save(model)
    if model.servers:
        raise ConfigError("a model with embedding servers cannot start warm: load the checkpoint that it fits, whole")
    sizes = (resize,) if isinstance(resize, str) else tuple(resize)
    if not set(sizes) <= {"grow", "truncate"}:
        raise ConfigError(f"resize={resize!r}. Give 'grow', 'truncate' or both in a list")
    if path is None and not rows:
        raise ConfigError("there is nothing to start from: give path, a checkpoint, or rows, files of rows")
    reports: list[WarmStart] = []
    anew = set[tuple[str, str, str]]()  # table, kind and name of states that are not loaded with it

    def select(manifest: Manifest, held: dict[str, HeldTensor]) -> tuple[Manifest, dict[str, HeldTensor]]:
        wanted = _weights(held)
        row_paths = {
            key: str(file) for name, file in (rows or {}).items() for key in _keys(name, wanted, "rows", "the model")
        }
        sources, report = match(
            manifest, held, rename=rename or {}, only=only, resize=sizes, optimizer=optimizer, filled=row_paths
        )
        tensors, of_files = {name: manifest.tensors[source] for name, source in sources.items()}, {}
        for key, file in row_paths.items():
            in_file, of_files[key] = _in_file(key, file, model, held[_MODEL + key], source_of_all, stack, number)
            tensors |= in_file
        report = WarmStart(
            tensors=tuple(of_files.get(each.name, each) if each.outcome == "new" else each for each in report.tensors)
        )
        surprises = report.names("new", "left out")
        if strict and surprises:
            raise ConfigError(
                f"{path} and the model differ in {_listed(surprises)}, with strict=True; rename= maps names of the "
                "checkpoint to the model's"
            )
        if accept is not None:
            paths = ((name.removeprefix(_MODEL), source.removeprefix(_MODEL)) for name, source in sources.items())
            names = [[_table_names(path.removesuffix(".weight")) for path in pair] for pair in paths]
            accept({new[0]: old[0] for new, old in names if new and old})
        reports.append(report)
        beside = _beside(held)
        for path_of_table in (key.removesuffix(".weight") for key in _weights(tensors)):
            for name in beside.get(path_of_table, ()):
                if name not in tensors and not name.startswith("ids."):
                    anew.add((_table_names(path_of_table)[0], name.partition(".")[0], name.rpartition(".")[2]))
        counts = step_counts(model)
        selected = replace(
            manifest,
            tensors=tensors,
            step_counts=counts | {table: 0 for table, _, _ in anew} | _step_counts(manifest, sources, counts),
            fused_settings={},
            param_groups=None,
            numbers={},
        )
        return selected, {name: held[name] for name in tensors}

    with ExitStack() as stack:
        empty = None
        if path is None:
            empty = Manifest(data="", numbers={}, step_counts={}, param_groups=None, extra={})
        source_of_all = Source(Path(path or ""), model.ranks, stack, select, empty)
        load_source(source_of_all, model, None)
    for state in (state for collection in model.sharded_collections for state in row_states(collection, to_write=True)):
        for values in state.tensors.values():
            if (state.table.layout.name, state.kind.value, state.name) in anew:
                values.fill_(state.first)
    loaded = reports[0].names("loaded", "resized")
    for owner, in_backward in dense_in_backward(model).items():
        if owner.partition("#")[0] in loaded:
            in_backward.state.clear()
    return reports[0]


def match(
    manifest: Manifest,
    held: Mapping[str, HeldTensor],
    *,
    rename: Mapping[str, str],
    only: Collection[str] | None,
    resize: Collection[Resize],
    optimizer: bool,
    filled: Collection[str] = (),
) -> tuple[dict[str, str], WarmStart]:
    """Match a model's tensors with a checkpoint's. Arguments as for :func:`warm_start`.

    Args:
        manifest: of the checkpoint.
        held: the model's tensors, by name.
        filled: tables of the model that get rows of files, and none of the checkpoint.

    Returns:
        The name in the checkpoint per tensor to load, by the model's name, and the report.

    Raises:
        ConfigError: as :func:`warm_start`.
    """
    saved, wanted = _weights(manifest.tensors), _weights(held)
    renamed = _renamed(rename, saved, wanted)
    moved_away = set(renamed.values())
    source_of = {name: name for name in wanted if name in saved and name not in moved_away} | renamed
    chosen = wanted if only is None else {key for name in only for key in _keys(name, wanted, "only", "the model")}
    beside = _beside(held)
    sources: dict[str, str] = {}
    tensors, faults = [], []
    for name in wanted:
        tensor, source = held[_MODEL + name], source_of.get(name, "")
        if not source or name not in chosen or name in filled:
            tensors.append(WarmTensor(name=name, outcome="new", shape=tensor.shape))
            continue
        saved_tensor = manifest.tensors[_MODEL + source]
        outcome = _outcome(saved_tensor, tensor)
        if outcome != "new":
            near = beside.get(name.removesuffix(".weight"), ()) if tensor.rows_of else ()
            loaded = _with_rows(name, source, near, held, manifest.tensors, optimizer=optimizer)
            faults += _faults(name, source, held, manifest.tensors, resize)
            sources |= loaded
        elif name in renamed:
            faults.append(
                f"rename: {source} has shape {saved_tensor.shape} and {name} {tensor.shape}. Only tables may "
                "differ in. Leave it out with only="
            )
        tensors.append(
            WarmTensor(name=name, outcome=outcome, source=source, saved_shape=saved_tensor.shape, shape=tensor.shape)
        )
    if faults:
        raise ConfigError("; ".join(faults[:5]))
    used = {tensor.source for tensor in tensors}
    tensors += [
        WarmTensor(name=name, outcome="left out", source=name, saved_shape=manifest.tensors[_MODEL + name].shape)
        for name in saved
        if name not in used
    ]
    if not sources and not filled:
        raise ConfigError(
            f"the checkpoint has nothing under a name of the model's: it has {_listed(saved)}, and the model "
            f"{_listed(wanted)}; rename= maps the former to the latter"
        )
    return sources, WarmStart(tensors=tuple(tensors))


def _in_file(
    key: str,
    path: str,
    model: ShardedModel,
    tensor: HeldTensor,
    source: Source,
    stack: ExitStack,
    number: Number | None,
) -> tuple[dict[str, SavedTensor], WarmTensor]:
    """A table's rows in a file, as tensors of a checkpoint by the model's names, and their outcomes."""
    (file, ids), table = open_rows(path, stack), key.removesuffix(".weight")
    count, width = file.shape
    if not tensor.rows_of or tensor.shape[1] != width:
        raise ConfigError(
            f"rows: {path} has rows of {width} values, and {key} of the model shape {tensor.shape}: give a table, and "
            "rows of its width"
        )
    numbers, bad = (number or _as_they_are)(_table_names(table)[0], ids)
    dynamic = next((each for each in dynamic_tables(model) if each.path == table), None)
    fits = ~bad if dynamic else ~bad & (numbers >= 0) & (numbers < tensor.shape[0])
    first = np.flatnonzero(fits)[np.unique(numbers[fits], return_index=True)[1]]
    if not len(first):
        raise ConfigError(f"rows: no id of {path} is in {key} of the model: give the file of this table")
    loads = np.isin(np.arange(count), first)
    numbers = np.where(loads, numbers, -1)
    file.checksum = f"{crc32(numbers.tobytes()):08x}"

    def saved(dtype: str, shape: tuple[int, ...], values: RowFile) -> SavedTensor:
        source.row_files[place := -1 - len(source.row_files)] = values
        return SavedTensor(dtype=dtype, shape=shape, parts=(SavedPart(rect=Rect.whole(shape), file=place, start=0),))

    if dynamic:
        uses = np.where(loads, 1, RESERVE)  # of a row that no id has
        records = np.column_stack([numbers, uses, np.full(count, dynamic.maps.step)])
        id_file = RowFile(path, (count, 3), lambda: iter([records]))
        tensors = {_MODEL + key: saved("F32", (count, width), file)}
        tensors[f"ids.{table}.records"] = saved("I64", (count, 3), id_file)
    else:
        file.targets = torch.from_numpy(numbers)
        tensors = {_MODEL + key: saved("F32", tensor.shape, file)}
    note = f": {len(first):,} rows"
    for ids_without, words in ((count - fits.sum(), "are not in the table"), (fits.sum() - len(first), "share a row")):
        note += f", {ids_without:,} ids {words}" if ids_without else ""
    report = WarmTensor(name=key, outcome="loaded", source=path, saved_shape=file.shape, shape=tensor.shape, note=note)
    return tensors, report


def _as_they_are(table: str, ids: pa.Array) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Ids that are whole numbers."""
    import pyarrow as pa

    if not pa.types.is_integer(ids.type):
        raise ConfigError(f"rows: the ids of table {table!r} are of type {ids.type}: give whole numbers")
    numbers = ids.fill_null(0).cast(pa.int64(), safe=False).to_numpy()
    too_large = pa.types.is_uint64(ids.type) & (numbers < 0)  # which would be another id
    return numbers, too_large | ids.is_null().to_numpy(zero_copy_only=False)


def _weights(names: Iterable[str]) -> dict[str, None]:
    """The state_dict keys of tables and of the dense part, in order."""
    return {name.removeprefix(_MODEL): None for name in names if name.startswith(_MODEL)}


def _renamed(rename: Mapping[str, str], saved: Collection[str], wanted: Collection[str]) -> dict[str, str]:
    """The saved key per key of the model in ``rename``."""
    sources: dict[str, str] = {}
    for old, new in rename.items():
        old_keys, new_keys = _keys(old, saved, "rename", "the checkpoint"), _keys(new, wanted, "rename", "the model")
        common = set(old_keys.values()) & set(new_keys.values())
        if not common:
            raise ConfigError(
                f"rename: {old!r} and {new!r} have no tensor in common: {_listed(old_keys)}, {_listed(new_keys)}"
            )
        rest_to_old = {rest: key for key, rest in old_keys.items()}
        for key, rest in new_keys.items():
            if rest not in common:
                continue
            if key in sources:
                raise ConfigError(f"rename: {key} of the model would be loaded twice. Name its source once")
            sources[key] = rest_to_old[rest]
    return sources


def _keys(name: str, keys: Collection[str], argument: str, owner: str) -> dict[str, str]:
    """The keys that a name stands for, each with what follows the name.

    Raises:
        ConfigError: if no key matches, or if several tables have the name.
    """
    below = {key: key[len(name) :] for key in keys if key == name or key.startswith(f"{name}.")}
    if below:
        return below
    tables = {key: ".weight" for key in keys if name in _table_names(key.removesuffix(".weight"))}
    if len(tables) > 1:
        raise ConfigError(
            f"{argument}: {name!r} is a table of {owner} {len(tables)} times: {_listed(tables)}. Give a key"
        )
    if not tables:
        names = {alias for key in keys for alias in (key, *_table_names(key.removesuffix(".weight")))}
        near = difflib.get_close_matches(name, names, n=3)
        raise ConfigError(f"{argument}: {owner} has no {name!r}. Near it are {_listed(near or sorted(keys))}")
    return tables


def _table_names(path: str) -> tuple[str, ...]:
    """The names of a table by its module's path: in its plan, and in its collection."""
    table = _TABLE.fullmatch(path)
    return (table[1] + table[2], table[2]) if table else ()


def _outcome(saved: SavedTensor, tensor: HeldTensor) -> Outcome:
    if saved.shape == tensor.shape:
        return "loaded"
    return "resized" if tensor.rows_of and len(saved.shape) == len(tensor.shape) else "new"


def _beside(held: Mapping[str, HeldTensor]) -> dict[str, list[str]]:
    """The tensors with the rows of tables but their weights, by the path of the table's module."""
    beside: dict[str, list[str]] = {}
    for name, tensor in held.items():
        if tensor.rows_of and not name.startswith(_MODEL):
            beside.setdefault(name.partition(".")[2].rpartition(".")[0], []).append(name)
    return beside


def _with_rows(
    name: str,
    source: str,
    beside: Collection[str],
    held: Mapping[str, HeldTensor],
    saved: Mapping[str, SavedTensor],
    *,
    optimizer: bool,
) -> dict[str, str]:
    """The saved name of a weight and of the tensors that go with its rows, by the model's names."""
    path, saved_path = (key.removesuffix(".weight") for key in (name, source))
    sources = {_MODEL + name: _MODEL + source}
    for other in beside:
        kind, _, rest = other.partition(".")
        other_source = f"{kind}.{saved_path}{rest.removeprefix(path)}"
        if other_source in saved and (kind == "ids" or optimizer):
            sources[other] = other_source
    # A state that one optimizer keeps for a row, and another for each weight under the same name, is not the same.
    if any(len(saved[sources[other]].shape) != len(held[other].shape) for other in sources):
        sources = {other: saved_name for other, saved_name in sources.items() if not other.startswith("fused.")}
    return sources


def _faults(
    name: str, source: str, held: Mapping[str, HeldTensor], saved: Mapping[str, SavedTensor], resize: Collection[Resize]
) -> list[str]:
    """The reason why a tensor cannot be loaded from another, if there is one."""
    tensor, saved_tensor = held[_MODEL + name], saved[_MODEL + source]
    types = DTYPES[saved_tensor.dtype], tensor.dtype
    if types[0] != types[1] and not all(dtype.is_floating_point for dtype in types):
        return [f"{name} is {types[1]}, and {types[0]} in the checkpoint. Leave it out with only="]
    is_dynamic, was_dynamic = (
        f"ids.{key.removesuffix('.weight')}.records" in tensors for key, tensors in ((name, held), (source, saved))
    )
    if is_dynamic != was_dynamic:
        where = "the model" if is_dynamic else "the checkpoint"
        return [f"{name} has dynamic ids in {where} only, so that its rows mean other ids. Leave it out with only="]
    sizes = list(zip(saved_tensor.shape, tensor.shape, strict=True))[is_dynamic:]
    refused: dict[str, bool] = {
        "grow": any(new > old for old, new in sizes) and ("grow" not in resize or is_dynamic),
        "truncate": any(new < old for old, new in sizes) and ("truncate" not in resize or is_dynamic),
    }
    needed = [way for way, lacks in refused.items() if lacks]
    if not needed:
        return []
    remedy = "leave it out with only=" if is_dynamic else f"give resize={needed if len(needed) > 1 else needed[0]!r}"
    return [f"{name} has shape {tensor.shape}, and {saved_tensor.shape} in the checkpoint; {remedy}"]


def _step_counts(manifest: Manifest, sources: Mapping[str, str], counts: Mapping[str, int]) -> dict[str, int]:
    """The saved step counts of tables that are loaded with their optimizers' states or averages, and of their ids."""
    selected = {}
    for name, source in sources.items():
        kind = name.partition(".")[0]
        if not name.startswith(_MODEL):
            paths = (key.partition(".")[2].rpartition(".")[0] for key in (name, source))
            table, saved_table = ("ids of " * (kind == "ids") + (*_table_names(path), path)[0] for path in paths)
            if table in counts and saved_table in manifest.step_counts:
                selected[table] = manifest.step_counts[saved_table]
    return selected


def _listed(names: Iterable[str]) -> str:
    names = list(names)
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")

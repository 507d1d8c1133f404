"""Save a sharded model, durably and atomically, in the foreground or in the background.

[Note: saving in the background] The step waits for a copy of the values that this rank writes, into memory that is kept
from save to save. On CUDA the copy passes through a pinned block: torch takes pinned memory in powers of two, so that
pinned copies of whole shards could take twice their size. A thread does the rest. The threads of the ranks agree over a
separate gloo group, so that their collectives do not match the training's.
"""

from __future__ import annotations

import secrets
import shutil
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import count, islice
from pathlib import Path
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from shardrec.checkpoint.changes import Kept, PartKey, SavedBefore
from shardrec.checkpoint.data_files import DTYPE_NAMES, SavedFile, SavedRows, sync_folder, write_file
from shardrec.checkpoint.fits import misfits
from shardrec.checkpoint.ids import Moves
from shardrec.checkpoint.manifest import (
    MANIFEST,
    Manifest,
    ParamGroup,
    SavedPart,
    SavedTensor,
    leftovers,
    read_manifest,
    write_manifest,
)
from shardrec.checkpoint.optimizer import fused_settings, optimizer_groups, optimizer_state
from shardrec.checkpoint.parts import HeldTensor, Part, Rect, held
from shardrec.checkpoint.state import model_tensors
from shardrec.errors import CheckpointError, ConfigError
from shardrec.exchange.agree import Ranks, gloo_ranks, on_all_ranks
from shardrec.exchange.subgroups import end_with
from shardrec.modules.inventory import Kind
from shardrec.modules.sharded_model import ShardedModel, require_sharded
from shardrec.replicas.replicated_model import ReplicatedModel

Written = tuple[SavedFile, dict[str, SavedTensor]]
"""A file of a checkpoint, and its contents by name."""

FILE_NAME = "rank-{:05}.safetensors"
_PINNED_BYTES = 32 * 2**20
REMEDY = "see that every rank can write there, that all ranks see the same files, and that there is space left"


class PendingSave:
    """A save that may still be in progress.

    Args:
        run: writes the checkpoint. None if it is done.
    """

    def __init__(self, run: Callable[[], None] | None = None) -> None:
        self._future: Future[None] | None = None
        if run is not None:
            thread = ThreadPoolExecutor(1, thread_name_prefix="shardrec save")
            self._future = thread.submit(run)
            thread.shutdown(wait=False)

    @property
    def done(self) -> bool:
        """Whether the save is done on this rank; :meth:`wait` raises its error."""
        return self._future is None or self._future.done()

    def wait(self) -> None:
        """Return when the checkpoint is complete and on the disk. Every rank calls it.

        Raises:
            CheckpointError: on every rank, if it could not be written. The previous checkpoint is unchanged.
            PeerError: if another rank is gone.
        """
        if self._future is not None:
            futures.wait([self._future])
            future, self._future = self._future, None
            future.result()


@dataclass(kw_only=True)
class _Background:
    """State kept for a model between saves: memory, the save in progress, the threads' group, and the saved values."""

    copies: dict[tuple[str, Rect], Tensor] = field(default_factory=dict)
    pending: PendingSave = field(default_factory=PendingSave)
    ranks: Ranks | None = None
    before: SavedBefore = field(default_factory=SavedBefore)


_BACKGROUND: WeakKeyDictionary[ShardedModel, _Background] = WeakKeyDictionary()


def wait_for_save(model: ShardedModel) -> None:
    """Wait for the model's save in progress, if there is one, and raise its error if it was not raised before.

    Raises:
        ConfigError: if the model is not sharded.
    """
    require_sharded(model, "a checkpoint")
    if model in _BACKGROUND:
        _BACKGROUND[model].pending.wait()


def save_checkpoint(
    path: str | Path,
    model: ShardedModel,
    optimizer: torch.optim.Optimizer | None = None,
    extra: Mapping[str, object] | None = None,
    *,
    rank_state: Mapping[str, Tensor] | None = None,
    wait: bool = True,
    incremental: int = 0,
) -> PendingSave:
    """Write the model, its fused optimizers and an ordinary optimizer. Every rank calls it.

    A checkpoint of that name is replaced atomically when the new one is complete and on disk. A failure or a kill at
    any time leaves the old or the new checkpoint. Files are in the safetensors format, with a JSON manifest.

    Replicas are synchronised first, so that training continues from the checkpoint as it does here. States that are not
    averaged (an ordinary optimizer's states of tables, and with ``sync_optimizer=False`` the fused optimizers') are
    saved from replica 0. Buffers, such as BatchNorm's statistics, are saved from rank 0.

    Args:
        path: folder to write, on a file system that all ranks share.
        model: from :func:`shardrec.shard`.
        optimizer: an ordinary optimizer over (some of) the model's parameters. Settings of its groups that JSON cannot
            represent are not written.
        extra: JSON-compatible data of the caller, such as the step. Rank 0's is written. Tuples are loaded as lists.
            Keys of dicts may be numbers.
        rank_state: tensors of this rank, such as states of random number generators, by name.
        wait: whether to return after the checkpoint is complete. If False, return when its values are copied, which
            takes additional CPU memory of the size of this rank's shards, kept for the next save. A thread then writes
            them.
        incremental: how many consecutive saves may write, for each shard, only the rows that have changed since this
            model's previous save. 0 for none. A shard is written completely if more than half of it would be written.
            The files with the other rows are hard-linked into this checkpoint, so that it needs no other folder. Takes
            16 bytes per row on the CPU. Rows of embedding servers are always written.

    Returns:
        The save, to wait for.

    Raises:
        ConfigError: on every rank, before anything is written, for values that a checkpoint cannot hold.
        CheckpointError: on every rank, if one of them cannot write. With ``wait=False``, :meth:`PendingSave.wait`
            raises it, or else the next save or load of this model.
        InputError: on one rank with tables on a GPU, for a faulty batch that no backward has reported.
        PeerError: if another rank is gone or did not answer in time.
    """
    return save(Path(path), model, optimizer, extra, rank_state=rank_state, wait=wait, incremental=incremental)


@torch.inference_mode(False)  # an inference tensor could not be written later
def save(
    folder: Path,
    model: ShardedModel,
    optimizer: torch.optim.Optimizer | None,
    extra: Mapping[str, object] | None,
    *,
    rank_state: Mapping[str, Tensor] | None,
    wait: bool,
    incremental: int,
    then: Callable[[], None] | None = None,
) -> PendingSave:
    """:func:`save_checkpoint`, and then ``then`` on rank 0, before any rank knows that the save is complete."""
    check_incremental(incremental)
    wait_for_save(model)
    model.context.headers.flags.check()
    folder = folder.absolute()  # a thread may write it when the working directory is another one
    if isinstance(model, ReplicatedModel):
        # Then it does not matter which of the ranks that hold a shard writes it.
        model.sync_replicas()
    ranks = model.ranks
    manifest, tensors = _prepared(ranks, folder, model, optimizer, extra, rank_state, wait)
    data = folder / manifest.data
    elsewhere: list[Written] = model.save_servers(data, ranks.world_size) if model.servers else []
    background = _BACKGROUND.setdefault(model, _Background())
    before = background.before if incremental else None

    def write(ranks: Ranks, tensors: Mapping[str, HeldTensor]) -> None:
        try:
            written = on_all_ranks(
                lambda: write_rank(data, ranks.rank, tensors, before, incremental), ranks, "save", remedy=REMEDY
            )
        except Exception:
            shutil.rmtree(data, ignore_errors=True)
            raise

        def complete() -> None:
            if ranks.rank == 0:
                _complete(folder, manifest, [*written, *((server_part, []) for server_part in elsewhere)])
                if then is not None:
                    then()

        on_all_ranks(complete, ranks, "save", remedy=REMEDY)
        if before is not None:
            before.complete = True

    if wait:
        write(ranks, tensors)
        return PendingSave()
    if background.ranks is None:
        background.ranks = gloo_ranks(ranks, "save")
        end_with(background, background.ranks.group)
    copies = _copied(tensors, background)
    # The thread keeps the state alive, and with it the group, until it has written.
    background.pending = PendingSave(lambda: write(background.ranks or ranks, copies))
    return background.pending


def _prepared(
    ranks: Ranks,
    folder: Path,
    model: ShardedModel,
    optimizer: torch.optim.Optimizer | None,
    extra: Mapping[str, object] | None,
    rank_state: Mapping[str, Tensor] | None,
    wait: bool,
) -> tuple[Manifest, dict[str, HeldTensor]]:
    """Make the data folder: the manifest without files and tensors, and this rank's contents by name."""
    tensors: dict[str, HeldTensor] = {}
    made: list[Path] = []

    def prepare() -> tuple[Manifest, bool]:
        """The manifest as this rank knows it, and whether it waits."""
        states, numbers = optimizer_state(model, optimizer)
        in_model = model_tensors(model)
        tensors.update(in_model | states)
        tensors.update(
            {rank_name(ranks.rank, key): held(tensor, saved=True) for key, tensor in (rank_state or {}).items()}
        )
        manifest = Manifest(
            extra=dict(extra or {}),
            step_counts=step_counts(model),
            numbers=numbers,
            param_groups=optimizer_groups(model, optimizer),
            fused_settings=fused_settings(model),
            data="data-" + "0" * 16,
        )
        try:
            read = Manifest.from_bytes(manifest.to_bytes())
        except (RecursionError, TypeError, ValueError) as error:
            raise ConfigError(
                f"extra, or an optimizer's settings, cannot be written as JSON ({error}). Give numbers, texts, lists "
                "and dicts, and tensors as rank_state"
            ) from error
        read = replace(read, tensors=described_parts(tensors, ranks.rank, saved=False))
        if faults := misfits(read, in_model, Moves(model, read), model, optimizer):
            raise ConfigError(f"nothing was saved, for it could not be loaded: {'; '.join(faults[:5])}")
        if ranks.rank == 0:
            made.append(folder / _new_data_folder(folder))
        data = made[0].name if made else ""
        described = described_parts(tensors, ranks.rank, saved=True)
        return replace(manifest, data=data, extra=read.extra, tensors=described), wait

    try:
        manifests, waits = zip(*on_all_ranks(prepare, ranks, "save", remedy=REMEDY), strict=True)
        if len(set(waits)) > 1:
            raise ConfigError(f"wait is {', '.join(map(str, waits))} on the ranks. Give all of them the same")
        return of_all_ranks(list(manifests), model), tensors
    except Exception:
        for path in made:
            path.rmdir()
        raise


def described_parts(held: Mapping[str, HeldTensor], rank: int, *, saved: bool) -> dict[str, SavedTensor]:
    """What a rank holds, each part with the rank as its file and its number as the first byte.

    Args:
        held: its tensors.
        rank: that holds them.
        saved: leave out tensors that other ranks hold as well, and write.

    Raises:
        ConfigError: for a dtype that files do not have.
    """
    numbers, tensors = count(), dict[str, SavedTensor]()
    for name, tensor in held.items():
        if tensor.dtype not in DTYPE_NAMES:
            raise ConfigError(f"{name} is {tensor.dtype}, which a checkpoint cannot hold. Convert it before")
        parts = {
            part.rect: SavedPart(rect=part.rect, file=rank, start=number)
            for part, number in zip(tensor.parts, numbers, strict=False)
            if part.saved or not saved
        }
        tensors[name] = SavedTensor(dtype=DTYPE_NAMES[tensor.dtype], shape=tensor.shape, parts=tuple(parts.values()))
    return tensors


def of_all_ranks(prepared: list[Manifest], model: ShardedModel) -> Manifest:
    """One manifest, merged from the ranks' manifests of their contents.

    Raises:
        ConfigError: if some ranks alone have an optimizer, or the ranks do not hold all of a tensor.
    """
    without = [rank for rank, manifest in enumerate(prepared) if manifest.param_groups is None]
    if 0 < len(without) < len(prepared):
        raise ConfigError(f"it was not given the optimizer on ranks {without}, and was on the others. Give it on all")
    tensors = dict[str, SavedTensor]()
    for name, tensor in (item for manifest in prepared for item in manifest.tensors.items()):
        tensors[name] = merged(tensors.get(name, tensor), tensor, name)
    elsewhere = ("model.", "fused.") if model.servers else ()
    faults = [fault for name in tensors if not name.startswith(elsewhere) for fault in tensors[name].uncovered(name)]
    if faults:
        raise ConfigError(
            f"the ranks do not hold all of {'; '.join(faults[:3])}. Make a training step on every rank before"
        )
    return replace(
        prepared[0],  # its data folder and extra data count
        # Of several ranks that have a number, the first one's counts.
        numbers={name: value for manifest in reversed(prepared) for name, value in manifest.numbers.items()},
        plan=model.plan.to_json(),
        tensors=tensors,
        # The highest, for only the ranks that hold a shard count.
        step_counts={
            key: max(manifest.step_counts.get(key, 0) for manifest in prepared) for key in prepared[0].step_counts
        },
        param_groups=_merged_groups(prepared),
    )


def step_counts(model: ShardedModel) -> dict[str, int]:
    """The updates per table, and the steps of its ids, that this rank counts."""
    counts: dict[str, int] = next(item for item in model.inventory() if item.kind is Kind.COUNTS).get()
    return counts


def check_incremental(incremental: int) -> None:
    """Check the number of incremental saves.

    Raises:
        ConfigError: below 0.
    """
    if incremental < 0:
        raise ConfigError(f"incremental={incremental}. Give the saves in a row that may write changes alone, or 0")


def _merged_groups(prepared: list[Manifest]) -> list[ParamGroup] | None:
    """The groups of all ranks, merged: only the ranks that hold a table have its parameters."""
    if prepared[0].param_groups is None:
        return None
    groups_of_ranks = zip(*(manifest.param_groups or () for manifest in prepared), strict=True)
    return [
        ParamGroup(
            settings=groups[0]["settings"],
            parameters=sorted({name for group in groups for name in group["parameters"]}),
        )
        for groups in groups_of_ranks
    ]


def _copied(tensors: Mapping[str, HeldTensor], background: _Background) -> dict[str, HeldTensor]:
    """The values that this rank writes, copied to the CPU. See [Note: saving in the background]."""
    old, background.copies = background.copies, {}
    on_cuda = any(part.values.is_cuda for tensor in tensors.values() for part in tensor.parts)
    block = torch.empty(_PINNED_BYTES if on_cuda else 0, dtype=torch.uint8, pin_memory=on_cuda)

    def copy(name: str, part: Part) -> Part:
        key, values = (name, part.rect), part.values
        room = old.get(key)
        if room is None or room.shape != values.shape or room.dtype != values.dtype:
            room = torch.empty(values.shape, dtype=values.dtype)
        background.copies[key] = room
        if not values.is_cuda:
            room.copy_(values)
            return replace(part, values=room)
        bytes_of = [tensor.detach().contiguous().view(-1).view(torch.uint8) for tensor in (room, values)]
        for target, source in zip(*(view.split(_PINNED_BYTES) for view in bytes_of), strict=True):
            target.copy_(block[: source.numel()].copy_(source))
        return replace(part, values=room)

    return {
        name: replace(tensor, parts=tuple(copy(name, part) for part in tensor.parts if part.saved))
        for name, tensor in tensors.items()
    }


def write_rank(
    data: Path,
    number: int,
    tensors: Mapping[str, HeldTensor],
    before: SavedBefore | None,
    incremental: int,
    changed: Mapping[PartKey, Tensor | None] | None = None,
    *,
    file_name: str = FILE_NAME,
) -> tuple[Written, list[SavedFile]]:
    """Write this rank's file; also returns the earlier files that it needs. See :meth:`SavedBefore.kept`."""
    if before is None:
        return write_part(data, number, tensors, file_name=file_name), []
    kept = before.kept(tensors, data, number, incremental, changed)
    linked = [file for file, _ in before.files]
    file, index = write_part(data, number, tensors, kept, len(linked), file_name=file_name)
    before.wrote(file, data, {(name, part.rect): part for name, tensor in index.items() for part in tensor.parts})
    return (file, index), linked


def joined(folder: Path | None, manifest: Manifest, written: Sequence[tuple[Written, list[SavedFile]]]) -> Manifest:
    """The manifest with the files that the ranks have written, and their earlier files.

    Args:
        folder: that has the data folder, for a look at the files' sizes. None if this rank cannot see it.
        manifest: without files and tensors.
        written: by each rank.

    Raises:
        CheckpointError: if a file is not there whole, or the ranks do not hold all of a tensor.
    """
    tensors: dict[str, SavedTensor] = {}
    linked: list[SavedFile] = []
    for number, ((file, index), links) in enumerate(written):
        path = None if folder is None else folder / manifest.data / file.name
        if path is not None and path.stat().st_size != file.size:
            raise CheckpointError(f"{path} has {path.stat().st_size:,} bytes, and {file.size:,} were written")
        numbers = {place: len(written) + len(linked) + place for place in range(len(links))} | {len(links): number}
        linked += links
        for name, tensor in index.items():
            moved = replace(tensor, parts=tuple(part.moved(numbers) for part in tensor.parts))
            tensors[name] = merged(tensors.get(name, moved), moved, name)
    files = tuple(file for (file, _), _ in written)
    manifest = replace(manifest, files=files, linked=tuple(linked), tensors=tensors)
    faults = list(islice(manifest.faults(), 3))
    if faults:
        raise CheckpointError(
            f"{folder or 'it'} was not written, for the ranks do not hold all of {'; '.join(faults)}. Make a "
            "training step on every rank before the first save"
        )
    return manifest


def _complete(folder: Path, manifest: Manifest, written: list[tuple[Written, list[SavedFile]]]) -> None:
    """Make the folder a checkpoint of the files that the ranks have written."""
    write_manifest(folder, joined(folder, manifest, written))
    for path in leftovers(folder, manifest.data):
        remove(path)


def write_part(
    data: Path,
    number: int,
    tensors: Mapping[str, HeldTensor],
    kept: Kept | None = None,
    linked: int = 0,
    *,
    file_name: str = FILE_NAME,
) -> Written:
    """Write one file of a checkpoint.

    Args:
        data: the checkpoint's data folder.
        number: of the file.
        tensors: by name. Their parts that are to be saved are written.
        kept: what is there already of parts that are not to be written whole, and the rows of them to write.
        linked: how many files that is in.
        file_name: with a place for its number.

    Returns:
        The file, and its contents by name. Parts count the linked files from 0 on, and this one after them.
    """
    data.mkdir(exist_ok=True)
    kept = kept or {}
    parts = [(name, tensor, part) for name, tensor in tensors.items() for part in tensor.parts if part.saved]
    rows_of = [kept[name, part.rect][1] if (name, part.rect) in kept else None for name, _, part in parts]
    numbers = {id(rows): rows for rows in rows_of if rows is not None and len(rows)}
    values = [
        (_part_name(name, tensor, part), part, rows)
        for (name, tensor, part), rows in zip(parts, rows_of, strict=True)
        if rows is None or len(rows)
    ]
    of_numbers = [
        (f"changed rows {place}", Part(rect=Rect.whole(rows.shape), values=rows, saved=True), None)
        for place, rows in enumerate(numbers.values())
    ]
    file, starts = write_file(data / file_name.format(number), [*values, *of_numbers])
    numbers_at = dict(zip(numbers, starts[len(values) :], strict=True))
    saved: dict[str, list[SavedPart]] = {name: [] for name in tensors}
    start = iter(starts)
    for (name, _, part), rows in zip(parts, rows_of, strict=True):
        if rows is None:
            saved_part = SavedPart(rect=part.rect, file=linked, start=next(start))
        else:
            saved_part = kept[name, part.rect][0]
            if len(rows):
                fresh = SavedRows(file=linked, start=next(start), numbers=numbers_at[id(rows)], length=len(rows))
                saved_part = replace(saved_part, changes=(*saved_part.changes, fresh))
        saved[name].append(saved_part)
    return file, {
        name: SavedTensor(dtype=DTYPE_NAMES[tensor.dtype], shape=tensor.shape, parts=tuple(saved[name]))
        for name, tensor in tensors.items()
    }


def merged(tensor: SavedTensor, other: SavedTensor, name: str) -> SavedTensor:
    """Both ranks' parts; of a part that several ranks have written, the first rank's."""
    if (tensor.dtype, tensor.shape) != (other.dtype, other.shape):
        raise CheckpointError(
            f"{name} is {tensor.dtype} of shape {tensor.shape} on one rank and {other.dtype} of shape {other.shape} on "
            "another. Build the same model and optimizer on every rank"
        )
    known = {part.rect for part in tensor.parts}
    return replace(tensor, parts=tensor.parts + tuple(part for part in other.parts if part.rect not in known))


def _part_name(name: str, tensor: HeldTensor, part: Part) -> str:
    rect = part.rect
    whole = rect == Rect.whole(tensor.shape)
    return name if whole else f"{name}[{rect.row_start}:{rect.row_end}, {rect.col_start}:{rect.col_end}]"


def rank_name(rank: int, name: str) -> str:
    """The name in a checkpoint of a rank's own tensor."""
    return f"rank{rank}.{name}"


def _new_data_folder(folder: Path) -> str:
    """Make the checkpoint's folder, remove files of interrupted saves, and make a new data folder in it."""
    _make(folder)
    try:
        stale = leftovers(folder, read_manifest(folder).data)
    except CheckpointError:
        # A damaged checkpoint may still be of use until there is a new one.
        stale = [] if (folder / MANIFEST).exists() else leftovers(folder, "")
    for path in stale:
        remove(path)
    name = f"data-{secrets.token_hex(8)}"
    (folder / name).mkdir()
    sync_folder(folder)
    return name


def _make(folder: Path) -> None:
    """Make a folder and those that it is in, on the disk."""
    if not folder.is_dir():
        _make(folder.absolute().parent)
        folder.mkdir(exist_ok=True)
        sync_folder(folder.absolute().parent)


def remove(folder: Path) -> None:
    """Remove a checkpoint, or a part of one. A kill on the way leaves nothing that looks like a checkpoint."""
    try:
        (folder / MANIFEST).unlink(missing_ok=True)
        shutil.rmtree(folder)
    except OSError as error:
        warnings.warn(f"{folder} could not be removed ({error}). Remove it by hand", stacklevel=2)

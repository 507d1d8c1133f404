"""Load a checkpoint under any plan and number of ranks, all or nothing.

Everything is verified before anything changes: the manifest, against its own checksum and the model. The files, against
the manifest, each block of them by one of the ranks. Only after all ranks have finished without an error does each rank
read its parts, directly into its memory.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardrec.checkpoint.data_files import BLOCK_BYTES, CACHED_BYTES, DTYPES, OpenFile
from shardrec.checkpoint.fits import misfits
from shardrec.checkpoint.ids import Moves
from shardrec.checkpoint.manifest import (
    MANIFEST,
    PARTIAL,
    Manifest,
    Read,
    leftovers,
    read_manifest,
)
from shardrec.checkpoint.optimizer import load_settings, state_targets
from shardrec.checkpoint.parts import HeldTensor, as_matrix, held
from shardrec.checkpoint.rows import RowFile
from shardrec.checkpoint.save import rank_name, wait_for_save
from shardrec.checkpoint.state import model_tensors
from shardrec.errors import CheckpointError, ConfigError
from shardrec.exchange.agree import Ranks, on_all_ranks
from shardrec.modules.inventory import Kind
from shardrec.modules.sharded_model import ShardedModel
from shardrec.replicas.replicated_model import ReplicatedModel

_REMEDY = "load an older checkpoint, or see that every rank can read this one"

Select = Callable[[Manifest, dict[str, HeldTensor]], tuple[Manifest, dict[str, HeldTensor]]]
"""From a checkpoint and the model's tensors, what is loaded: a manifest in the model's names, and the targets."""


def load_checkpoint(
    path: str | Path,
    model: ShardedModel,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    rank_state: dict[str, Tensor] | None = None,
) -> dict[str, Any]:
    """Load a checkpoint of :func:`save_checkpoint`, for this model's plan and number of ranks. Every rank calls it. The
    model and the optimizer do not change before everything is verified on all ranks. In addition to its shards, a rank
    holds at most 64 MiB of the checkpoint at a time. No code from the files is run.

    Args:
        path: the folder.
        model: a sharded model with the same tables and dense part. Its plan, and the tables' ``data_type``, may differ
            from the saved ones. Learning rates of fused optimizers become the saved ones.
        optimizer: the optimizer that gets the saved optimizer's states and settings.
        rank_state: is filled with the tensors, on the CPU, that this rank gave to :func:`save_checkpoint`. Empty if the
            checkpoint was written by a different number of ranks.

    Returns:
        The caller's ``extra`` data.

    Raises:
        CheckpointError: on every rank, naming the file, if the checkpoint is damaged or incomplete.
        ConfigError: on every rank, if it is of a different model or optimizer.
        PeerError: if another rank is gone or did not answer in time.
    """
    wait_for_save(model)
    with ExitStack() as stack:
        source = Source(Path(path).absolute(), model.ranks, stack)
        load_source(source, model, optimizer)
    if rank_state is not None:
        rank_state.clear()
        rank_state.update(source.rank_state)
    return dict(source.manifest.extra)


@torch.inference_mode(False)  # an inference tensor could not be written later
def load_source(source: Source, model: ShardedModel, optimizer: torch.optim.Optimizer | None) -> None:
    """Verify a checkpoint on all ranks, then read it. Raises what :func:`load_checkpoint` does."""
    ranks = source.ranks
    if len(set(on_all_ranks(lambda: source.verify(model, optimizer), ranks, "load", remedy=_REMEDY))) > 1:
        raise CheckpointError(
            f"the ranks see different checkpoints in {source.folder}, or choose other tensors of it. Give the same "
            "arguments, and a folder on a file system that they all share, into which no job saves at the same time"
        )
    if model.servers:
        model.load_servers(source.folder)
    on_all_ranks(lambda: source.read(model, optimizer), ranks, "load", remedy=f"the model is half loaded: {_REMEDY}")


def verify_checkpoint(path: str | Path) -> Manifest:
    """Read every byte of a checkpoint, in one process and without a model, and compare it with its checksums.

    Returns: The manifest of the checkpoint.

    Raises:
        CheckpointError: naming the file, if the checkpoint is damaged or incomplete.
    """
    folder = Path(path)
    manifest = read_manifest(folder)
    buffer = memoryview(bytearray(CACHED_BYTES))
    contents = manifest.contents()
    try:
        for number, file in enumerate(manifest.all_files):
            with ExitStack() as stack:
                opened = OpenFile(folder / manifest.data, file, stack)
                for block in range(file.blocks):
                    opened.verify(block, buffer)
                opened.check_contents(contents.get(number, {}))
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be read whole: {error}. Load an older checkpoint") from error
    return manifest


class Source:
    """A checkpoint that is being loaded.

    Args:
        folder: of the checkpoint.
        ranks: that load it.
        stack: closes the files. They stay open from the verification on, so that what is read is what was verified,
            also if the checkpoint is replaced or removed meanwhile.
        select: see :data:`Select`; by default all of the checkpoint is loaded, and must fit the model.
        manifest: instead of the folder's.

    Attributes:
        row_files: that the selected manifest has, by their numbers, besides its data files.
        manifest: after :meth:`verify`.
        rank_state: this rank's own tensors, after :meth:`read`.
    """

    manifest: Manifest

    def __init__(
        self,
        folder: Path,
        ranks: Ranks,
        stack: ExitStack,
        select: Select | None = None,
        manifest: Manifest | None = None,
    ) -> None:
        self.folder = folder
        self.row_files: dict[int, RowFile] = {}
        self._given = manifest
        self.ranks = ranks
        self._stack = stack
        self._select = select
        self._buffer = torch.empty(BLOCK_BYTES, dtype=torch.uint8)
        self._open: dict[int, OpenFile] = {}
        self._held: dict[str, HeldTensor] = {}
        self._moves: Moves | None = None
        self.rank_state: dict[str, Tensor] = {}

    def verify(self, model: ShardedModel, optimizer: torch.optim.Optimizer | None) -> str:
        """Verify the manifest and this rank's share of the files, and open those that it will read.

        Returns:
            The data folder's name, which is another one for each save, the checksums of the files of rows, and what is
            loaded of it.
        """
        self.manifest = self._given or read_manifest(self.folder)
        self._held = model_tensors(model, to_write=True)
        if self._select is not None:
            self.manifest, self._held = self._select(self.manifest, self._held)
        wanted = self._held
        self._moves = Moves(model, self.manifest)
        if self._select is None and (faults := misfits(self.manifest, wanted, self._moves, model, optimizer)):
            raise ConfigError(
                f"{self.folder} is a checkpoint of another model than this {type(model.module).__name__} (or of "
                f"other optimizers): {'; '.join(faults[:5])}"
            )
        if self.ranks.rank == 0 and self._given is None:
            self._find_strangers()
        files = self.manifest.all_files
        blocks = [(number, block) for number, file in enumerate(files) for block in range(file.blocks)]
        contents = self.manifest.contents()
        rank, size = self.ranks.rank, self.ranks.world_size
        buffer = memoryview(bytearray(CACHED_BYTES))
        for number, block in blocks[len(blocks) * rank // size : len(blocks) * (rank + 1) // size]:
            self._file(number).verify(block, buffer)
            if block == 0:
                self._file(number).check_contents(contents.get(number, {}))
        for file in self.row_files.values():
            file.check(file.shape[0] * rank // size, file.shape[0] * (rank + 1) // size)
        for read in self._moves.finding():
            self._serve(read)
        for name, tensor in wanted.items():
            moved = self._moves.has(name)
            for saved in self.manifest.tensors[name].parts if name in self.manifest.tensors else ():
                if moved or any(saved.rect.common(part.rect) for part in tensor.parts):
                    for number in saved.files:
                        self._file(number)
        loaded = ["optimizer"] * (optimizer is not None) if self._select is None else sorted(self.manifest.tensors)
        return " ".join([self.manifest.data, *(file.checksum for file in self.row_files.values()), *loaded])

    def _find_strangers(self) -> None:
        data = self.folder / self.manifest.data
        strange = {path.name for path in data.iterdir()} - {file.name for file in self.manifest.all_files}
        if strange:
            raise CheckpointError(
                f"{data} has files that are not the checkpoint's: {', '.join(sorted(strange)[:5])}; find out what has "
                "written them, and move them elsewhere"
            )
        known = {MANIFEST, PARTIAL, *(path.name for path in leftovers(self.folder, ""))}
        beside = {path.name for path in self.folder.iterdir()} - known
        if beside:
            warnings.warn(
                f"{self.folder} has files that are not the checkpoint's and are not read: "
                f"{', '.join(sorted(beside)[:5])}. Move them elsewhere",
                stacklevel=2,
            )

    def _file(self, number: int) -> OpenFile:
        if number in self.row_files:
            return self.row_files[number]
        if number not in self._open:
            self._open[number] = OpenFile(
                self.folder / self.manifest.data, self.manifest.all_files[number], self._stack
            )
        return self._open[number]

    def _serve(self, read: Read) -> None:
        """Carry out a read."""
        if read.rows is None:
            read.source.read(self._file, read.dtype, read.into, read.place, self._buffer)
        else:
            (sources, targets), rect = read.rows, read.source.rect
            place = rect._replace(
                col_start=max(rect.col_start, read.place.col_start), col_end=min(rect.col_end, read.place.col_end)
            )
            columns = read.into[:, place.cols_in(read.place)]
            length = max(1, BLOCK_BYTES // (place.cols * read.dtype.itemsize))
            for start in range(rect.row_start, rect.row_end, length):
                end = min(start + length, rect.row_end)
                first, last = torch.searchsorted(sources, torch.tensor([start, end])).tolist()
                if first < last:
                    rows = torch.empty((end - start, place.cols), dtype=read.dtype)
                    part = place._replace(row_start=start, row_end=end)
                    read.source.read(self._file, read.dtype, rows, part, self._buffer)
                    moved = rows.index_select(0, sources[first:last] - start).to(columns.device, columns.dtype)
                    columns.index_copy_(0, targets[first:last].to(columns.device), moved)
        if read.then is not None:
            read.then()

    def read(self, model: ShardedModel, optimizer: torch.optim.Optimizer | None) -> None:
        """Read this rank's parts into its memory."""
        manifest, moves = self.manifest, self._moves
        if model.context.device.type == "cuda":
            self._buffer = self._buffer.pin_memory()
        start = rank_name(self.ranks.rank, "")
        rank_tensors = {
            name: torch.empty(tensor.shape, dtype=DTYPES[tensor.dtype])
            for name, tensor in manifest.tensors.items()
            if name.startswith(start) and len(manifest.files) == self.ranks.world_size + model.servers
        }
        targets = self._held | state_targets(model, optimizer, manifest)
        targets |= {name: held(value, saved=False) for name, value in rank_tensors.items()}
        assert moves is not None, "what is read was verified"
        moves.place()
        for name, target in targets.items():
            if name.startswith("ids."):  # which moves.place has written
                continue
            for part in target.parts:
                into = as_matrix(part.values)
                for read in moves.reads(name, part, into):
                    self._serve(read)
                if into.data_ptr() != part.values.data_ptr():
                    part.values.copy_(into.view(part.values.shape))
        for item in model.inventory():
            if item.kind is Kind.COUNTS:
                item.set(manifest.step_counts)
            elif item.kind is Kind.EXTRA:  # was read into what may be a copy of the module's
                states = {name: self._held.get(f"model.{name}") for name in item.get()}
                item.set({name: state.parts[0].values for name, state in states.items() if state and state.parts})
        load_settings(model, optimizer, manifest)
        if isinstance(model, ReplicatedModel):
            model.restart_count()
        self.rank_state = {name.removeprefix(start): value for name, value in rank_tensors.items()}

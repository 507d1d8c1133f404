"""Load a checkpoint under any plan and number of ranks, all or nothing.

Everything is verified before anything changes: the manifest, against its own checksum and the model; the files,
against the manifest, each block of them by one of the ranks. Only when all ranks have agreed that all is well do they
read, each what it holds, straight into its memory.
"""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardrec.checkpoint.agree import Ranks
from shardrec.checkpoint.files import BLOCK_BYTES, DTYPES, read_rows, verify
from shardrec.checkpoint.manifest import MANIFEST, Manifest, SavedTensor, leftovers, read_manifest
from shardrec.checkpoint.optimizer import (
    fused_faults,
    load_fused_settings,
    load_settings,
    optimizer_faults,
    optimizer_targets,
)
from shardrec.checkpoint.parts import HeldTensor, as_matrix, held
from shardrec.checkpoint.save import rank_name, settle
from shardrec.checkpoint.state import model_tensors, sharded_collections
from shardrec.errors import CheckpointError, ConfigError
from shardrec.modules.model import ShardedModel
from shardrec.modules.replicated_model import ReplicatedModel

__all__ = ["load_checkpoint"]

_REMEDY = "load an older checkpoint, or see that every rank can read this one"


def load_checkpoint(
    path: str | Path,
    model: ShardedModel,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    rank_state: dict[str, Tensor] | None = None,
) -> dict[str, Any]:
    """Read what :func:`save_checkpoint` wrote, for this model's plan and number of ranks. Every rank calls it.

    Nothing of the model or the optimizer changes before everything is verified on all ranks. Beside its own shards, a
    rank holds at most 64 MiB of the checkpoint at a time. No code from the files is run.

    Args:
        path: the folder.
        model: a sharded model with the same tables and dense part; its plan, and the tables' ``data_type``, may differ
            from the saved ones. Learning rates of fused optimizers become the saved ones.
        optimizer: gets the saved optimizer's states and settings.
        rank_state: becomes this rank's own tensors, on the CPU, as it gave them to :func:`save_checkpoint`; empty if
            the checkpoint was written by another number of ranks.

    Returns:
        The caller's ``extra`` data.

    Raises:
        CheckpointError: on every rank, naming the file, if the checkpoint is damaged or incomplete.
        ConfigError: on every rank, if it is one of another model or optimizer.
        PeerError: if another rank is gone or did not come in time.
    """
    settle(model)
    ranks = Ranks(model.group, model.context.device)
    with ExitStack() as stack:
        source = _Source(Path(path), ranks, stack)

        def verified() -> bytes:
            digest = source.open()
            source.check(model, optimizer)
            source.verify(model_tensors(model))
            return digest

        if len(set(ranks.agree("load", verified, remedy=_REMEDY))) > 1:
            raise CheckpointError(
                f"the ranks see different checkpoints in {path}; give a folder on a file system that they all share, "
                "into which nobody saves at the same time"
            )

        def read() -> None:
            own = source.rank_state()
            targets = model_tensors(model) | optimizer_targets(model, optimizer, source.manifest)
            targets |= {rank_name(ranks.rank, name): held(value, saved=False) for name, value in own.items()}
            source.read(targets, pinned=model.context.device.type == "cuda")
            source.set(model, optimizer)
            if rank_state is not None:
                rank_state.clear()
                rank_state.update(own)

        ranks.agree("load", read, remedy=f"the model is half loaded: {_REMEDY}")
    return dict(source.manifest.extra)


class _Source:
    """A checkpoint that is being loaded.

    Args:
        folder: of the checkpoint.
        ranks: that load it.
        stack: closes the files. They stay open from the verification on, so that what is read is what was verified,
            also if the checkpoint is replaced or removed meanwhile.
    """

    manifest: Manifest

    def __init__(self, folder: Path, ranks: Ranks, stack: ExitStack) -> None:
        self._folder = folder
        self._ranks = ranks
        self._stack = stack
        self._descriptors: dict[int, int] = {}

    def open(self) -> bytes:
        """Read the manifest; returns its digest."""
        self.manifest, data = read_manifest(self._folder)
        return hashlib.sha256(data).digest()

    def check(self, model: ShardedModel, optimizer: torch.optim.Optimizer | None) -> None:
        """Raises ConfigError with everything in which the checkpoint is not one of this model and optimizer."""
        saved = self.manifest.tensors
        wanted = model_tensors(model)
        lacking = sorted(set(wanted) - set(saved))
        surplus = sorted(name for name in saved if name.startswith(("model.", "fused.")) and name not in wanted)
        faults = [f"it lacks {', '.join(lacking[:5])}"] if lacking else []
        faults += [f"it has {', '.join(surplus[:5])}, which the model lacks"] if surplus else []
        for name, tensor in wanted.items():
            if name in saved:
                faults += _faults(name, saved[name], tensor)
        faults += fused_faults(model, self.manifest) + optimizer_faults(model, optimizer, self.manifest)
        if faults:
            raise ConfigError(
                f"{self._folder} is a checkpoint of another model than this {type(model.module).__name__} (or of other "
                f"optimizers): {'; '.join(faults[:5])}"
            )

    def verify(self, targets: Mapping[str, HeldTensor]) -> None:
        """Verify this rank's share of the files, and open those that it will read ``targets`` from."""
        if self._ranks.rank == 0:
            self._find_strangers()
        total = sum(len(file.checksums) for file in self.manifest.files)
        rank, size = self._ranks.rank, self._ranks.size
        begin, end = total * rank // size, total * (rank + 1) // size
        first = 0
        for number, file in enumerate(self.manifest.files):
            count = len(file.checksums)
            mine = range(max(begin - first, 0), min(end - first, count))
            if mine:
                verify(self._descriptor(number), self._path(number), file, mine)
            first += count
        for name, target in targets.items():
            for saved in self.manifest.tensors[name].parts:
                if any(saved.rect.common(part.rect) for part in target.parts):
                    self._descriptor(saved.file)

    def _find_strangers(self) -> None:
        data = self._folder / self.manifest.data
        strange = {path.name for path in data.iterdir()} - {file.name for file in self.manifest.files}
        if strange:
            raise CheckpointError(
                f"{data} has files that are not the checkpoint's: {', '.join(sorted(strange)[:5])}; find out what has "
                "written them, and move them elsewhere"
            )
        known = {MANIFEST, self.manifest.data, *(path.name for path in leftovers(self._folder, self.manifest.data))}
        beside = {path.name for path in self._folder.iterdir()} - known
        if beside:
            warnings.warn(
                f"{self._folder} has files that are not the checkpoint's and are not read: "
                f"{', '.join(sorted(beside)[:5])}; move them elsewhere",
                stacklevel=2,
            )

    def _path(self, file: int) -> Path:
        return self._folder / self.manifest.data / self.manifest.files[file].name

    def _descriptor(self, file: int) -> int:
        """Of the open file."""
        if file not in self._descriptors:
            path = self._path(file)
            descriptor = self._descriptors[file] = os.open(path, os.O_RDONLY)
            self._stack.callback(os.close, descriptor)
            size, wanted = os.fstat(descriptor).st_size, self.manifest.files[file].size
            if size != wanted:
                raise CheckpointError(
                    f"{path} has {size:,} bytes, and {wanted:,} were written; load an older checkpoint, or copy this "
                    "one again from where it is whole"
                )
        return self._descriptors[file]

    def rank_state(self) -> dict[str, Tensor]:
        """Room for this rank's own tensors, by name; empty if another number of ranks has saved."""
        if len(self.manifest.files) != self._ranks.size:
            return {}
        start = rank_name(self._ranks.rank, "")
        return {
            name.removeprefix(start): torch.empty(one.shape, dtype=DTYPES[one.dtype])
            for name, one in self.manifest.tensors.items()
            if name.startswith(start)
        }

    def read(self, targets: Mapping[str, HeldTensor], *, pinned: bool) -> None:
        """Read what this rank holds into its memory."""
        buffer = torch.empty(BLOCK_BYTES, dtype=torch.uint8, pin_memory=pinned)
        for name, target in targets.items():
            saved = self.manifest.tensors[name]
            for part in target.parts:
                into = as_matrix(part.values)
                for one in saved.parts:
                    read_rows(
                        self._descriptor(one.file),
                        self._path(one.file),
                        one.start,
                        one.rect,
                        DTYPES[saved.dtype],
                        into,
                        part.rect,
                        buffer,
                    )
                if into.data_ptr() != part.values.data_ptr():
                    part.values.copy_(into.view(part.values.shape))

    def set(self, model: ShardedModel, optimizer: torch.optim.Optimizer | None) -> None:
        """Set what is no tensor."""
        for collection in sharded_collections(model):
            collection.load_step_counts(self.manifest.step_counts)
        load_fused_settings(model, self.manifest)
        load_settings(optimizer, self.manifest)
        if isinstance(model, ReplicatedModel):
            model.steps_since_sync = 0


def _faults(name: str, saved: SavedTensor, tensor: HeldTensor) -> list[str]:
    found = []
    if saved.shape != tensor.shape:
        found.append(
            f"{name} has shape {saved.shape} and the model's {tensor.shape}; build the model with the saved sizes"
        )
    dtype = DTYPES[saved.dtype]
    if dtype != tensor.dtype and not (dtype.is_floating_point and tensor.dtype.is_floating_point):
        found.append(f"{name} is {dtype} and the model's {tensor.dtype}; build the model with the saved type")
    return found

"""The checkpoints of a long job: saves them by step, keeps the last few, and finds the last undamaged one."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardrec.checkpoint.load import load_checkpoint
from shardrec.checkpoint.manifest import MANIFEST
from shardrec.checkpoint.save import PendingSave, check_incremental, remove, save, wait_for_save
from shardrec.errors import CheckpointError, ConfigError
from shardrec.exchange.agree import on_all_ranks
from shardrec.modules.sharded_model import ShardedModel
from shardrec.replicas.elastic_model import ElasticModel

_NAME = re.compile(r"step-(\d{12})")


@dataclass(frozen=True, kw_only=True)
class LoadedCheckpoint:
    """The result of :meth:`Checkpoints.load_last`.

    Args:
        step: the step at which it was saved.
        path: its folder.
        extra: the caller's data.
        rank_state: this rank's own tensors, on the CPU. Empty if the checkpoint was written by another number of ranks.
    """

    step: int
    path: Path
    extra: dict[str, Any]
    rank_state: dict[str, Tensor]


class Checkpoints:
    """A folder of checkpoints, one per step at which the job saved: ``step-000000001000/``.

    Args:
        folder: on a file system that all ranks share. Made by the first save.
        keep_last: number of checkpoints to keep, counted from the last one. Default: all. An older one is removed after
            the new one is complete.
        incremental: how many consecutive saves may write only rows that have changed, see
            :func:`shardrec.save_checkpoint`. Default: none. Every checkpoint is complete, but damage to a shared file
            damages all checkpoints that share it: with ``keep_last`` above ``incremental``, no file is in all of them.

    Attributes:
        pinned: step of a checkpoint that is kept in addition. None for none.

    Raises:
        ConfigError: if ``keep_last`` is below 1 or ``incremental`` below 0.
    """

    def __init__(self, folder: str | Path, *, keep_last: int | None = None, incremental: int = 0) -> None:
        if keep_last is not None and keep_last < 1:
            raise ConfigError(f"keep_last={keep_last}. Give 1 or more, or None to keep all checkpoints")
        self.folder = Path(folder)
        check_incremental(incremental)
        self.keep_last = keep_last
        self.incremental = incremental
        self.pinned: int | None = None

    def save(
        self,
        step: int,
        model: ShardedModel,
        optimizer: torch.optim.Optimizer | None = None,
        extra: Mapping[str, object] | None = None,
        *,
        rank_state: Mapping[str, Tensor] | None = None,
        wait: bool = True,
    ) -> PendingSave:
        """Save the model after ``step`` steps. See :func:`shardrec.save_checkpoint`. Every rank calls it.

        A checkpoint of the same step is replaced. Files of interrupted saves are removed.

        Raises:
            ConfigError: as ``save_checkpoint``, and for a step below 0.
            CheckpointError: as ``save_checkpoint``.
            PeerError: as ``save_checkpoint``.
        """
        if not 0 <= step < 10**12:
            raise ConfigError(f"step={step}. Give the number of steps made, from 0 on")
        return save(
            self.folder / f"step-{step:012}",
            model,
            optimizer,
            extra,
            rank_state=rank_state,
            wait=wait,
            incremental=self.incremental,
            then=lambda: self._prune(step),
        )

    def load_last(self, model: ShardedModel, optimizer: torch.optim.Optimizer | None = None) -> LoadedCheckpoint | None:
        """Load the undamaged checkpoint with the highest step. Every rank calls it. A warning names each damaged
        checkpoint, and the previous one is tried.

        Args:
            model: as for :func:`shardrec.load_checkpoint`.
            optimizer: as for :func:`shardrec.load_checkpoint`.

        Returns: The loaded checkpoint. None if the folder lacks a complete checkpoint.

        Raises:
            CheckpointError: on every rank, if there are checkpoints and none of them is good.
            ConfigError: on every rank, if the last undamaged one is of a different model or optimizer.
            PeerError: if another rank is gone or did not answer in time.
        """
        wait_for_save(model)
        paths = on_all_ranks(self.paths, model.ranks, "load", remedy="see that every rank can read it")[0]
        faults = []
        for step, path in reversed(paths.items()):
            rank_state: dict[str, Tensor] = {}
            try:
                extra = load_checkpoint(path, model, optimizer, rank_state=rank_state)
            except CheckpointError as error:
                faults.append(str(error))
                warnings.warn(f"the checkpoint of step {step} is skipped: {error}", stacklevel=2)
            else:
                if isinstance(model, ElasticModel):
                    model.steps = step
                return LoadedCheckpoint(step=step, path=path, extra=extra, rank_state=rank_state)
        if faults:
            raise CheckpointError(
                f"none of the {len(faults)} checkpoint(s) in {self.folder} can be loaded. To begin again, give another "
                "folder:\n  " + "\n  ".join(faults)
            )
        return None

    def paths(self) -> dict[int, Path]:
        """The folders that hold a complete checkpoint, damaged or not, by step, in order."""
        return {step: path for step, path in self._folders() if (path / MANIFEST).exists()}

    def _folders(self) -> list[tuple[int, Path]]:
        if not self.folder.exists():
            return []
        matches = [(_NAME.fullmatch(path.name), path) for path in self.folder.iterdir()]
        return sorted((int(name[1]), path) for name, path in matches if name)

    def _prune(self, step: int) -> None:
        """Remove incomplete checkpoints, and those older than the last ``keep_last`` up to ``step``."""
        complete = self.paths()
        older = [path for saved_step, path in complete.items() if saved_step < step and saved_step != self.pinned]
        kept = len(older) if self.keep_last is None else self.keep_last - 1
        for path in older[: max(len(older) - kept, 0)] + [
            path for saved_step, path in self._folders() if saved_step not in complete
        ]:
            remove(path)

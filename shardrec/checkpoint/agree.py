"""Agreement between ranks in save and load: every phase succeeds on all ranks, or all raise the same error."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from shardrec.errors import CheckpointError, ConfigError, PeerError, ShardrecError
from shardrec.exchange.peers import peers
from shardrec.exchange.safe_pickle import gather
from shardrec.files import os_fault

__all__ = ["Ranks"]

T = TypeVar("T")


class Ranks:
    """The ranks that save or load a model.

    Args:
        group: the process group; None on one rank.
        device: of the tensors for the group's collectives.
    """

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device) -> None:
        self.group = group
        self._device = device
        self.rank = 0 if group is None else dist.get_rank(group)
        self.size = 1 if group is None else dist.get_world_size(group)

    def agree(self, what: str, work: Callable[[], T], *, remedy: str) -> list[T]:
        """Do ``work`` on every rank. Every rank calls this.

        Args:
            what: "save" or "load", for messages.
            work: returns the value to share with the other ranks, of a type that :mod:`shardrec.exchange.safe_pickle`
                supports.
            remedy: the remedy for an error of the operating system.

        Returns:
            The results of all ranks, by rank.

        Raises:
            CheckpointError: on every rank, if ``work`` failed on any.
            ConfigError: on every rank, if all failures are ConfigErrors.
            PeerError: if another rank is gone or did not answer in time.
        """
        result, fault, cause = None, None, None
        try:
            result = work()
        except PeerError:
            raise
        except Exception as error:
            fault, cause = _for_all(error, remedy), error
        outcomes: list[Any] = [(fault, result)]
        if self.group is not None:
            with peers(self.group, what), self._on_device():
                outcomes = gather((fault, result), self.group)
        faults = {rank: fault for rank, (fault, _) in enumerate(outcomes) if fault is not None}
        if faults:
            raise _joined(faults, self.size) from cause
        return [value for _, value in outcomes]

    def _on_device(self) -> AbstractContextManager[Any]:
        return torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext()


def _for_all(error: Exception, remedy: str) -> ShardrecError:
    """A rank's error, as it is sent to the others."""
    if isinstance(error, ConfigError):
        return ConfigError(str(error))
    if isinstance(error, ShardrecError):
        return CheckpointError(str(error))
    if isinstance(error, OSError):
        return CheckpointError(f"{os_fault(error)}; {remedy}")
    return CheckpointError(f"{type(error).__name__}: {error}")


def _joined(faults: dict[int, ShardrecError], ranks: int) -> ShardrecError:
    kind = ConfigError if all(isinstance(fault, ConfigError) for fault in faults.values()) else CheckpointError
    texts = {str(fault) for fault in faults.values()}
    if len(faults) == ranks and len(texts) == 1:
        return kind(texts.pop())
    lines = [f"rank {rank}: {fault}" for rank, fault in faults.items()]
    return kind(lines[0] if len(lines) == 1 else f"{len(lines)} ranks failed:\n  " + "\n  ".join(lines))

"""The collectives of a step, as an object that can be replaced.

An all-to-all is issued and waited in two calls, so that work can go between them. The functional operators
(``torch.ops._c10d_functional``) are the ones that eager mode, TorchScript, torch.compile and torch.export all know;
importing ``torch.distributed._functional_collectives`` registers their autograd formulas, without which they give no
gradient, silently.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives  # registers the autograd formulas
from torch import Tensor

from shardrec.errors import PeerError

__all__ = ["Collectives", "FunctionalCollectives", "LocalCollectives", "collectives_of"]


class Collectives(Protocol):
    """What the exchange needs of a process group."""

    rank: int
    world_size: int

    def all_to_all(self, values: Tensor, receive: Sequence[int], send: Sequence[int], what: str) -> Tensor:
        """Issue an all-to-all.

        Args:
            values: what to send, (sum(send),) or (sum(send), C), contiguous, to rank 0 first.
            receive: W sizes along dim 0, from each rank.
            send: W sizes along dim 0, to each rank.
            what: a word for error messages, such as "header".

        Returns:
            The received values, (sum(receive), ...); only :meth:`wait` makes them valid.
        """

    def wait(self, pending: Tensor, what: str) -> Tensor:
        """Wait for :meth:`all_to_all` (on CUDA: make the current stream wait).

        Raises:
            PeerError: if another rank is gone or did not answer in time.
        """


class LocalCollectives:
    """One rank: what is sent is what is received."""

    rank = 0
    world_size = 1

    def all_to_all(self, values: Tensor, receive: Sequence[int], send: Sequence[int], what: str) -> Tensor:
        return values

    def wait(self, pending: Tensor, what: str) -> Tensor:
        return pending


class FunctionalCollectives:
    """The functional collectives over one process group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)
        self.group_name: str = group.group_name

    def all_to_all(self, values: Tensor, receive: Sequence[int], send: Sequence[int], what: str) -> Tensor:
        try:
            pending: Tensor = torch.ops._c10d_functional.all_to_all_single(
                values, list(receive), list(send), self.group_name
            )
        except RuntimeError as error:
            raise self._peer_error(what, error) from error
        return pending

    def wait(self, pending: Tensor, what: str) -> Tensor:
        try:
            done: Tensor = torch.ops._c10d_functional.wait_tensor(pending)
        except RuntimeError as error:
            raise self._peer_error(what, error) from error
        return done

    def _peer_error(self, what: str, error: RuntimeError) -> PeerError:
        return PeerError(
            f"rank {self.rank} of {self.world_size}: the {what} exchange failed, most likely because another rank "
            f"stopped or did not come within the process group's timeout: {str(error).splitlines()[0]}. Look for the "
            "first error among the other ranks' messages, and start all the ranks again"
        )


def collectives_of(group: dist.ProcessGroup | None = None) -> Collectives:
    """The collectives of ``group`` (default: the default group; without one, a single rank's)."""
    if group is None:
        if not (dist.is_available() and dist.is_initialized()):
            return LocalCollectives()
        group = dist.group.WORLD
        assert group is not None, "an initialised process group has a WORLD"
    if dist.get_world_size(group) == 1:
        return LocalCollectives()
    return FunctionalCollectives(group)

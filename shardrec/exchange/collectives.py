"""The collectives of a step, as an object that can be replaced.

An all-to-all is issued and waited for in two calls, so that other work can overlap with it. The functional operators
(``torch.ops._c10d_functional``) are known to eager mode, TorchScript, torch.compile and torch.export alike.
importing ``torch.distributed._functional_collectives`` registers their autograd formulas, without which they silently
give no gradient.
"""

from __future__ import annotations

import abc
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives  # registers the autograd formulas
from torch import Tensor

from shardrec.errors import ConfigError
from shardrec.exchange.flight_record import flight_record
from shardrec.exchange.peers import introduce, peer_error, raise_aborted, watch_device


@dataclass(frozen=True, kw_only=True)
class StreamSizes:
    """Sizes, in elements, of the streams of several calls sent together (see :mod:`shardrec.exchange.row_exchange`).

    Args:
        out: per rank and stream, the elements sent to the rank.
        into: per rank and stream, the elements received from the rank.
    """

    out: Sequence[Sequence[int]]
    into: Sequence[Sequence[int]]


class WayBack(Protocol):
    """The gradients of float32 streams on their way back to the ranks that sent the streams.

    Used once per backward: :meth:`views`, :meth:`send`, :meth:`wait`.
    """

    def views(self) -> list[Tensor]:
        """The memory to which the gradients of received streams are written, by rank, then stream."""

    def send(self) -> None:
        """Send the gradients that were written to the views."""

    def wait(self) -> list[Tensor]:
        """Wait for the gradients of sent streams: per stream, a flat tensor, rank after rank."""


class Pending(Protocol):
    """Values that are being received."""

    @property
    def way_back(self) -> WayBack | None:
        """The way back of their gradients, if the collectives provide one."""

    def wait(self) -> list[Tensor]:
        """Per rank, the (n,) values that came from it. Call it once.

        Raises:
            PeerError: if another rank is gone or did not answer in time.
        """


class Collectives(abc.ABC):
    """The operations of a process group that the exchange uses.

    Attributes:
        rank: of this process.
        world_size: number of ranks W.
        group_name: of the process group. "" without one.
    """

    rank: int
    world_size: int
    group_name: str = ""

    @property
    def mean_over(self) -> int:
        """Ranks that have a batch, over which gradients are averaged."""
        return self.world_size

    program_goes_back: Callable[[], None] | None = None
    """Called in the backward of a program, inside of which each exchange has a backward of its own."""

    @abc.abstractmethod
    def send(
        self, parts: Sequence[Sequence[Tensor]], receive: Sequence[int], what: str, streams: StreamSizes | None = None
    ) -> Pending:
        """Issue an all-to-all of parts, which need not be contiguous with each other.

        Args:
            parts: per rank, the (n,) tensors that go to it, one after the other. All of one dtype.
            receive: elements from each rank.
            what: the exchange's name in errors and counts, such as "output".
            streams: sizes of the float32 streams sent, if their gradients will come back.

        Raises:
            PeerError: if another rank is gone.
        """

    def header(self, rows: Tensor) -> Tensor:
        """Exchange row q of ``rows`` (W, C) with rank q, and wait: (W, C), a row per rank."""
        received = self.send([[row] for row in rows], [rows.size(1)] * self.world_size, "header").wait()
        return torch.stack(received)

    def ids(self, parts: Sequence[Sequence[Tensor]], receive: Sequence[int]) -> Pending:
        """Issue an all-to-all of the payload as :meth:`send` does: ids and the other inputs of their lookup."""
        return self.send(parts, receive, "payload")

    def header_with_ids(
        self, rows: Sequence[list[int]], columns: int, parts: Sequence[Sequence[Tensor]]
    ) -> tuple[list[list[int]], Callable[[Sequence[int]], Pending]]:
        """Exchange headers, and let the payload follow.

        Args:
            rows: per rank, the numbers that go to it, at most ``columns``.
            columns: width of a header, the same on all ranks.
            parts: of the payload, as :meth:`send` takes them. Not sent if a header announces that there is no payload.

        Returns:
            The numbers per rank, and the function that issues the payload's exchange: it takes the words that are
            to come from each rank.
        """
        header = torch.zeros((self.world_size, columns), dtype=torch.int64)
        header[:, : len(rows[0])] = torch.tensor(rows)
        received: list[list[int]] = self.header(header).tolist()
        return received, partial(self.ids, parts)

    def gather(self, values: Tensor, sizes: Sequence[int], what: str) -> list[Tensor]:
        """Send ``values`` (n,) to every rank, and wait for the values of all ranks. Their ``sizes`` are known."""
        return self.send([[values]] * self.world_size, sizes, what).wait()

    def report_failure(self, fault: str) -> None:  # noqa: B027 - a process group cannot
        """Tell the other ranks that this one does not continue the collectives that it has begun.

        They raise PeerError where they wait for these collectives; without this report they wait until the time limit.

        Args:
            fault: what happened on this rank, as a predicate: "raised in backward: ...".
        """

    def raise_reported_failure(self, what: str) -> None:  # noqa: B027 - nothing to raise
        """Raise the fault that another rank has reported in this step, if any, or that ended a wait of the device.

        Args:
            what: this rank waits for, as a noun.

        Raises:
            PeerError: naming the rank and its fault.
        """

    def allocate(self, numel: int, device: torch.device) -> Tensor:
        """Allocate memory for parts that will be passed to :meth:`send`, which may avoid a copy.

        Args:
            numel: elements.
            device: of the parts.

        Returns:
            (numel,) float32, uninitialised. It must not be written to after it was sent.
        """
        return torch.empty(numel, dtype=torch.float32, device=device)


@dataclass
class Later:
    """A :class:`Pending` that waits by a function.

    Args:
        wait: waits for the values.
        way_back: of their gradients.
    """

    wait: Callable[[], list[Tensor]]
    way_back: WayBack | None = None


class LocalCollectives(Collectives):
    """The collectives of a single rank, which receives what it sends."""

    rank = 0
    world_size = 1

    def header(self, rows: Tensor) -> Tensor:
        return rows

    def send(
        self, parts: Sequence[Sequence[Tensor]], receive: Sequence[int], what: str, streams: StreamSizes | None = None
    ) -> Pending:
        received = [joined(parts[0])]
        return Later(lambda: received)


class FunctionalCollectives(Collectives):
    """The functional collectives over one process group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)
        self.group = group
        self.group_name = group.group_name
        introduce()

    def send(
        self, parts: Sequence[Sequence[Tensor]], receive: Sequence[int], what: str, streams: StreamSizes | None = None
    ) -> Pending:
        sizes = [sum(part.numel() for part in of_rank) for of_rank in parts]
        values = joined([part for of_rank in parts for part in of_rank])
        number = flight_record().begin(what, sum(receive) * values.element_size())
        try:
            pending = torch.ops._c10d_functional.all_to_all_single(values, list(receive), sizes, self.group_name)
        except RuntimeError as error:
            raise peer_error(self.group, f"{what} exchange", error) from error
        return Later(partial(self._wait, pending, list(receive), what, number))

    def _wait(self, pending: Tensor, receive: list[int], what: str, number: int) -> list[Tensor]:
        """Wait for parts that travel as one buffer. ``number`` is theirs in the flight record."""
        try:
            done: Tensor = torch.ops._c10d_functional.wait_tensor(pending)
        except RuntimeError as error:
            raise peer_error(self.group, f"{what} exchange", error) from error
        if done.is_cuda:
            watch_device(self.group)
        flight_record().end(number)
        return list(done.split(receive))

    def raise_reported_failure(self, what: str) -> None:
        raise_aborted(self.group, what)


def collectives_of(group: dist.ProcessGroup | None = None) -> Collectives:
    """The collectives of ``group`` (default: the default group; without one, a single rank's).

    Raises:
        ConfigError: without a group, in one of several processes of a launcher.
    """
    if group is None:
        if not (dist.is_available() and dist.is_initialized()):
            if "RANK" in os.environ and int(os.environ.get("WORLD_SIZE", 1)) > 1:
                raise ConfigError(
                    f"this is rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']} (RANK, WORLD_SIZE), and has no "
                    "process group: call torch.distributed.init_process_group first, or unset WORLD_SIZE for a model "
                    "of this process alone"
                )
            return LocalCollectives()
        group = dist.group.WORLD
        assert group is not None, "an initialised process group has a WORLD"
    if dist.get_world_size(group) == 1:
        return LocalCollectives()
    return FunctionalCollectives(group)


def joined(parts: Sequence[Tensor]) -> Tensor:
    """Concatenate at least one (n,) part: a view if they are adjacent in memory, else a copy."""
    first = parts[0]
    place = first.storage_offset()
    memory = first.untyped_storage().data_ptr()
    for part in parts:
        if part.storage_offset() != place or part.untyped_storage().data_ptr() != memory:
            return torch.cat(list(parts))
        place += part.numel()
    return first.as_strided((place - first.storage_offset(),), (1,))

"""Replicas of a sharded group (2-D parallelism): the process groups, and the averaging of the tables' copies.

W ranks are R replicas of G = W / R ranks. A replica is a run of neighbouring ranks, so that on hosts with G ranks the
exchanges per step stay inside a host. Only the averaging, every k steps, is between hosts. W = 8, R = 2::

                   rank of the replica
                    0    1    2    3
    replica 0       0    1    2    3      a row shares one copy of the tables: header, payload, output, gradient
    replica 1       4    5    6    7      a column holds R copies of the same shards: averaged every k steps

The gradients of the dense part, data-parallel tables included, are averaged over all W ranks in every step.

The idea is from local SGD (Stich, 2019) on the sharded part only, as in TorchRec's ``DMPCollection``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from shardrec.exchange.collectives import collectives_of
from shardrec.exchange.headers import Headers
from shardrec.exchange.peers import peers
from shardrec.exchange.subgroups import end_with, subgroup
from shardrec.modules.inventory import Kind, RowState, row_states
from shardrec.modules.sharded_model import ShardedModel
from shardrec.modules.table import ShardedTable

_BUCKET_BYTES = 64 * 2**20
"""Size of one all-reduce: large enough for the network's full rate, small beside the tables."""


@dataclass(frozen=True)
class Replicas:
    """The argument ``replicas`` of :func:`shardrec.shard`: the number of copies of the tables, and when they are
    averaged.

    Args:
        count: number of copies R, a divisor of the number of ranks.
        sync_every: training steps between two averagings of the copies.
        sync_optimizer: average the states of the fused optimizers with the tables.
        elastic: ``"host:port"`` or ``"host:port/name"`` of a ``torch.distributed.TCPStore`` in a process that outlives
            the replicas: each is then a job of its own, with a process group of its own, and may die and come back
            (docs/failures.md). ``count`` of them begin together.
        patience_s: seconds after which an elastic replica that shows no sign of life is taken for dead.
    """

    count: int
    _: KW_ONLY
    sync_every: int = 1
    sync_optimizer: bool = True
    elastic: str | None = None
    patience_s: float = 3.0

    def faults(self, world_size: int) -> list[str]:
        """The faults of the options for a number of ranks, one sentence each. All ranks raise them together."""
        faults = []
        if self.count < 1:
            faults.append(f"Replicas({self.count}). There is at least one copy of the tables: give 1 or more")
        elif self.elastic is not None:
            if not re.fullmatch(r".+:\d+(/.*)?", self.elastic):
                faults.append(f"elastic={self.elastic!r}. Give the address of a TCPStore as 'host:port'")
            if not self.patience_s > 0:
                faults.append(f"patience_s={self.patience_s}. Give a number of seconds above 0")
        elif world_size % self.count:
            fitting = [count for count in range(1, world_size + 1) if world_size % count == 0]
            faults.append(
                f"Replicas({self.count}) cannot share {world_size} rank(s) evenly. Give a divisor of {world_size} "
                f"({', '.join(map(str, fitting))}), or start another number of ranks"
            )
        if self.sync_every < 1:
            faults.append(f"sync_every={self.sync_every}. Replicas are averaged after 1 step or more: give 1 or more")
        return faults

    def make_groups(self, group: dist.ProcessGroup | None, device: torch.device) -> ReplicaGroups:
        """Make the process groups. Every rank of ``group`` calls this. The number of replicas divides its ranks.

        Args:
            group: all the ranks. Default: the default group, or a single rank without one. Elastic replicas have a
                process group each, which is one replica here.
            device: of the tables.
        """
        collectives = collectives_of(group)
        ranks = replica_ranks(collectives.world_size, 1 if self.elastic is not None else self.count)
        whole = (group or dist.group.WORLD) if collectives.world_size > 1 else None
        if whole is None or len(ranks) == 1:
            return ReplicaGroups(ranks=ranks, replica=0, within=whole, across=None, everyone=None)
        size = len(ranks[0])
        replica, replica_rank = divmod(collectives.rank, size)
        of_some = partial(subgroup, whole, device=device, what="start of the replicas")
        within = of_some(ranks[replica]) if size > 1 else None
        across = of_some([row[replica_rank] for row in ranks])
        everyone = of_some(range(collectives.world_size), backend="gloo")
        headers = Headers(collectives_of(everyone), torch.device("cpu"))
        end_with(headers, everyone)
        return ReplicaGroups(ranks=ranks, replica=replica, within=within, across=across, everyone=headers)


def replica_ranks(world_size: int, replicas: int) -> tuple[tuple[int, ...], ...]:
    """The ranks per replica: R runs of W / R neighbours. Their columns are the ranks that hold the same shards."""
    size = world_size // replicas
    return tuple(tuple(range(start, start + size)) for start in range(0, world_size, size))


@dataclass(frozen=True, kw_only=True)
class ReplicaGroups:
    """The process groups that a rank belongs to.

    Args:
        ranks: per replica, as ranks of the whole group.
        replica: number of this rank's replica.
        within: the ranks that share this copy of the tables. None for a single one.
        across: the ranks that hold the same shards in each replica. None for a single replica.
        everyone: all the ranks, on the CPU, to agree about a step without waiting for a device. None for one replica.
    """

    ranks: tuple[tuple[int, ...], ...]
    replica: int
    within: dist.ProcessGroup | None
    across: dist.ProcessGroup | None
    everyone: Headers | None


def stream_buckets(tensors: Iterable[Tensor], most: int) -> Iterator[list[Tensor]]:
    """Cut tensors, taken as one stream of elements, into buckets that are full except the last.

    ::

        sizes 5, 2, 9; most 4     | aaaa | abbc | cccc | cccc |

    Args:
        tensors: flat.
        most: elements of a bucket.

    Returns:
        Per bucket, its parts in order: as few buckets as there can be, each element in one.
    """
    bucket: list[Tensor] = []
    room = most
    for tensor in tensors:
        while tensor.numel():
            part, tensor = tensor[:room], tensor[room:]
            bucket.append(part)
            room -= part.numel()
            if not room:
                yield bucket
                bucket, room = [], most
    if bucket:
        yield bucket


def dtype_buckets(tensors: Iterable[Tensor], bucket_bytes: int = _BUCKET_BYTES) -> Iterator[list[Tensor]]:
    """:func:`stream_buckets` of contiguous tensors, grouped by dtype."""
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        by_dtype.setdefault(tensor.dtype, []).append(tensor.detach().view(-1))
    for dtype, flat in by_dtype.items():
        yield from stream_buckets(flat, max(1, bucket_bytes // dtype.itemsize))


class Averager:
    """Averages tensors over the ranks of a group, in few large collectives per dtype.

    A bucket that lies inside one tensor is reduced where it is. A bucket of several parts goes through a buffer. Two
    are under way at a time, so that packing and sending overlap. Beside the tensors, two buckets of memory are used.

    Args:
        group: the ranks that hold copies. Each gives the same shapes and dtypes in the same order.
        bucket_bytes: size of one collective.
    """

    def __init__(self, group: dist.ProcessGroup, *, bucket_bytes: int = _BUCKET_BYTES) -> None:
        self._group = group
        self._ranks = dist.get_world_size(group)
        self._first = dist.get_global_rank(group, 0)
        self._bucket_bytes = bucket_bytes

    def average(self, tensors: Iterable[Tensor]) -> None:
        """Replace contiguous floating-point tensors by their means over the ranks, bit-identical on all ranks. Divides
        before it adds, because a sum of half-precision values may overflow. A value that is equal on all ranks does not
        change if their number is a power of two. Otherwise it may be rounded once or twice.

        Raises:
            PeerError: if another rank is gone or did not answer in time. The tensors are then partly averaged.
        """
        self._run(tensors, lambda tensor: dist.all_reduce(tensor.div_(self._ranks), group=self._group, async_op=True))

    def copy_first(self, tensors: Iterable[Tensor]) -> None:
        """Replace contiguous tensors by the tensors of the group's first rank.

        Raises:
            PeerError: if another rank is gone or did not answer in time.
        """
        self._run(tensors, lambda tensor: dist.broadcast(tensor, self._first, group=self._group, async_op=True))

    @torch.no_grad()
    def _run(self, tensors: Iterable[Tensor], start: Callable[[Tensor], dist.Work | None]) -> None:
        in_flight: list[tuple[dist.Work, Tensor, list[Tensor]]] = []  # each with a buffer of its parts
        with peers(self._group, "averaging of the replicas' tables"):
            for parts in dtype_buckets(tensors, self._bucket_bytes):
                buffer = parts[0] if len(parts) == 1 else torch.cat(parts)
                work = start(buffer)
                assert work is not None, "an asynchronous collective of a member gives its work"
                in_flight.append((work, buffer, parts))
                if len(in_flight) > 1:
                    _wait_for(*in_flight.pop(0))
            for flight in in_flight:
                _wait_for(*flight)


def _wait_for(work: dist.Work, buffer: Tensor, parts: list[Tensor]) -> None:
    work.wait()
    if len(parts) > 1:
        spread(buffer, parts)


def spread(buffer: Tensor, parts: Sequence[Tensor]) -> None:
    """Copy the values of a buffer to the flat parts that lie one after the other in it."""
    for part, values in zip(parts, buffer.split([part.numel() for part in parts]), strict=True):
        part.copy_(values)


class ModelOfCopies(ShardedModel):
    """A sharded model with copies of its tables elsewhere. It has the same state as they have, to write it."""

    def _row_states(self, *kinds: Kind) -> Iterator[RowState]:
        """What this rank holds of these kinds."""
        states = (state for collection in self._sharded for state in row_states(collection, to_write=True))
        return (state for state in states if state.kind in kinds)

    def _weights(self) -> Iterator[tuple[ShardedTable, Tensor]]:
        """This rank's shards per table, and the averages of their rows. Data-parallel tables, which are equal on all
        ranks, have none."""
        for collection in self._sharded:
            for rows in collection.keep_averages(collection.averages) if collection.averages else ():
                rows.settle_averages()  # they are then of the same step in all copies
        for state in self._row_states(Kind.WEIGHT, Kind.AVERAGE):
            if state.dtype.is_floating_point:
                yield from ((state.table, weight) for shard, weight in state.tensors.items() if shard is not None)

    def _states(self) -> Iterator[Tensor]:
        for state in self._row_states(Kind.FUSED):
            yield from (part for shard, part in state.tensors.items() if shard is not None)

    def _averaged(self, options: Replicas) -> list[Tensor]:
        """What is averaged over the copies. A table that was frozen when it was sharded cannot have been trained."""
        weights = (weight for table, weight in self._weights() if any(trains for *_, trains in table.kept))
        return [*weights, *(self._states() if options.sync_optimizer else ())]

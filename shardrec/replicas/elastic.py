"""Replicas that come and go: which of them train together, and the collectives between ranks that hold the same shards.

Each replica is a job of its own, with its own process group, where a rank that dies ends the others. What ties the jobs
together is a store outside of them (a ``TCPStore``) and, for each rank of a replica, a gloo group with the same rank of
the other replicas, its *column*, made again for each *generation*: a list of replicas that train together::

    replica 1 (job, ranks 0 1)    store:  2/arrived   what replicas that want to be in generation 2 say of themselves
    replica 3 (job, ranks 0 1)            2/members   those in it, as the first of them has decided, once
            |  |                          2/left      set when a member of generation 1 has left it
                                          ended       set when the run is over
      column 0  column 1                  beat/3      a number that grows while replica 3 lives

Rank 0 of each replica speaks to the store for it. A collective that fails, or a replica that stops its beat, breaks the
generation: all of its members that live arrive for the next one. A replica that wants to join also arrives, and is
taken when all the members are between two steps.

[Note: who is ahead]
A replica counts the operations between replicas that it has completed. One that has failed in an operation which
another has completed is behind, as is a replica that joins. Those behind take the whole state of the first replica that
is furthest, and none of them adds to the operation that follows. An operation changes nothing before it is complete on
all ranks of a replica, except the tables. Any part of them may have been averaged: they are averaged again.

The idea of a group that is made again without the default process group is from torchft (meta-pytorch/torchft).
"""

from __future__ import annotations

import json
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from time import monotonic, sleep
from typing import Any, Literal, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from shardrec.errors import ConfigError, PeerError
from shardrec.exchange.agree import Ranks, all_gather, on_first_rank
from shardrec.exchange.headers import checksum
from shardrec.replicas.replicas import Replicas, dtype_buckets, spread

Phase = Literal["new", "trains", "ended"]
"""Of a run: before its replicas have met for the first time, while they train, and after its end."""

T = TypeVar("T")

_POLL_S = 0.01


class Arrival(NamedTuple):
    """What a replica says of itself when it arrives: its number (each start has another one), how many operations it
    has completed (-1 before it has any state), the one that it is about to make ("" between two steps), and what must
    be equal in all replicas, in words."""

    replica: int
    completed: int
    operation: str
    agreement: str


class Broken(Exception):
    """A member of the generation is gone, or has left it."""


@dataclass
class _Watch:
    """What a thread sees in the store. Per replica, the last beat and since when. The last generation that was seen to
    be broken. How often a replica has asked to join."""

    patience_s: float
    generation: int = 0
    members: Sequence[int] = ()
    beats: dict[int, tuple[bytes, float]] = field(default_factory=dict)
    broken: int = -1
    requests: int = 0

    def lives(self, store: dist.Store, replica: int) -> bool:
        """Whether the replica's beat has changed lately."""
        key = f"beat/{replica}"
        beat = store.get(key) if store.check([key]) else b""
        if replica not in self.beats or self.beats[replica][0] != beat:
            self.beats[replica] = beat, monotonic()
        return monotonic() - self.beats[replica][1] < self.patience_s

    def run(self, store: dist.Store, replica: int | None, over: threading.Event) -> None:
        """Beat for ``replica``, if it is given, and look at the others."""
        beat = 0
        with suppress(RuntimeError):  # of a store that is gone, which the next meeting will notice
            while not over.wait(self.patience_s / 20):
                if replica is not None:
                    store.set(f"beat/{replica}", str(beat := beat + 1))
                generation, members = self.generation, self.members
                self.requests = store.add("requests", 0)
                if not all([self.lives(store, member) for member in members]) or store.check(
                    [f"{generation + 1}/left"]
                ):
                    self.broken = generation


class ElasticGroup:
    """This rank's column, and the generation that it belongs to. All ranks of a replica make the same calls.

    Args:
        options: of the replicas. ``elastic`` names the store.
        within: this replica's ranks, in a gloo group.
        timeout_s: how long to wait for a replica that lives.

    Attributes:
        agreement: what must be equal in all replicas, in words. Set before they meet.
        most: number of gradients, or more, equal in all replicas. Set before they meet.
        me: this replica's place in the generation.
        size: number of replicas in it.
        is_asked: whether a replica wants to join. Equal in all replicas after an operation.

    Raises:
        PeerError: if no store answers.
    """

    def __init__(self, options: Replicas, within: Ranks, timeout_s: float) -> None:
        assert options.elastic is not None, "the caller has checked"
        self._within, self._timeout_s, self._wanted = within, timeout_s, options.count
        self.agreement, self.most = "", 0
        self._rank = within.rank
        self._name, self._watch = options.elastic, _Watch(options.patience_s)
        self.me, self.size, self.is_asked = 0, 1, False
        self._column: dist.ProcessGroupGloo | None = None
        self._handled, self._failed = 0, False
        self._store = self._asked(self._connect)
        self._replica = self._told(lambda: self._store.add("replicas", 1))
        over = threading.Event()
        weakref.finalize(self, over.set)
        watched = self._store.clone(), None if self._rank else self._replica, over
        threading.Thread(target=self._watch.run, args=watched, name="shardrec-replicas", daemon=True).start()

    def _connect(self) -> Any:  # the stubs of stores lack methods
        address, _, run = self._name.partition("/")
        host, _, port = address.rpartition(":")
        limit = timedelta(seconds=min(self._timeout_s, 60.0))
        store = dist.TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=limit)
        return dist.PrefixStore(f"shardrec/{run}", store)

    # ------------------------------------------------------------------------------------------------- generations

    def meet(self, completed: int, operation: str) -> list[Arrival]:
        """Leave the present generation for the next one. Returns its members, this replica among them.

        Args:
            completed: number of operations that this replica has completed; -1 before it has any state.
            operation: that it is about to make; "" between two steps.

        Raises:
            PeerError: in all ranks of this replica, if no replica is left that has the tables, if one that lives did
                not arrive in time, or if the store is gone.
            ConfigError: if this replica's plan, options or parameters differ from the others'.
        """
        while True:
            self._column = None
            arrivals: list[Arrival]
            arrivals, number = self._told(lambda: self._arrive(completed, operation))
            members = [arrival.replica for arrival in arrivals]
            self._watch.members, self._watch.generation = members, number
            self.me, self.size, self.is_asked = members.index(self._replica), len(members), False
            if self.tried(self._make_column, number, members):
                return arrivals

    def _arrive(self, completed: int, operation: str) -> tuple[list[Arrival], int]:
        store, watch = self._store, self._watch
        give_up = monotonic() + self._timeout_s
        while True:
            number, members = watch.generation + 1, watch.members
            while store.check([f"{number}/members"]):
                number, members = number + 1, [arrival.replica for arrival in self._said(f"{number}/members")]
            if self._replica not in members:
                completed, operation = -1, ""
            # In this order: who has counted a request also finds the arrival.
            is_new = int(self._replica not in members)
            self._handled = store.add("requests", 0) + is_new
            arrival = Arrival(self._replica, completed, operation, self.agreement)
            store.append(f"{number}/arrived", json.dumps(arrival) + "\n")
            store.add("requests", is_new)
            first = self._said(f"{number - 1}/members" if members else f"{number}/arrived")[0]
            if first.agreement != self.agreement:
                raise ConfigError(
                    f"this replica has {self.agreement}, and replica {first.replica} has {first.agreement}: give all "
                    "of them the same"
                )
            if self._failed:
                store.set(f"{number}/left", "")
            while not store.check([f"{number}/members"]):
                self._decide(number, members)
                if monotonic() > give_up:
                    others = f"replicas {list(members)} at" if members else f"{self._wanted} replicas to begin at"
                    text = f"replica {self._replica} waited {self._timeout_s:.3g} s for {others} {self._name}"
                    raise PeerError(text, waited_for="regrouping")
                sleep(_POLL_S)
            arrivals = self._said(f"{number}/members")
            if any(arrival.replica == self._replica for arrival in arrivals):
                return arrivals, number

    def phase(self) -> Phase:
        """Whether the replicas have met, and ended the run. Equal in all ranks of this replica."""

        def look() -> Phase:
            return "ended" if self._store.check(["ended"]) else "trains" if self._store.check(["1/members"]) else "new"

        return self._told(look)

    def end(self) -> None:
        """Set that the run is over."""
        self._told(lambda: self._store.set("ended", ""))

    def awaits_end(self) -> bool:
        """Wait until the first replica has ended the run. False if this is the first, or the first is gone."""

        def look() -> bool | None:
            give_up = monotonic() + self._timeout_s / 4  # this replica's other ranks wait for the answer
            while monotonic() < give_up:
                if self._store.check(["ended"]):
                    return True
                if not self._watch.lives(self._store, self._watch.members[0]):
                    return False
                sleep(_POLL_S)
            return None

        answer: bool | None = None
        while self.me and answer is None:
            answer = self._told(look)
        return bool(answer)

    def _said(self, key: str) -> list[Arrival]:
        return [Arrival(*json.loads(line)) for line in self._store.get(key).splitlines()]

    def _decide(self, number: int, members: Sequence[int]) -> None:
        """Decide who is in a generation, if that falls to this replica and all have arrived that it waits for."""
        store, arrived = self._store, {arrival.replica: arrival for arrival in self._said(f"{number}/arrived")}
        living = {
            replica for replica in {*arrived, *members} if replica == self._replica or self._watch.lives(store, replica)
        }
        if members and not living.intersection(members):
            raise PeerError(
                f"the run at {self._name} has ended: there is nothing to join"
                if store.check(["ended"])
                else f"replicas {list(members)} of generation {number - 1} are gone, and no other has the tables' "
                "state: load a checkpoint in each replica and start them with another name behind the store's address "
                f"({self._name.partition('/')[0]}/NAME)",
                waited_for="regrouping",
            )
        alike = {replica for replica in living if replica in arrived and arrived[replica].agreement == self.agreement}
        awaited = living.intersection(members) if members else alike
        if awaited - arrived.keys() or min(awaited) != self._replica:
            return
        if not any(arrived[replica].operation for replica in awaited):
            awaited = alike  # between two steps
        if len(awaited) >= (1 if members else self._wanted):
            store.set(f"{number}/left", "")
            lines = [json.dumps(arrived[replica]) for replica in sorted(awaited)]
            store.compare_set(f"{number}/members", "", "\n".join(lines))

    def _make_column(self, number: int, members: Sequence[int]) -> None:
        if len(members) == 1:
            return
        limit = timedelta(seconds=max(2.0, self._watch.patience_s))
        prefixed = dist.PrefixStore(f"{number}/column{self._rank}", self._store.clone())
        column = self._watched(partial(dist.ProcessGroupGloo, prefixed, self.me, len(members), limit))
        column._set_default_timeout(timedelta(seconds=self._timeout_s))
        self._column = column

    def _told(self, ask: Callable[[], T]) -> T:
        """What the store has answered rank 0 of this replica. Its error on all ranks."""
        return on_first_rank(lambda: self._asked(ask), self._within, "regrouping")

    def _asked(self, ask: Callable[[], T]) -> T:
        try:
            return ask()
        except (dist.DistNetworkError, dist.DistStoreError) as error:
            raise PeerError(
                f"the replicas' store at {self._name} does not answer ({str(error).splitlines()[0]}): start a "
                "torch.distributed.TCPStore there, in a process that outlives the replicas",
                waited_for="regrouping",
            ) from error

    # -------------------------------------------------------------------------------------------------- operations

    def tried(self, run: Callable[..., None], *given: object) -> bool:
        """Run an operation. Whether all ranks of this replica have completed it."""
        try:
            run(*given)
            completed = True
        except Broken:
            completed = False
        votes = all_gather((completed, self.is_asked), self._within, "vote of the replica")
        completed, self.is_asked = all(vote[0] for vote in votes), any(vote[1] for vote in votes)
        self._failed = not completed
        return completed

    def average_tables(self, tensors: Iterable[Tensor]) -> None:
        """Replace contiguous tensors by their means over the replicas, bit-identical in all of them. After Broken, any
        part of them may be averaged.

        Raises:
            ConfigError: in all replicas, if another makes another operation.
        """
        if self.size == 1:
            return
        self._sum_header("tables", tensors := list(tensors))
        for parts in dtype_buckets(tensors):
            spread(self._sum(torch.cat(parts).div_(self.size)), parts)

    def average_gradients(
        self, gradients: Sequence[Tensor | None], like: Sequence[Tensor], weight: float
    ) -> list[Tensor | None]:
        """The means of the replicas' gradients. A missing gradient counts as zero, if it is not missing everywhere.

        Args:
            gradients: of this replica.
            like: tensors with their shapes and dtypes.
            weight: 1. 0 if this replica has no gradients to add.

        Raises:
            ConfigError: in all replicas, if another makes another operation.
        """
        gradients_here = [gradient if weight else None for gradient in gradients]
        asked = self._rank == 0 and self._watch.requests > self._handled
        if self.size == 1:
            self.is_asked = asked
            return gradients_here
        flags = [weight, asked, *(gradient is not None for gradient in gradients_here)]
        total, requests, *counts = self._sum_header("gradients", like, flags)
        means = [
            None
            if not count
            else torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device)
            if gradient is None
            else gradient.to_dense().contiguous() / total
            for tensor, gradient, count in zip(like, gradients_here, counts, strict=False)
        ]
        for parts in dtype_buckets(mean for mean in means if mean is not None):
            spread(self._sum(torch.cat(parts)), parts)
        self.is_asked = bool(requests)
        return means

    def _sum_header(self, what: str, tensors: Sequence[Tensor], flags: Sequence[float] = ()) -> list[float]:
        """The sums of the replicas' flags, if all are about to average the same: gloo ends a process that receives
        more than it waits for. Headers have one size, whatever follows them."""
        size = sum(tensor.numel() for tensor in tensors)
        number = checksum(f"{what} {size}") % 2**20
        header = torch.zeros(4 + self.most, dtype=torch.float64)
        header[: 2 + len(flags)] = torch.tensor([number, number**2, *flags], dtype=torch.float64)
        total, squares, *sums = self._sum(header).tolist()
        if self.size * squares != total**2:
            raise ConfigError(
                f"this replica averages {size} elements of {what}, and another replica something else: train the same "
                "parameters in all replicas, and call sync_replicas in all of them after the same step"
            )
        return sums

    def copy(self, collective: Literal["send", "recv"], tensors: Iterable[Tensor], place: int) -> None:
        """Send contiguous tensors to the replica at a place in the generation, or take them from there."""
        for parts in dtype_buckets(tensor.detach().view(-1).view(torch.uint8) for tensor in tensors):
            buffer = torch.cat([part.cpu() for part in parts])  # Adam's counts of steps are on the CPU already
            self._done(collective, [buffer], place, 0)
            if collective == "recv":
                spread(buffer, parts)

    def _sum(self, buffer: Tensor) -> Tensor:
        buffer = buffer.cpu()
        self._done("allreduce", [buffer])
        return buffer

    def _done(self, collective: str, *arguments: Any) -> None:
        column, limit = self._column, timedelta(seconds=self._timeout_s)
        if column is None:
            raise Broken
        # A wait with a short limit would close the connections of a send.
        self._watched(lambda: getattr(column, collective)(*arguments).wait(limit))

    def _watched(self, run: Callable[[], T]) -> T:
        """What a call returns that waits for other replicas. It cannot be interrupted, and so can the destructor of a
        group not, which also waits: a thread that has both outlives a generation that is broken."""
        results = list[T]()

        def call() -> None:
            with suppress(RuntimeError):
                results.append(run())

        thread = threading.Thread(target=call, daemon=True)
        thread.start()
        while thread.is_alive():
            if self._watch.broken == self._watch.generation:
                raise Broken
            thread.join(_POLL_S)
        if not results:
            raise Broken
        return results[0]

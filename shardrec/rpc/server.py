"""An embedding server: the shards that a plan gives it, their lookups and updates.

Shapes: S slots of this server, B samples of a request, N ids, D pooled columns of this server.

[Note: an update]
The trainers of one training step push their gradients, each with its ids again: a server keeps nothing between a lookup
and its update, so that a trainer which vanishes leaves nothing behind, and a server that was restarted can continue.
When the last of the trainers has pushed, the gradients of all of them are one update, in the order of the trainers,
which is what the sharded model's backward does with the gradients of all ranks.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice
from pathlib import Path
from time import monotonic
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.futures import Future

from shardrec.checkpoint import load_checkpoint
from shardrec.checkpoint.parts import Rect
from shardrec.checkpoint.save import Written, write_part
from shardrec.checkpoint.state import table_tensors
from shardrec.errors import BusyError, ConfigError, InputError, PeerError, PlanError
from shardrec.layout import ShardingPlan
from shardrec.layout.discover import collections_of, table_shapes
from shardrec.lookup.optimizers import FusedOptimizer
from shardrec.memory import keep_large_blocks
from shardrec.modules.collection import ShardedCollection
from shardrec.modules.shard import put_in_place, sharded_collection
from shardrec.modules.sharded_model import ShardedModel
from shardrec.modules.tied_weights import refuse_ties
from shardrec.rpc.batching import WorkQueue
from shardrec.rpc.messages import (
    Answer,
    Part,
    answer_calls,
    asynchronous,
    check_gradient,
    check_parts,
    complete,
    completed,
    failure,
)
from shardrec.rpc.server_collectives import ServerCollectives
from shardrec.step.context import ModelContext
from shardrec.step.look_up import LookedUp, look_up

_T = TypeVar("_T")

_LONGEST_WINDOW_S = 60.0

_METHODS = frozenset({"describe", "load", "read", "save", "step_counts", "write"})
"""Methods that others may call, on the server's thread between lookups. :meth:`_answer` names further methods."""


class _Lookup(NamedTuple):
    """A fused lookup in a collection.

    Attributes:
        places: of its parts among those that were asked for.
        sizes: elements of the rows per part.
        flat: (sum(sizes),) float32 on the collection's device: the rows of the parts, one part after the other.
        rows: of the collection's lookup groups, which an update needs.
    """

    places: list[int]
    sizes: list[int]
    flat: Tensor
    rows: LookedUp


@dataclass(kw_only=True)
class _Update:
    """An update that trainers push.

    Args:
        key: the run of the trainers and the number of its update.
        trainers: that are to push it.
        rates: learning rate per fused optimizer.
        deadline: on the monotonic clock, of the first push.
        timer: gives the update up at the deadline, if trainers are missing.
        pushes: that have come, by number of the trainer: the parts as they were looked up, and the (n,) float32
            gradient of their rows.
        answer: of all pushes.
    """

    key: tuple[int, int]
    trainers: int
    rates: list[float]
    deadline: float
    timer: threading.Timer
    pushes: dict[int, tuple[list[Part], Tensor]] = field(default_factory=dict)
    answer: Future[Answer] = field(default_factory=Future)


class EmbeddingServer:
    """The shards that a plan gives to one of its ranks, looked up and updated over RPC.

    Requests wait in a bounded queue. One thread serves what is there as one fused lookup per collection, or one fused
    update per training step, and completes their Futures. Its methods :meth:`lookup` and :meth:`update` run under
    ``torch.distributed.rpc.functions.async_execution``: no RPC thread waits for tables.

    One server is made per process, before ``init_rpc``. Trainers find it by the name of the process.

    Args:
        model: the model with the tables to serve, on the CPU, on ``device`` or on meta. Is changed in place, as by
            :func:`shardrec.shard`. Optimizers given by ``apply_optimizer_in_backward`` are fused.
        plan: where each table goes among the servers.
        rank: of this server in the plan.
        servers: RPC names of all servers, by rank. Default: ``server0`` and on.
        device: of the shards. Default: the CPU.
        capacity: lookups that may wait, and updates that wait for their other trainers. One more is answered with
            BusyError.
        window_s: seconds to wait for more lookups after the first of a batch; by default, a batch is what has come
            while the previous lookup ran.
        max_requests: lookups of a batch.
        read_only: refuse updates.

    Raises:
        PlanError: if the plan does not fit the model, or lacks the rank.
        ConfigError: if the model lacks tables, or has a table that cannot be served.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: ShardingPlan,
        rank: int,
        *,
        servers: Sequence[str] | None = None,
        device: torch.device | str | None = None,
        capacity: int = 256,
        window_s: float = 0.0,
        max_requests: int = 64,
        read_only: bool = False,
    ) -> None:
        if not 0 <= rank < plan.world_size:
            raise PlanError(f"server {rank} is asked for, and the plan is for {plan.world_size} servers")
        if capacity < 1 or max_requests < 1 or not 0 <= window_s < _LONGEST_WINDOW_S:
            raise ConfigError(
                f"capacity={capacity}, max_requests={max_requests}, window_s={window_s}. Give at least 1, at least 1, "
                f"and a time from 0 to {_LONGEST_WINDOW_S:.0f} seconds"
            )
        refuse_ties(model)
        plan.check_tables(table_shapes(model))
        target = torch.device(device or "cpu")
        if target.type == "cpu":
            keep_large_blocks()
        self.rank, self.read_only = rank, read_only
        names = list(servers) if servers is not None else [f"server{number}" for number in range(plan.world_size)]
        if len(names) != plan.world_size:
            raise ConfigError(f"servers={names}. Give a name for each of the plan's {plan.world_size} ranks")
        self.between = ServerCollectives(rank, names)
        context = ModelContext(self.between, target)
        collections: dict[str, ShardedCollection] = {}
        replaced: dict[int, ShardedCollection] = {}
        for path, module in collections_of(model).items():
            collections[path] = replaced[id(module)] = sharded_collection(
                module, plan, path=path, device=target, context=context
            )
        if not collections:
            raise ConfigError(f"{type(model).__name__} holds no torchrec embedding collection to serve")
        self.model = ShardedModel(put_in_place(model, replaced), plan, context, None)
        self._paths = list(collections)
        self._collections = list(collections.values())
        self._optimizers = fused_optimizers_of(self._collections)
        self._no_updates = (
            "this server is read-only. Train with servers that are not" if read_only else _no_updates(self._collections)
        )
        self._capacity = capacity
        self._updates: dict[tuple[int, int], _Update] = {}  # their pushes are still to come
        self._next: dict[int, int] = {}  # of the present run, the update that comes next
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._queue = WorkQueue(self._look_up, capacity=capacity, window_s=window_s, max_requests=max_requests)
        answer_calls(self._answer)

    @asynchronous
    def lookup(self, parts: list[Part]) -> Future[Answer]:
        """Look up the rows of a request.

        Args:
            parts: see :mod:`shardrec.rpc.messages`.

        Returns:
            Future of the answer: per part, one after the other, (B, D) pooled sums or (N, w) rows per lookup group, as
            one flat float32 tensor on the CPU.
        """
        try:
            return self._queue.look_up(check_parts(parts, self._collections))
        except Exception as error:
            return completed(failure(error))

    @asynchronous
    def update(
        self,
        update: tuple[int, int],
        trainer: tuple[int, int],
        wait_s: float,
        rates: list[float],
        parts: list[Part],
        gradient: Tensor,
    ) -> Future[Answer]:
        """Update the tables when the gradients of all trainers have arrived.

        Args:
            update: the run of the trainers and the number of its update. The same on all trainers. Updates are made in
                this order.
            trainer: number of the trainer, and of trainers.
            wait_s: seconds to wait for the other trainers.
            rates: learning rate per fused optimizer of the model.
            parts: as they were looked up.
            gradient: (n,) float32, of the lookup's result.

        Returns:
            Future of the answer, which is 0. Completed when the update is made.
        """
        try:
            if self._no_updates:
                raise ConfigError(self._no_updates)
            pushed = check_parts(parts, self._collections), check_gradient(gradient)
            with self._lock:
                begun = self._begun(update, trainer, wait_s, rates)
                begun.pushes[trainer[0]] = pushed
                self._updates[update] = begun
                self._queue_updates(update[0])
                if update in self._updates and not begun.timer.is_alive():
                    begun.timer.start()
        except Exception as error:
            return completed(failure(error))
        return begun.answer

    def _begun(self, key: tuple[int, int], trainer: tuple[int, int], wait_s: float, rates: list[float]) -> _Update:
        """The update that a trainer pushes, which others may have begun. The caller holds the lock."""
        number, trainers = trainer
        update = self._updates.get(key)
        if update is None:
            if len(self._updates) >= self._capacity:
                raise BusyError(f"{len(self._updates)} updates wait for their other trainers. Nothing was done")
            timer = threading.Timer(wait_s, self._give_up, [key])
            timer.daemon = True
            end = monotonic() + wait_s
            update = _Update(key=key, trainers=trainers, rates=list(rates), deadline=end, timer=timer)
        if not 0 <= number < trainers == update.trainers:
            raise InputError(
                f"trainer {number} of {trainers} pushes update {key[1]}, which is one of {update.trainers} trainers. "
                "Start all trainers as one job"
            )
        if number in update.pushes:
            raise InputError(f"trainer {number} of {trainers} has pushed update {key[1]} already")
        return update

    def _queue_updates(self, run: int) -> None:
        """Queue the updates of a run that are complete, in their order, with the lock held."""
        for key in sorted(key for key in self._updates if key[0] == run):
            update = self._updates[key]
            if len(update.pushes) < update.trainers or key[1] > self._next.get(run, key[1]):
                return
            del self._updates[key]
            update.timer.cancel()
            self._next = {run: max(key[1] + 1, self._next.get(run, 0))}
            self._queue.submit(partial(self._update, update), update.answer)

    def _give_up(self, key: tuple[int, int]) -> None:
        """Fail an update that other trainers have not joined, or an update before it."""
        with self._lock:
            update = self._updates.pop(key, None)
        if update is not None:
            trainers = ", ".join(map(str, sorted(update.pushes)))
            error = PeerError(
                f"of update {key[1]} only the gradients of trainer(s) {trainers} have come in time. The others, or an "
                "update before it, are missing. Nothing of it was applied: start the trainers again from the last "
                "checkpoint"
            )
            complete(update.answer, failure(error))

    def _answer(self, method: str, arguments: Sequence[Any]) -> Future[Answer]:
        """Answer a call of another process."""
        if method == "lookup":
            return self.lookup(*arguments)
        if method == "update":
            return self.update(*arguments)
        if method == "take_rows":  # for which the server's thread waits
            self.between.put(*arguments)
            return completed((True, 0))
        if method not in _METHODS:
            error = PeerError(f"a server lacks the method {method!r}. Use one release of shardrec everywhere")
            return completed(failure(error))
        return self._queue.submit(lambda: getattr(self, method)(*arguments))

    def describe(self) -> dict[str, object]:
        """A description and statistics of this server, as plain data."""
        return {
            "rank": self.rank,
            "servers": self.model.plan.world_size,
            "plan": self.model.plan.fingerprint,
            "collections": self._paths,
            "optimizers": [repr(optimizer) for optimizer in self._optimizers],
            "read_only": self.read_only,
            **{key: self._counts[key] for key in ("requests", "lookups", "updates")},
        }

    def step_counts(self) -> dict[str, int]:
        """Per table, the updates that its fused optimizer has made, where this server holds a part of it."""
        return {name: count for collection in self._collections for name, count in collection.step_counts().items()}

    def read(self, table: str, state: str) -> list[tuple[list[int], Tensor]]:
        """This server's shards of a table, or of a state of its fused optimizer.

        Args:
            table: by its name in the plan.
            state: name of a state; "" for the weights.

        Returns:
            Per shard, ``[row_start, row_end, col_start, col_end]`` and a copy on the CPU.
        """
        collection, name = self._owner(table)
        tensors = collection.fused_state(name, state) if state else collection.tables()[name].tensors()
        return [([*Rect.of(shard)], values.cpu().clone()) for shard, values in tensors.items() if shard is not None]

    def write(self, table: str, rect: list[int], values: Tensor) -> int:
        """Set a shard's weights, rounded to the table's dtype.

        Args:
            table: by its name in the plan.
            rect: of the shard, as :meth:`read` gives it.
            values: (rows, cols).
        """
        collection, name = self._owner(table)
        for shard, weight in collection.tables()[name].tensors(to_write=True).items():
            if shard is not None and [*Rect.of(shard)] == rect and tuple(values.shape) == tuple(weight.shape):
                weight.copy_(values)
                return 0
        raise InputError(f"table {table!r} has no shard {rect} of shape {tuple(values.shape)} on server {self.rank}")

    def save(self, data: str, number: int) -> Written:
        """Write this server's shards into a checkpoint's data folder, as file ``number``.

        Returns:
            The file and its contents.
        """
        return write_part(Path(data), number, table_tensors(self.model))

    def load(self, folder: str) -> int:
        """Load this server's shards from a checkpoint, whichever plan it was saved under.

        Raises:
            CheckpointError: if it is damaged or incomplete.
            ConfigError: if it is one of another model.
        """
        load_checkpoint(folder, self.model)
        with self._lock:
            self._next = {}  # updates that were lost before it do not come any more
        return 0

    def close(self) -> None:
        """End the server's thread. What waits is answered with BusyError."""
        self._queue.close()

    def _owner(self, table: str) -> tuple[ShardedCollection, str]:
        for collection in self._collections:
            for name, entry in collection.tables().items():
                if entry.layout.name == table and any(shard is not None for shard in entry.locals):
                    return collection, name
        raise ConfigError(f"table {table!r} has no shard on server {self.rank}. Ask the servers that the plan names")

    def _look_up(self, requests: Sequence[list[Part]]) -> list[Tensor]:
        """Several lookups: their rows on the CPU, one part after the other."""
        with torch.no_grad():
            lookups = self._serve(list(chain.from_iterable(requests)))
        rows: dict[int, Tensor] = {}
        for lookup in lookups:
            rows |= zip(lookup.places, lookup.flat.cpu().split(lookup.sizes), strict=True)
        self._counts["lookups"] += len(lookups)
        self._counts["requests"] += len(requests)
        in_turn = (rows[place] for place in range(len(rows)))
        nothing = torch.empty(0, dtype=torch.float32)
        return [torch.cat([*islice(in_turn, len(request))]) if request else nothing for request in requests]

    def _update(self, update: _Update) -> int:
        """One update of the trainers' gradients. See [Note: an update]."""
        pushes = [update.pushes[number] for number in sorted(update.pushes)]
        self.between.begin(update.key, update.deadline)
        numbers = [[part[0] for part in parts] for parts, _ in pushes]
        if any(of_push != numbers[0] for of_push in numbers) or len(update.rates) != len(self._optimizers):
            raise InputError(
                f"the trainers push gradients of collections {numbers}, with {len(update.rates)} learning rates for "
                f"{len(self._optimizers)} optimizers. Give all of them the same model"
            )
        for optimizer, rate in zip(self._optimizers, update.rates, strict=True):
            for collection in self._collections:
                collection.set_learning_rate(optimizer, float(rate))
        with torch.no_grad():
            lookups = self._serve(_alternating([parts for parts, _ in pushes]), to_update=True)
            size_of = dict(pair for lookup in lookups for pair in zip(lookup.places, lookup.sizes, strict=True))
            sizes = [size_of[place] for place in range(len(size_of))]
            sizes_of = [sizes[trainer :: len(pushes)] for trainer in range(len(pushes))]
            wanted, got = list(map(sum, sizes_of)), [gradient.numel() for _, gradient in pushes]
            if got != wanted:
                raise InputError(f"the trainers push {got} gradients for {wanted} values that they looked up")
            split = [gradient.split(of_parts) for (_, gradient), of_parts in zip(pushes, sizes_of, strict=True)]
            gradients = _alternating(split)
            for lookup in lookups:
                received = lookup.rows.received
                gradient = torch.cat([gradients[place] for place in lookup.places]).to(received.lengths.device)
                of_rows, _ = lookup.rows.plan.output.returned(gradient, received)
                lookup.rows.update(of_rows, is_last=True)
        self._counts["updates"] += 1
        return 0

    def _serve(self, parts: Sequence[Part], *, to_update: bool = False) -> list[_Lookup]:
        """One fused lookup for each collection that is asked for."""
        lookups = []
        for number, collection in enumerate(self._collections):
            places = [place for place, part in enumerate(parts) if part[0] == number]
            if places:
                plan = collection.step_plan
                headers = [parts[place][1] for place in places]
                words = [parts[place][2].to(collection.device) for place in places]
                rows = look_up(plan, plan.input.payload.unpack(words, headers), to_update=to_update)
                flat, out = plan.output.outgoing(rows.rows, rows.received)
                sizes = [sum(height * width for height, width in shapes) for shapes in out]
                lookups.append(_Lookup(places, sizes, flat, rows))
        return lookups


def _alternating(of_trainers: Sequence[Sequence[_T]]) -> list[_T]:
    """What all trainers have in the first place, in their order, and then in the others."""
    return [item for of_place in zip(*of_trainers, strict=True) for item in of_place]


def fused_optimizers_of(collections: Sequence[ShardedCollection]) -> list[FusedOptimizer]:
    """The distinct fused optimizers of a model, in an order that servers and trainers share."""
    return list(dict.fromkeys(optimizer for each in collections for optimizer in each.fused_optimizers().values()))


def _no_updates(collections: Sequence[ShardedCollection]) -> str:
    """Why the tables cannot be trained on servers, or ""."""
    for collection in collections:
        fused = collection.fused_optimizers()
        for name, table in collection.tables().items():
            if not table.layout.replicated and name not in fused and name not in collection.frozen:
                return (
                    f"table {table.layout.name!r} lacks an optimizer that a server could run. Give it one with "
                    "apply_optimizer_in_backward, or freeze it"
                )
    return ""

"""An embedding server: the shards that a plan gives it, their lookups and updates.

Shapes: S slots of this server, B samples of a request, N ids, D pooled columns of this server.

[Note: an update]
The trainers of one training step push their gradients, each with its ids again: a server keeps nothing between a lookup
and its update, so that a trainer which vanishes leaves nothing behind, and a server that was restarted can go on. When
the last of the trainers has pushed, the gradients of all of them are one update, in the order of the trainers, which is
what the sharded model's backward does with the gradients of all ranks.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.rpc.functions import async_execution
from torch.futures import Future

from shardrec.checkpoint import load_checkpoint
from shardrec.checkpoint.save import write_part
from shardrec.checkpoint.state import table_tensors
from shardrec.errors import BusyError, ConfigError, InputError, PeerError, PlanError
from shardrec.layout import Shard, ShardingPlan
from shardrec.layout.discover import collections_of, table_shapes
from shardrec.lookup.optimizers import FusedOptimizer
from shardrec.memory import keep_large_blocks
from shardrec.modules.collection import ShardedCollection
from shardrec.modules.shard import put_in_place, sharded_collection
from shardrec.modules.sharded_model import ShardedModel
from shardrec.modules.tied_weights import refuse_ties
from shardrec.rpc.batching import Request, RequestQueue, complete
from shardrec.rpc.messages import Answer, Part, check_gradient, check_parts, failure
from shardrec.rpc.server_collectives import ServerCollectives
from shardrec.step.context import ModelContext
from shardrec.step.look_up import LookedUp
from shardrec.step.look_up import look_up as look_up_rows

__all__ = ["EmbeddingServer", "call", "fused_optimizers_of", "look_up", "push", "take_rows"]

_IDLE_S = 60.0

_F = TypeVar("_F", bound=Callable[..., Future[Answer]])


def _asynchronous(function: _F) -> _F:
    """``async_execution`` with types: the function that RPC is given must be the one that it returns."""
    marked: _F = async_execution(function)
    return marked


@dataclass(frozen=True, kw_only=True)
class _Push:
    """A trainer's gradients of one step: ``gradient`` (n,) float32, of the rows of its ``parts``, as they were sent."""

    parts: list[Part]
    gradient: Tensor
    deadline: float
    answer: Future[Answer] = field(default_factory=Future)


@dataclass
class _Pushes:
    """The parts of an update that trainers have pushed, by number of the trainer."""

    trainers: int
    rates: list[float]
    of: dict[int, _Push] = field(default_factory=dict)

    def deadline(self) -> float:
        return min(push.deadline for push in self.of.values())

    def answer(self, answer: Answer) -> None:
        for push in self.of.values():
            complete(push.answer, answer)

    def answered(self, made: Future[Answer]) -> None:
        self.answer(made.value())


class EmbeddingServer:
    """The shards that a plan gives to one of its ranks, looked up and updated over RPC.

    Requests wait in a bounded queue; one thread serves what is there as one fused lookup per collection, or one fused
    update per training step, and completes the Future of each. Its methods :meth:`lookup` and :meth:`update` run under
    ``torch.distributed.rpc.functions.async_execution``: no RPC thread waits for tables.

    One server is made per process, before ``init_rpc``; trainers find it by the name of the process.

    Args:
        model: the model whose tables are served, on the CPU, on ``device`` or on meta; is changed in place, as by
            :func:`shardrec.shard`. Optimizers given by ``apply_optimizer_in_backward`` are fused.
        plan: where each table goes among the servers.
        rank: of this server in the plan.
        servers: RPC names of all servers, by rank; default: ``server0`` and on.
        device: of the shards; default: the CPU.
        capacity: lookups that may wait, and updates that wait for their other trainers; one more is answered with
            BusyError. window_s: seconds to wait for more lookups after the first of a batch; by default, a batch is
                what has come
            while the one before was looked up.
        max_requests: lookups of a batch.
        read_only: refuse updates.

    Raises:
        PlanError: if the plan does not fit the model, or has no such rank.
        ConfigError: if the model has no tables, or one that cannot be served.
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
        if capacity < 1 or max_requests < 1 or not 0 <= window_s < _IDLE_S:
            raise ConfigError(
                f"capacity={capacity}, max_requests={max_requests}, window_s={window_s}; give at least 1, at least 1, "
                f"and a time from 0 to {_IDLE_S:.0f} seconds"
            )
        refuse_ties(model)
        plan.check_tables(table_shapes(model))
        target = torch.device(device or "cpu")
        if target.type == "cpu":
            keep_large_blocks()
        self.rank, self.read_only = rank, read_only
        names = list(servers) if servers is not None else [f"server{number}" for number in range(plan.world_size)]
        if len(names) != plan.world_size:
            raise ConfigError(f"servers={names}; give a name for each of the plan's {plan.world_size} ranks")
        self.between = ServerCollectives(rank, names, take_rows)
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
            "this server is read-only; train with servers that are not" if read_only else _no_updates(self._collections)
        )
        self._capacity = capacity
        self._pushes: dict[tuple[int, int], _Pushes] = {}
        self._next: dict[int, int] = {}  # of the present run, the update that comes next
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._queue = RequestQueue(
            self._look_up, self._expire, capacity=capacity, window_s=window_s, max_requests=max_requests
        )
        global _SERVER
        _SERVER = self

    @_asynchronous
    def lookup(self, parts: list[Part]) -> Future[Answer]:
        """Look up the rows of a request.

        Args:
            parts: see :mod:`shardrec.rpc.messages`.

        Returns:
            Future of the answer: per part, one after the other, (B, D) pooled sums or (N, w) rows per lookup group, as
            one flat float32 tensor on the CPU.
        """
        return self._answered(lambda: Request(parts=check_parts(parts, self._collections)))

    @_asynchronous
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
            update: the run of the trainers and the number of its update; the same on all trainers. Updates are made in
                this order.
            trainer: number of the trainer, and of trainers.
            wait_s: seconds to wait for the other trainers.
            rates: learning rate of each of the model's fused optimizers.
            parts: as they were looked up.
            gradient: (n,) float32, of the lookup's result.

        Returns:
            Future of the answer, which is 0; completed when the update is made.
        """
        try:
            if self._no_updates:
                raise ConfigError(self._no_updates)
            checked = check_parts(parts, self._collections)
            pushed = _Push(parts=checked, gradient=check_gradient(gradient), deadline=monotonic() + wait_s)
            number, trainers = trainer
            with self._lock:
                if update not in self._pushes and len(self._pushes) >= self._capacity:
                    raise BusyError(f"{len(self._pushes)} updates wait for their other trainers; nothing was done")
                pushes = self._pushes.get(update) or _Pushes(trainers, list(rates))
                if not 0 <= number < trainers == pushes.trainers:
                    raise InputError(
                        f"trainer {number} of {trainers} pushes update {update[1]}, which is one of {pushes.trainers} "
                        "trainers; start all trainers as one job"
                    )
                if number in pushes.of:
                    raise InputError(f"trainer {number} of {trainers} has pushed update {update[1]} already")
                pushes.of[number] = pushed
                self._pushes[update] = pushes  # once it has a push: its deadline is that of its pushes
                self._queue_updates(update[0])
            self._queue.wake()
        except Exception as error:
            return _failed(error)
        return pushed.answer

    def _queue_updates(self, run: int) -> None:
        """Queue the updates of a run that are complete, in their order, with the lock held."""
        for update in sorted(update for update in self._pushes if update[0] == run):
            pushes = self._pushes[update]
            if len(pushes.of) < pushes.trainers or update[1] > self._next.get(run, update[1]):
                return
            del self._pushes[update]
            self._next = {run: max(update[1] + 1, self._next.get(run, 0))}
            done = self._answered(partial(Request, work=partial(self._update, update, pushes)))
            done.add_done_callback(pushes.answered)

    def submit(self, work: Callable[[], Any]) -> Future[Answer]:
        """Have the server's thread do ``work`` between lookups; the answer's value is what it returns."""
        return self._answered(lambda: Request(work=work))

    def describe(self) -> dict[str, Any]:
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
        held = collection.fused_state(name, state) if state else collection.tables()[name].tensors()
        return [(_rect(shard), values.cpu().clone()) for shard, values in held.items() if shard is not None]

    def write(self, table: str, rect: list[int], values: Tensor) -> int:
        """Set a shard's weights, rounded to the table's dtype.

        Args:
            table: by its name in the plan.
            rect: of the shard, as :meth:`read` gives it.
            values: (rows, cols).
        """
        collection, name = self._owner(table)
        for shard, weight in collection.tables()[name].tensors(to_write=True).items():
            if shard is not None and _rect(shard) == rect and tuple(values.shape) == tuple(weight.shape):
                weight.copy_(values)
                return 0
        raise InputError(f"table {table!r} has no shard {rect} of shape {tuple(values.shape)} on server {self.rank}")

    def save(self, data: str, number: int) -> list[Any]:
        """Write this server's shards into a checkpoint's data folder, as file ``number``.

        Returns:
            The file, and what is in it, as JSON-compatible data.
        """
        file, tensors = write_part(Path(data), number, table_tensors(self.model))
        return [asdict(file), {name: tensor.to_json() for name, tensor in tensors.items()}]

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
        """End the server's thread; what waits is answered with BusyError."""
        self._queue.close()

    def _answered(self, make: Callable[[], Request]) -> Future[Answer]:
        """Queue a request; what is wrong with it is the answer."""
        try:
            request = make()
            self._queue.put(request)
        except Exception as error:
            return _failed(error)
        return request.answer

    def _owner(self, table: str) -> tuple[ShardedCollection, str]:
        for collection in self._collections:
            for name, entry in collection.tables().items():
                if entry.layout.name == table and any(shard is not None for shard in entry.locals):
                    return collection, name
        raise ConfigError(f"table {table!r} has no shard on server {self.rank}; ask the servers that the plan names")

    def _look_up(self, requests: Sequence[Request]) -> None:
        """Answer several lookups, with one fused lookup per collection."""
        rows_of: list[list[Tensor]] = [
            [torch.empty(0, dtype=torch.float32)] * len(request.parts) for request in requests
        ]
        try:
            with torch.no_grad():
                for number, collection in enumerate(self._collections):
                    places = [
                        (owner, place)
                        for owner, request in enumerate(requests)
                        for place, part in enumerate(request.parts)
                        if part[0] == number
                    ]
                    if places:
                        parts = [requests[owner].parts[place] for owner, place in places]
                        flat, sizes = _rows(self._look_up_parts(collection, parts))
                        for (owner, place), piece in zip(places, flat.cpu().split(sizes), strict=True):
                            rows_of[owner][place] = piece
                        self._counts["lookups"] += 1
            answers: list[Answer] = [
                (True, torch.cat(pieces) if pieces else torch.empty(0, dtype=torch.float32)) for pieces in rows_of
            ]
        except Exception as error:
            answers = [failure(error)] * len(requests)
        self._counts["requests"] += len(requests)
        for request, answer in zip(requests, answers, strict=True):
            complete(request.answer, answer)

    def _update(self, update: tuple[int, int], of_trainers: _Pushes) -> int:
        """One update of the trainers' gradients; see [Note: an update]."""
        pushes = [of_trainers.of[number] for number in sorted(of_trainers.of)]
        rates = of_trainers.rates
        self.between.begin(update, of_trainers.deadline())
        numbers = [[part[0] for part in push.parts] for push in pushes]
        if any(of_push != numbers[0] for of_push in numbers) or len(rates) != len(self._optimizers):
            raise InputError(
                f"the trainers push gradients of collections {numbers}, with {len(rates)} learning rates for "
                f"{len(self._optimizers)} optimizers; give all of them the same model"
            )
        for optimizer, rate in zip(self._optimizers, rates, strict=True):
            for collection in self._collections:
                collection.set_learning_rate(optimizer, float(rate))
        together = [
            [place for place, collection_number in enumerate(numbers[0]) if collection_number == number]
            for number in sorted(set(numbers[0]))
        ]
        with torch.no_grad():
            looked_up = [
                self._look_up_parts(
                    self._collections[numbers[0][places[0]]],
                    [push.parts[place] for place in places for push in pushes],
                    to_update=True,
                )
                for places in together
            ]
            sizes = [[0] * len(numbers[0]) for _ in pushes]  # per trainer and place
            for places, rows in zip(together, looked_up, strict=True):
                owners = ((owner, place) for place in places for owner in range(len(pushes)))
                for (owner, place), size in zip(owners, _rows(rows)[1], strict=True):
                    sizes[owner][place] = size
            wanted, got = list(map(sum, sizes)), [push.gradient.numel() for push in pushes]
            if numbers[0] and got != wanted:
                raise InputError(f"the trainers push {got} gradients for {wanted} values that they looked up")
            pieces = [push.gradient.split(of_places) for push, of_places in zip(pushes, sizes, strict=True)]
            for places, rows in zip(together, looked_up, strict=True):
                gradient = torch.cat([of_push[place] for place in places for of_push in pieces])
                received = rows.received
                of_rows, _ = rows.plan.output.returned(gradient.to(received.lengths.device), received)
                rows.update(of_rows, is_last=True)
        self._counts["updates"] += 1
        return 0

    def _look_up_parts(
        self, collection: ShardedCollection, parts: Sequence[Part], *, to_update: bool = False
    ) -> LookedUp:
        """The rows of this server's shards for parts of requests."""
        plan, device = collection.step_plan, collection.device
        headers, words = [part[1] for part in parts], [part[2].to(device) for part in parts]
        return look_up_rows(plan, plan.input.payload.unpack(words, headers), to_update=to_update)

    def _expire(self) -> float:
        """Give up updates whose other trainers have not come; returns the seconds until the next may be due."""
        now = monotonic()
        with self._lock:
            late = {
                update: self._pushes.pop(update)
                for update in list(self._pushes)
                if self._pushes[update].deadline() <= now
            }
            due = min((pushes.deadline() for pushes in self._pushes.values()), default=now + _IDLE_S)
        for update, pushes in late.items():
            error = PeerError(
                f"of update {update[1]} only the gradients of trainer(s) {', '.join(map(str, sorted(pushes.of)))} have "
                "come in time; the others, or an update before it, are missing. Nothing of it was applied: start the "
                "trainers again from the last checkpoint"
            )
            pushes.answer(failure(error))
        return due - now


def fused_optimizers_of(collections: Sequence[ShardedCollection]) -> list[FusedOptimizer]:
    """The distinct fused optimizers of a model, in an order that servers and trainers share."""
    return list(dict.fromkeys(optimizer for each in collections for optimizer in each.fused_optimizers().values()))


def _no_updates(collections: Sequence[ShardedCollection]) -> str:
    """Why the tables cannot be trained on servers, or ""."""
    for collection in collections:
        fused = collection.fused_optimizers()
        for name, table in collection.tables().items():
            layout = table.layout
            if layout.replicated or name in collection.frozen:
                continue
            if name not in fused:
                return (
                    f"table {layout.name!r} has no optimizer that a server could run; give it one with "
                    "apply_optimizer_in_backward, or freeze it"
                )
    return ""


def _rows(looked_up: LookedUp) -> tuple[Tensor, list[int]]:
    """What was looked up, flat, one request after the other, and the elements of each."""
    flat, out = looked_up.plan.output.outgoing(looked_up.rows, looked_up.received)
    return flat, [sum(rows * cols for rows, cols in shapes) for shapes in out]


def _rect(shard: Shard) -> list[int]:
    return [shard.row_start, shard.row_end, shard.col_start, shard.col_end]


_SERVER: EmbeddingServer | None = None
"""Of this process."""

_METHODS = frozenset({"describe", "load", "read", "save", "step_counts", "write"})


def _failed(error: Exception) -> Future[Answer]:
    """An error as an answer that is already complete."""
    future: Future[Answer] = Future()
    future.set_result(failure(error))
    return future


def _refused() -> Future[Answer]:
    return _failed(PeerError("there is no embedding server in this process; is the name a trainer's?"))


@_asynchronous
def look_up(parts: list[Part]) -> Future[Answer]:
    """:meth:`EmbeddingServer.lookup` of the server in the process that this is called in."""
    return _refused() if _SERVER is None else _SERVER.lookup(parts)


@_asynchronous
def push(*args: Any) -> Future[Answer]:
    """:meth:`EmbeddingServer.update` of the server in the process that this is called in."""
    return _refused() if _SERVER is None else _SERVER.update(*args)


@_asynchronous
def call(method: str, *args: Any) -> Future[Answer]:
    """Another method of that server, on its thread, between lookups."""
    if _SERVER is None or method not in _METHODS:
        return _refused()
    server = _SERVER
    return server.submit(lambda: getattr(server, method)(*args))


def take_rows(key: tuple[int, int, int, int], rows: Tensor) -> None:
    """Sums of squares from another server, for the update that ``key`` names."""
    if _SERVER is not None:
        _SERVER.between.put(key, rows)

"""A sharded model with replicas that are jobs of their own, which may die and come back
(:mod:`shardrec.replicas.elastic`).

::

    forward    a replica asks to join: all take it in here, between two steps; the tables are averaged, if that is due
    backward   the tables are updated; the dense gradients are averaged, in the replica, then over the replicas
    step       the optimizers of the dense part

A replica that dies breaks the operation between replicas that is under way, or the next one. The others make it again
without it: each still has its gradients, and their mean is then taken over the replicas that are left.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from shardrec._dynamo import left_alone
from shardrec.errors import ConfigError, PeerError
from shardrec.exchange.agree import gloo_ranks
from shardrec.exchange.backward_watch import weak_hook
from shardrec.exchange.headers import checksum
from shardrec.exchange.subgroups import end_with
from shardrec.exchange.transport import timeout_s
from shardrec.layout import ShardingPlan
from shardrec.modules.dense import DenseOptions, DenseWrap
from shardrec.modules.inventory import Item, Kind
from shardrec.replicas.elastic import ElasticGroup, Phase
from shardrec.replicas.replicas import ModelOfCopies, Replicas
from shardrec.step.context import ModelContext

if TYPE_CHECKING:
    from torch.distributed.checkpoint.stateful import Stateful

_SYNC = "sync_replicas"


class ElasticModel(ModelOfCopies):
    """The result of :func:`shardrec.shard` with ``replicas=Replicas(..., elastic=...)``: a :class:`ShardedModel` that
    is trained together with the replicas of other jobs, which may die and come back.

    Call :meth:`join` before the first step, and train while :attr:`steps` is below the number of steps. Gradients and
    tables are averaged as in a :class:`ReplicatedModel`, over the replicas that are there. Each averaging of gradients
    is a step. A checkpoint of one replica has its copy of the tables.

    Args:
        module: the model, its collections already sharded inside the replica.
        plan: where the tables are inside a replica.
        context: shared by the sharded collections.
        group: the process group of this replica's ranks, also of a single rank.
        options: the store's address, and how often the tables are averaged.
        dense: who averages the dense part's gradients inside the replica.

    Attributes:
        steps: training steps that this replica and those that it has joined have completed.
            :meth:`Checkpoints.load_last` sets it. After :func:`load_checkpoint`, set it before :meth:`join`.
        replicas: number of replicas that train together: in the step under way, or in the last one.
        place: of this replica among them, from 0. The first replica saves.
        phase: ``"new"`` before the replicas have met for the first time, ``"trains"``, or ``"ended"`` after
            :meth:`end`. All ranks of a replica read it together.
    """

    def __init__(
        self,
        module: nn.Module,
        plan: ShardingPlan,
        context: ModelContext,
        group: dist.ProcessGroup,
        *,
        options: Replicas,
        dense: DenseWrap | DenseOptions = "ddp",
    ) -> None:
        super().__init__(module, plan, context, group, dense=dense)
        context.life_cycle.gradients_averaged.append(weak_hook(self._average_gradients))
        context.life_cycle.forward_begins.insert(0, weak_hook(self.begin))
        self._options = options
        self._stateful: tuple[Stateful, ...] = ()
        self.steps, self._since_sync, self._is_in_step, self._operations = 0, 0, False, -1
        self._next = ""  # what the furthest replica was about to do when this one took its state
        within = gloo_ranks(self.ranks, "start of the replicas")
        self._group = ElasticGroup(options, within, timeout_s(group, context.device))
        end_with(self._group, within.group)

    @property
    def replicas(self) -> int:
        return self._group.size

    @property
    def place(self) -> int:
        return self._group.me

    @property
    def phase(self) -> Phase:
        return self._group.phase()

    def scaler_fault(self) -> str:
        return (
            "its elastic replicas are jobs of their own, which do not agree on the steps to skip: compute in bfloat16, "
            "which needs no GradScaler, or give Replicas without elastic="
        )

    @left_alone
    def join(self, *stateful: Stateful) -> None:
        """Join the other replicas. Every rank calls it, once, before the first step.

        At the start it waits until ``Replicas.count`` replicas have come. All take the state of the first of them.
        Later it waits until the others are between two steps, and takes their state: tables, states and settings of
        fused optimizers and of optimizers in backward, dense parameters, buffers, :attr:`steps`, and that of
        ``stateful``.

        Args:
            stateful: the ordinary optimizers, and whatever else has a state that a replica takes when it joins.

        Raises:
            PeerError: if the replicas that trained together are all gone or do not answer, or the store is gone.
            ConfigError: if plan, options or parameters differ from the others'.
        """
        self._stateful, plan, options = stateful, self.plan, self._options
        tensors = [*self.named_parameters(), *self.named_buffers()]
        names = [f"{name} {tuple(tensor.shape)} {tensor.dtype}" for name, tensor in tensors]
        names += [f"{state.kind} {state.table.layout.name} {state.name}" for state in self._row_states(*Kind)]
        fused = [optimizer for collection in self._sharded for optimizer in collection.fused_optimizers().values()]
        kinds = (
            sorted({optimizer.kind.value for optimizer in fused}),
            [type(stateful_object).__name__ for stateful_object in stateful],
        )
        self._group.agreement = (
            f"plan {plan.fingerprint:x} for {plan.topology.world_size} rank(s), sync_every={options.sync_every}, "
            f"sync_optimizer={options.sync_optimizer}, parameters and buffers {checksum(' '.join(names)):x}, fused "
            f"optimizers {', '.join(kinds[0])}; join({', '.join(kinds[1])})"
        )
        self._group.most = len(tensors)
        self._regroup("")

    @left_alone
    def sync_replicas(self) -> None:
        """Average the tables, and their fused optimizers' states, over the replicas now. Every replica calls it, after
        the same step."""
        self._operate(_SYNC, self._average_tables)

    @left_alone
    def end(self, finish: Callable[[], None]) -> None:
        """End the run: every replica calls it after the last step. The tables are averaged. The first replica calls
        ``finish``, to save and to evaluate, for which the others wait. The next one, if that dies in it.

        Args:
            finish: is called on all ranks of one replica.
        """
        self.sync_replicas()
        while not self._group.awaits_end():
            if self.place:
                self._regroup("end of the run")
                continue
            finish()
            with suppress(PeerError):  # of the store, which no other replica needs if it is gone
                self._group.end()
            return

    @left_alone
    def begin(self) -> None:
        """Begin a step, if none is under way: take in replicas that want to join, and average the tables if that is
        due. The first forward of a step calls it. A loop with batches that depend on :attr:`place` and :attr:`replicas`
        calls it before it takes one."""
        if self._operations < 0:
            raise ConfigError("this replica has joined no other: call model.join(optimizer) before the first step")
        if not self._is_in_step and self._group.is_asked:
            self._regroup("")
        while not self._is_in_step and self._since_sync >= self._options.sync_every:
            self._operate("averaging of tables", self._average_tables)
        self._since_sync += not self._is_in_step
        self._is_in_step = True

    def _average_tables(self) -> None:
        self._group.average_tables(self._averaged(self._options))
        self._since_sync = 0

    @torch.no_grad()
    def _average_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        weight, means = 1.0, list[Tensor | None]()

        def average() -> None:
            means[:] = self._group.average_gradients([parameter.grad for parameter in parameters], parameters, weight)

        self.begin()
        while not self._operate("averaging of gradients", average):
            if self._next == _SYNC:  # the others are behind the last step: there is no next step to take part in
                for parameter in parameters:
                    parameter.grad = None
                return
            # It is where the others are: maybe before a step that it lacks the gradients of.
            weight = 0.0
            self.begin()
        embeddings = (child for child in self.module.modules() if isinstance(child, (nn.Embedding, nn.EmbeddingBag)))
        sparse = {embedding.weight for embedding in embeddings if embedding.sparse}  # frozen here, too
        for parameter, mean in zip(parameters, means, strict=True):
            parameter.grad = mean if mean is None or parameter not in sparse else mean.to_sparse(1)
        self.steps, self._is_in_step = self.steps + 1, False

    def _operate(self, operation: str, run: Callable[[], None]) -> bool:
        """Make an operation between replicas. Again, if a replica dies. False if this one has taken a state instead."""
        while not self._group.tried(run):
            if self._regroup(operation):
                return False
        self._operations += 1
        return True

    @torch.inference_mode(False)  # an inference tensor could not be written later
    def _regroup(self, operation: str) -> bool:
        """Meet the replicas that are there. Whether this one has taken the state of another."""
        while True:
            arrivals, group = self._group.meet(self._operations, operation), self._group
            furthest = max(arrival.completed for arrival in arrivals)
            first = next(place for place, arrival in enumerate(arrivals) if arrival.completed == furthest)
            there = {arrival.operation for arrival in arrivals if arrival.completed == furthest} - {""}
            if len(there) > 1:
                raise ConfigError(
                    f"the replicas are at different operations: {', '.join(sorted(there))}. Make the same"
                )
            behind = [
                place
                for place, arrival in enumerate(arrivals)
                if place != first and (arrival.completed < furthest or furthest < 0)
            ]
            takes = group.me in behind
            if takes:
                self._operations = -1  # until it has all of it
            if group.tried(self._share, first, behind):
                self._operations = max(0, furthest)
                self._next = max(there, default="")
                return takes

    def _share(self, first: int, behind: Sequence[int]) -> None:
        """Send the state of the first replica to those behind, if this is one of them."""
        for place in behind:
            if self._group.me == first:
                self._send(place)
            elif self._group.me == place:
                self._receive(first)

    def _send(self, place: int) -> None:
        state = self._other_state()
        file = io.BytesIO()
        torch.save(pytree.tree_map_only(Tensor, lambda tensor: tensor.to("meta"), state), file)
        text = torch.frombuffer(file.getbuffer(), dtype=torch.uint8)
        for tensors in ([torch.tensor([len(text)])], [text], [*self._tensors(), *_tensors_of(state)]):
            self._group.copy("send", [tensor.contiguous() for tensor in tensors], place)

    @torch.no_grad()
    def _receive(self, place: int) -> None:
        self._group.copy("recv", [length := torch.zeros(1, dtype=torch.int64)], place)
        self._group.copy("recv", [text := torch.empty(int(length), dtype=torch.uint8)], place)
        state = torch.load(io.BytesIO(text.numpy().tobytes()), weights_only=True)
        state = pytree.tree_map_only(Tensor, lambda tensor: torch.empty_like(tensor, device="cpu"), state)
        tensors = [*self._tensors(), *_tensors_of(state)]
        received = [tensor.detach().contiguous() for tensor in tensors]
        self._group.copy("recv", received, place)
        for tensor, values in zip(tensors, received, strict=True):
            if not tensor.is_contiguous():
                tensor.copy_(values)
        self.zero_grad()  # of a step that is lost
        (self.steps, self._since_sync, self._is_in_step), of_items, states = state
        for item in self._items():
            item.set(of_items[item.kind.value])
        for stateful, values in zip(self._stateful, states, strict=True):
            stateful.load_state_dict(values)

    def _tensors(self) -> list[Tensor]:
        """What a replica that joins takes in place."""
        states = [state for state in self._row_states(*Kind) if state.kind is not Kind.WEIGHT]
        rows = [tensor for state in states for tensor in state.tensors.values()]
        return [*self.parameters(), *self.buffers(), *rows]  # parameters have the weights until the next forward

    def _other_state(self) -> object:
        of_items = {item.kind.value: item.get() for item in self._items()}
        states = [stateful.state_dict() for stateful in self._stateful]
        return (self.steps, self._since_sync, self._is_in_step), of_items, states

    def _items(self) -> list[Item]:
        """The inventory's, except parameters that each job's program freezes by itself."""
        if self.has_fused_tables:
            self.made_fused_optimizer = self.fused_optimizer
        return [item for item in self.inventory() if item.kind is not Kind.FROZEN]


def _tensors_of(state: object) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(state) if isinstance(leaf, Tensor)]

"""The two records of a step: the plan of a sharded module, and one of its calls, from its batch to its value."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from shardrec.exchange.batch import Batch
from shardrec.exchange.cut import Cut, share_memory
from shardrec.exchange.fault_flags import FaultFlag
from shardrec.exchange.hosts import HostExchange
from shardrec.exchange.payload import ShardInput
from shardrec.exchange.wire_format import Shape
from shardrec.ids.device_maps import FoundRows
from shardrec.ids.maps import IdMaps
from shardrec.lookup.replicated import ReplicatedLookup
from shardrec.lookup.shards import ShardLookup
from shardrec.step.input_plan import InputPlan


class GradMode(NamedTuple):
    """Whether gradients, and inference mode, are enabled where a call is made."""

    gradients: bool
    inference: bool

    @staticmethod
    def current() -> GradMode:
        """That of torch now."""
        return GRAD_MODES[torch.is_grad_enabled(), torch.is_inference_mode_enabled()]

    @property
    def is_current(self) -> bool:
        """Whether torch is in it now."""
        return torch.is_grad_enabled() is self.gradients and torch.is_inference_mode_enabled() is self.inference

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Inside, it is torch's."""
        with torch.inference_mode(self.inference), torch.set_grad_enabled(self.gradients):
            yield


GRAD_MODES = {mode: GradMode(*mode) for mode in ((True, False), (False, False), (False, True), (True, True))}
"""By whether gradients, and inference mode, are enabled."""


class FullBatch(NamedTuple):
    """The bag per sample of the full batch, for a batch with inverse indices.

    Args:
        lengths: (F·(B + 1),) int32 ids of each key's bags as they were given, with an empty bag after each key's.
        order: (U, B_full) int32 index in ``lengths`` of each sample's bag.
    """

    lengths: Tensor
    order: Tensor


@dataclass(slots=True, kw_only=True)
class Arrival:
    """The rows of a call that come back.

    Args:
        size: B.
        slot_sizes: batch size per slot, S numbers, if they differ. Otherwise None.
        counts: ids that this rank asked per rank, per group.
        target: of sequences, where the rows go in the output.
        rows: of sequences, M of the output.
    """

    size: int
    slot_sizes: tuple[int, ...] | None
    counts: tuple[tuple[int, ...], ...]
    target: Any = None
    rows: int = 0


class DifferentiableOutput(NamedTuple):
    """The part of a call's value that has a gradient, in segments.

    Args:
        values: (n, D).
        sizes: of the segments, one per lookup, along ``dim``.
        dim: 0 or 1.
        lookups: one per segment.
    """

    values: Tensor
    sizes: Sequence[int]
    dim: int
    lookups: Sequence[Any]


class OutputLayout(Protocol):
    """How rows are laid out for the ranks that asked for them, and put in order there: a ``PooledOutput`` or a
    ``SequenceOutput``, where each method is described."""

    pools: bool
    is_identity: bool

    @property
    def hosts(self) -> HostExchange | None: ...

    def counted(self, call: InFlight) -> tuple[Tensor, ...]: ...

    def outgoing(
        self, rows: Sequence[Tensor], received: ShardInput, sums: Sequence[Tensor] = ()
    ) -> tuple[Tensor, list[list[Shape]]]: ...

    def returned(self, flat: Tensor, received: ShardInput) -> tuple[list[Tensor], list[Tensor]]: ...

    def into(self, arrival: Arrival) -> list[list[Shape]]: ...

    def assemble(self, arrival: Arrival, flats: Sequence[Tensor], replicated: Tensor | None, /) -> Tensor: ...

    def distribute(self, arrival: Arrival, gradient: Tensor, flats: Sequence[Tensor], /) -> Tensor | None: ...

    def meanwhile(self, call: InFlight) -> None: ...

    def finish(self, call: InFlight, values: Tensor, /) -> Any: ...

    def differentiable(self, value: Any) -> DifferentiableOutput: ...


class Exchange(Protocol):
    """Rows under way: a :class:`~shardrec.step.exchange.SharedExchange`."""

    @property
    def lookups(self) -> list[ShardLookup]: ...

    def value(self, number: int) -> Tensor: ...

    def cut_graph(self) -> tuple[list[Tensor], list[Tensor]]: ...


@dataclass(frozen=True, kw_only=True, eq=False)
class StepPlan:
    """What the step of a sharded module reads.

    Args:
        input: the exchange of ids.
        lookup: this rank's shards.
        output: how rows or columns are laid out for the ranks that asked, and put in order there.
        id_maps: of dynamic ids. None without any.
        replicas: the replicated tables. None without any.
        trains_shards: whether any cut table is trained; if not, no gradients are sent.
        before_rows: called just before a call's rows are exchanged. Embedding servers use it to attach the ids.
    """

    input: InputPlan
    lookup: ShardLookup
    output: OutputLayout
    id_maps: IdMaps | None
    replicas: ReplicatedLookup | None
    trains_shards: bool
    before_rows: Callable[[InFlight], None] | None


@dataclass(slots=True, eq=False, weakref_slot=True)
class InFlight:
    """One call of a sharded module. Each stage of the step reads what the stages before it have written.

    Shapes: F keys of the input, U features that the tables use, S slots of all ranks, B local batch size, N ids.

    Args:
        input: the module's exchange of ids.
        given: the input as it was read (for words about faults, keys, weights with a gradient). Empty if unreadable.
        agreement: the properties that must be equal on all ranks, as text.
        mode: the grad mode in which the call was made. Its value is finished in it, wherever it is first used.

    Attributes:
        plan: the module's step. None where only ids are exchanged.
        fault: what is wrong with the batch or the module, or "".
        cause: the exception behind ``fault``, or None.
        flag: on a device, whether the batch is faulty, until the host has read it in a header; else None.
        batch: the checked local input (read for bag lengths and inverse indices, and of sequences for replicated
            tables). Where ``flag`` is up, with other ids and bags, which are safe to look up.
        to_send: what is cut: ``batch``, or its distinct ids.
        distinct_index: (N,) int64 index per id of the lookups among the distinct ids. None if all ids are sent.
        cut: ``to_send`` cut into blocks.
        lengths: (S, B) int32 lengths per slot; (S, 1), their sums, if each id gets its own row.
        slot_sizes: batch size per slot, S numbers, if they differ. Otherwise None.
        counted: int64 tensors. The host reads their values with the header.
        learned_weights: (N,) weights of the local batch as they were given, if they take a gradient. Otherwise None.
        bad_ids: (U,) int64 number of bad ids per feature for which they are not an error. None if not counted.
        full: the full batch of a batch with inverse indices, if each id gets its own row. Otherwise None.
        requires_grad: whether its rows take a gradient, if gradients are enabled. The same on every rank.
        assigns_new_ids: whether it gives rows to new dynamic ids.
        features: the input.
        by_operator: made by an operator (:mod:`shardrec.modules.operators`), which has a backward of its own.
        on_value: functions that are called with this record and its value.
        user: a reference to what will ask for its value, if that is a program.

        parts: per rank, the tensors that are sent to it (``Payload.pack``), from the header exchange on; else None.
        counts: ids to each rank, per group.
        counted_values: the values of ``counted``.
        slot_ids: (S,) number of ids per slot of all ranks. None without ``positions``.
        positions: (N_sent,) int64, position per sent id, in order of travel: in ``to_send``'s values if each id
            gets its own row, else in the local batch's values as they were given. None if not needed.
        received: the ids that all ranks request from this one, slot by slot (``Payload.unpack``), once they are here.
        receive: waits for them, if they are under way.
        found_rows: of dynamic ids, what was found before the step; else None.

        to_update: on one rank, whether its backward will update the tables.
        is_launched: its rows were looked up, and are under way if there are other ranks.
        exchange: of its rows. None on one rank.
        number: of this call in it.
        assembled: on one rank, what was looked up, in order.
        arrival: describes the rows that come back. Backward reads it as well.
        replicated: (B, D_r) pooled columns of the replicated tables, or None.
        finishing: data that the module's kind keeps for the end.
        error: why its exchange failed. Set it to None to exchange the call again.
    """

    input: InputPlan
    given: Batch
    agreement: str
    mode: GradMode
    plan: StepPlan | None = None
    fault: str = ""
    cause: Exception | None = field(init=False, default=None)
    flag: FaultFlag | None = None
    batch: Batch = field(init=False)
    to_send: Batch = field(init=False)
    distinct_index: Tensor | None = None
    cut: Cut = field(init=False)
    lengths: Tensor = field(init=False)
    slot_sizes: tuple[int, ...] | None = None
    counted: tuple[Tensor, ...] = ()
    learned_weights: Tensor | None = None
    bad_ids: Tensor | None = None
    full: FullBatch | None = None
    requires_grad: bool = True
    assigns_new_ids: bool = False
    features: Any = None
    by_operator: bool = False
    on_value: tuple[Callable[[InFlight, Any], None], ...] = ()
    user: Callable[[], object] | None = None

    parts: list[list[Tensor]] | None = None
    counts: tuple[tuple[int, ...], ...] = ()
    counted_values: list[list[int]] = field(default_factory=list)
    slot_ids: Tensor | None = None
    positions: Tensor | None = None
    received: ShardInput | None = None
    receive: Callable[[], ShardInput] | None = None
    found_rows: FoundRows | None = None

    to_update: bool = False
    is_launched: bool = False
    exchange: Exchange | None = None
    number: int = 0
    assembled: Tensor | None = None
    arrival: Arrival = field(init=False)
    replicated: Tensor | None = None
    finishing: Any = None
    error: BaseException | None = None

    @property
    def step(self) -> StepPlan:
        """The module's step."""
        assert self.plan is not None, "a call that looks up rows has a plan"
        return self.plan

    @property
    def is_queued(self) -> bool:
        """Whether its rows are not exchanged yet. Its ids may be."""
        return not self.is_launched and self.error is None

    @property
    def size(self) -> int:
        """Samples B; 1 if each id gets its own row."""
        return self.lengths.size(1)

    @property
    def is_sent(self) -> bool:
        """Whether its ids are here, or under way."""
        return self.received is not None or self.receive is not None

    def own_input(self) -> None:
        """Copy ids and weights that are in the caller's memory, which may change before they are exchanged."""
        batch, cut, values, weights = self.batch, self.cut, self.batch.values, self.batch.weights
        if share_memory(values, self.given.values):
            values = values.clone()
        if weights is not None and share_memory(weights, self.given.weights):
            weights = weights.clone()
        if values is batch.values and weights is batch.weights:
            return
        self.batch = replace(batch, values=values, weights=weights)
        self.to_send = self.batch if self.to_send is batch else self.to_send
        self.cut = replace(
            cut,
            values=values if cut.values is batch.values else cut.values,
            weights=weights if cut.weights is batch.weights else cut.weights,
            borrowed=False,
        )

    def wait_for_ids(self) -> ShardInput:
        """The ids that all ranks request from this one. Waits if they are under way."""
        if self.received is None:
            assert self.receive is not None, "ids are exchanged before they are looked up"
            self.received, self.receive = self.receive(), None
        return self.received

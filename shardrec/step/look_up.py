"""look up, and its way back: the rows of this rank's shards for one call, and their update.

Shapes: N ids of this rank's batch, n ids that all ranks asked of this one, B_all the batches of all ranks, D columns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shardrec.exchange.collectives import Collectives, joined
from shardrec.exchange.payload import ShardInput
from shardrec.exchange.recomputation import checkpoint_around
from shardrec.ids.maps import Mapped, OpenStep
from shardrec.lookup.backward import Kept
from shardrec.lookup.shards import LookupInputs
from shardrec.step.records import InFlight, StepPlan

__all__ = ["LookedUp", "look_up", "node_inputs", "update"]

_NOTHING = torch.empty(0, dtype=torch.int32)


@dataclass(slots=True, eq=False)
class LookedUp:
    """The rows that were looked up in this rank's shards for one call, and the inputs of their update.

    Args:
        plan: of the module.
        received: the ids that the ranks requested.
        rows: (B_all, D_mine) pooled columns, alone; of sequences, per lookup group, (n, w) rows of all ids.
        inputs: of the lookups, by group. Those of a node are kept by autograd.
        lookups: what the groups have kept.
        mapped: of dynamic ids, which of them were looked up. None if all were.
        open_step: protects the rows of dynamic ids until the backward.
        learned: if weights of ids take a gradient: their number N on this rank, their dtype, and where each sent one
            was.
        went_to: ids that this rank sent to each rank.
    """

    plan: StepPlan
    received: ShardInput
    rows: list[Tensor]
    inputs: LookupInputs
    lookups: list[Kept]
    mapped: Mapped | None = None
    open_step: OpenStep | None = None
    learned: tuple[int, torch.dtype, Tensor] | None = None
    went_to: list[int] = field(default_factory=list)

    def update(
        self, gradients: Sequence[Tensor], inputs: LookupInputs | None = None, *, is_last: bool, updates: bool = True
    ) -> list[Tensor | None]:
        """Update the tables. Gives the gradients of the parameters of tables without an optimizer.

        Args:
            gradients: of ``rows``.
            inputs: if autograd has kept them.
            is_last: no lookup of these tables will follow in this backward.
            updates: as for :meth:`shardrec.lookup.shards.ShardLookup.add_gradients`.
        """
        plan, inputs = self.plan, self.inputs if inputs is None else inputs
        if self.open_step is not None:
            assert plan.id_maps is not None, "a step of dynamic ids"
            plan.id_maps.close(self.open_step)
        if self.mapped is not None and not plan.output.pools:
            gradients = self.mapped.of_looked_up(gradients)
        return plan.lookup.add_gradients(inputs, self.lookups, gradients, is_last=is_last, updates=updates)

    def weight_gradient(self, gradient: Tensor, inputs: LookupInputs, collectives: Collectives) -> Tensor:
        """(N,) gradient of the weights of this rank's ids, which the ranks that looked them up send back.

        Such weights are computed on their own rank (position weights, attention), so their gradient is not averaged:
        the division by the number of ranks in the output's gradient (:mod:`shardrec.step.pooled_columns`) is reversed.
        """
        assert self.learned is not None, "weights of ids take a gradient"
        count, dtype, positions = self.learned
        gradients = self.plan.lookup.id_weight_gradient(inputs, gradient)
        if self.mapped is not None:
            gradients = self.mapped.of_all_ids(gradients)
        order = self.received.order
        if order is not None:
            gradients = torch.empty_like(gradients).index_copy_(0, order.to(torch.int64), gradients)
        came_from = list(map(sum, self.received.counts))
        parts = [[part] for part in gradients.contiguous().split(came_from)]
        back = joined(collectives.send(parts, self.went_to, "weight gradient").wait())
        total = back.new_zeros(count).index_add_(0, positions, back)
        return total.mul_(collectives.mean_over).to(dtype)

    def release_ids(self) -> LookupInputs:
        """The inputs. No other reference to them is left here."""
        inputs, self.inputs = self.inputs, ()
        self.received.ids, self.received.weights = _NOTHING, None
        return inputs


def look_up(
    plan: StepPlan,
    received: ShardInput,
    allocate: Callable[[int], Tensor] | None = None,
    *,
    call: InFlight | None = None,
    to_update: bool = False,
) -> LookedUp:
    """Look up the ids that the ranks requested.

    Args:
        plan: of the module.
        received: the ids.
        allocate: returns (n,) float32 memory for pooled columns. Default: a new tensor.
        call: of this rank. None on a server.
        to_update: whether an update may follow.
    """
    mapped, rows_of = None, received
    if plan.id_maps is not None:
        assigns, found_rows = (False, None) if call is None else (call.assigns_new_ids, call.found_rows)
        mapped = plan.id_maps(received, assigns, found_rows)
        rows_of = mapped.shard_input
    if plan.output.pools:
        pooled, inputs, lookups = plan.lookup.look_up(rows_of, allocate, to_update=to_update)
        looked_up = LookedUp(plan, received, [pooled], inputs, lookups)
    else:
        rows, inputs, lookups = plan.lookup.rows(rows_of, to_update=to_update)
        looked_up = LookedUp(plan, received, rows if mapped is None else mapped.in_place(rows), inputs, lookups)
    if mapped is not None:
        looked_up.mapped = None if mapped.kept is None else mapped
        if to_update and plan.id_maps is not None:
            looked_up.open_step = plan.id_maps.open_step(mapped)
        elif mapped.step and plan.id_maps is not None and (checkpoint := checkpoint_around()) is not None:
            checkpoint.open_steps = [*getattr(checkpoint, "open_steps", ()), plan.id_maps.open_step(mapped)]
    if call is not None and call.learned_weights is not None and to_update:
        assert call.positions is not None, "the positions of the ids were kept"
        weights = call.learned_weights
        looked_up.learned = weights.numel(), weights.dtype, call.positions
        looked_up.went_to = list(map(sum, call.counts))
    return looked_up


def node_inputs(placeholder: Tensor, calls: Sequence[InFlight]) -> list[Tensor]:
    """The tensors that represent the tables in the autograd graph, of a node that makes the lookups of some calls."""
    inputs = [placeholder]
    for call in calls:
        inputs += call.plan.lookup.parameters if call.plan is not None else ()
        if call.learned_weights is not None:
            inputs.append(call.learned_weights)
    return inputs


def update(
    calls: Sequence[LookedUp],
    saved: LookupInputs,
    gradients: Sequence[Sequence[Tensor]],
    collectives: Collectives,
    *,
    updates: bool,
) -> list[Tensor | None]:
    """Update the tables in the backward of a node. Gives the gradients of its inputs, without the placeholder.

    Args:
        calls: the node has made their lookups.
        saved: the inputs of all their lookups.
        gradients: of the rows, per call.
        collectives: of the model.
        updates: as for :meth:`shardrec.lookup.shards.ShardLookup.add_gradients`.
    """
    of_inputs: list[Tensor | None] = []
    node, end = torch._C._current_autograd_node(), 0
    for number, (looked_up, gradient) in enumerate(zip(calls, gradients, strict=True)):
        lookup, start = looked_up.plan.lookup, end
        end += 3 * len(looked_up.lookups)
        inputs = saved[start:end]
        of_weights = None
        if looked_up.learned is not None:
            of_weights = looked_up.weight_gradient(gradient[0], inputs, collectives)
        is_last = lookup.is_last_lookup(node)
        if len(calls) > 1:
            is_last = is_last and all(other.plan.lookup is not lookup for other in calls[number + 1 :])
        of_inputs += looked_up.update(gradient, inputs, is_last=is_last, updates=updates)
        if looked_up.learned is not None:
            of_inputs.append(of_weights)
    return of_inputs

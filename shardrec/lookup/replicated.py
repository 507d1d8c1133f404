"""Replicated (data-parallel) tables: a copy on every rank, looked up locally, gradients all-reduced.

The parameters take dense gradients, which the dense part's reducer averages over the ranks together with its own. A
table that was given an optimizer in backward keeps it: when backward is over and the gradient is complete, the rows
with a gradient are updated, with the same rule on every rank, and the gradient is dropped.

[Note: after the reducer]
DistributedDataParallel copies the averaged gradients back in a callback that the autograd engine runs at the end of
backward. Ours is queued from a gradient hook, so it can come before that one; it queues itself once more, and callbacks
queued by a callback run after all the earlier ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.autograd import Variable

from shardrec.errors import ConfigError
from shardrec.exchange.step import StepContext
from shardrec.lookup.bank import RowGradient, TableBank, WidthClass
from shardrec.lookup.groups import LookupTable
from shardrec.lookup.optimizers import FusedOptimizer
from shardrec.lookup.rows import RowOptimizer
from shardrec.lookup.shards import dense_lookup

__all__ = ["ReplicatedLookup"]


class ReplicatedLookup:
    """The replicated tables of a module.

    Args:
        tables: the replicated tables, in module order.
        slot_tables: per lookup of a replicated table, in output order, the table's number in ``tables``.
        context: says whether a reducer averages the gradients, and whether it does so in this backward.
        device: where the tables live.

    Attributes:
        parameters: one (rows, dim) parameter per table.
    """

    def __init__(
        self, tables: Sequence[LookupTable], slot_tables: Sequence[int], context: StepContext, device: torch.device
    ) -> None:
        shapes = [(table.layout.num_embeddings, table.layout.embedding_dim) for table in tables]
        self._names = [table.layout.name for table in tables]
        self._bank = TableBank(shapes, slot_tables, None, device)
        self._context = context
        self._rows = [
            None if table.optimizer is None else _RowUpdate(weight, table.optimizer)
            for table, weight in zip(tables, self._bank.weights, strict=True)
        ]
        self.parameters = [nn.Parameter(weight) for weight in self._bank.weights]
        # Of this backward. Each forward clears it, for a backward that raises never comes to its callbacks.
        self._queued = False
        for parameter in self.parameters:
            parameter.register_post_accumulate_grad_hook(self._on_gradient)

    def states(self, table: int) -> dict[str, Tensor]:
        """The fused optimizer's states of one table, by name, as views; empty without one."""
        update = self._rows[table]
        return {} if update is None else update.optimizer.states()[0]

    def step_counts(self) -> dict[str, int]:
        """Per table, how many updates its fused optimizer has made."""
        return {
            name: 0 if update is None else update.optimizer.step_count
            for name, update in zip(self._names, self._rows, strict=True)
        }

    def load_step_counts(self, counts: Mapping[str, int]) -> None:
        """Set what :meth:`step_counts` gave."""
        for name, update in zip(self._names, self._rows, strict=True):
            if update is not None:
                update.optimizer.step_count = counts.get(name, 0)

    def set_learning_rate(self, optimizer: FusedOptimizer, lr: float) -> None:
        """Use ``lr`` for the tables that were given ``optimizer``."""
        for update in self._rows:
            if update is not None and update.optimizer.optimizer == optimizer:
                update.optimizer.lr = lr

    def __call__(self, ids: Tensor, lengths: Tensor, weights: Tensor | None) -> Tensor:
        """(B, D_r) pooled columns of the local batch; shapes as :func:`dense_lookup` takes them."""
        self._queued = False
        return dense_lookup(self._bank, ids, lengths, weights, self.parameters)

    def rows(self, table: int, ids: Tensor) -> Tensor:
        """(N, dim) rows of one table, one per id; their gradient reaches the table's parameter."""
        self._queued = False
        return nn.functional.embedding(ids, self.parameters[table])

    def _on_gradient(self, parameter: Tensor) -> None:
        context = self._context
        if context.collectives.world_size > 1 and not context.gradients_are_reduced:
            raise ConfigError(
                f"replicated tables {', '.join(map(repr, self._names))} need their gradients averaged over the ranks; "
                "shard the whole model with shardrec.shard, or cut these tables"
            )
        if not self._queued and any(self._rows):
            self._queued = True
            Variable._execution_engine.queue_callback(self._requeue)

    def _requeue(self) -> None:
        Variable._execution_engine.queue_callback(self._update)

    def _update(self) -> None:
        self._queued = False
        if not self._context.reduce_this_backward:
            return
        for update, parameter in zip(self._rows, self.parameters, strict=True):
            if update is not None and parameter.grad is not None:
                update.step(parameter.grad)
                parameter.grad = None


class _RowUpdate:
    """One table's fused optimizer, applied to the rows whose averaged gradient is not zero."""

    def __init__(self, weight: Tensor, optimizer: FusedOptimizer) -> None:
        rows, width = weight.shape
        none = torch.zeros(0, dtype=torch.int64, device=weight.device)
        cls = WidthClass(width=width, tables=(0,), bases=(0, rows), weight=weight, slots=(), slot_bases=none)
        self.optimizer = RowOptimizer([cls], 1, optimizer)

    def step(self, gradient: Tensor) -> None:
        """Update from the dense (rows, dim) gradient."""
        rows = gradient.any(dim=1).nonzero().squeeze(1)
        self.optimizer.step([RowGradient(rows=rows, values=gradient.index_select(0, rows))])

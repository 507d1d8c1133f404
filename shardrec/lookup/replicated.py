"""Replicated (data-parallel) tables: looked up locally, gradients all-reduced.

The parameters take dense gradients, which the dense part's reducer averages over the ranks together with the gradients
of the dense part. A table with an optimizer in backward keeps it: when backward is over and the gradient is complete,
the rows with a gradient are updated, with the same rule on every rank, and the gradient is dropped. The reducer starts
this update, also on a rank that has not looked the table up; without a reducer, on one rank, the gradient starts it.

[Note: rows that were looked up]
If the gradient of a row that a batch looks up is zero, Adam still updates it by its moments. Weight decay still applies
as well. For the shard of a cut table the ids are known. An averaged gradient does not show which rows were looked up. A
replicated table does not update such a row.

[Note: gradients of 16-bit replicas]
They are summed over a rank's ids in float32, rounded to the table's dtype, which a parameter's gradient must have, and
averaged by the reducer in this dtype. So, unlike for a cut table, the optimizer uses a rounded gradient. In float16 a
gradient below 6e-8 is lost, and one below 6e-5 is imprecise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import accumulate, groupby, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.autograd.function import FunctionCtx

from shardrec.errors import ConfigError
from shardrec.exchange.backward_watch import weak_hook
from shardrec.exchange.gradients import Gradients
from shardrec.lookup.backward import once_differentiable
from shardrec.lookup.group_shards import RowGradient, TableBank, WidthClass
from shardrec.lookup.groups import LookupTable
from shardrec.lookup.optimizers import FusedOptimizer
from shardrec.lookup.row_optimizers import RowOptimizer
from shardrec.lookup.scripted import Tables


class ReplicatedLookup:
    """The replicated tables of a module, which are updated after a reducer has averaged their gradients.

    Args:
        tables: the replicated tables, in module order.
        slot_tables: per lookup of a replicated table, in output order, the table's number in ``tables``. The lookups
            of a table are neighbours.
        gradients: says whether a reducer averages them, and whether it does so in this backward.
        device: where the tables live.

    Attributes:
        parameters: one (rows, dim) parameter per table.
    """

    def __init__(
        self,
        tables: Sequence[LookupTable],
        slot_tables: Sequence[int],
        gradients: Gradients,
        device: torch.device,
    ) -> None:
        banks: list[tuple[TableBank, list[int]]] = []  # of neighbouring slots with tables of one dtype, with these
        for dtype, run in groupby(slot_tables, lambda table: tables[table].dtype):
            slots = list(run)
            numbers = list(dict.fromkeys(slots))
            shapes = [(tables[number].layout.num_embeddings, tables[number].layout.embedding_dim) for number in numbers]
            places = [numbers.index(slot) for slot in slots]
            banks.append((TableBank(shapes, places, None, device, dtype=dtype), numbers))
        weights = {
            table: weight for bank, numbers in banks for table, weight in zip(numbers, bank.weights, strict=True)
        }
        self._updates = [
            None if table.optimizer is None else _RowUpdate(weights[number], table.optimizer)
            for number, table in enumerate(tables)
        ]
        self.parameters = [nn.Parameter(weights[number]) for number in range(len(tables))]
        self._runs = [(bank, [self.parameters[number] for number in numbers]) for bank, numbers in banks]
        self._names, self._gradients = [table.layout.name for table in tables], gradients
        self._unfinished = False  # fused tables have gradients, and no update has been made with them
        self._at_step = any(table.at_step for table in tables)
        if not self._at_step:
            gradients.life_cycle.tables_update.append(self.step)
            gradients.life_cycle.forward_begins.append(self._drop_unfinished)
        for parameter in self.parameters:
            parameter.register_post_accumulate_grad_hook(weak_hook(self._on_gradient))

    def retire(self) -> None:
        """Take no part in backwards any more."""
        if not self._at_step:
            self._gradients.life_cycle.tables_update.remove(self.step)
            self._gradients.life_cycle.forward_begins.remove(self._drop_unfinished)

    def row_optimizers(self) -> list[RowOptimizer]:
        """Those of the tables with an optimizer in backward."""
        return [update.optimizer for update in self._updates if update is not None]

    def states(self, table: int) -> dict[str, Tensor]:
        """The fused optimizer's states of one table, by name, as views. Empty without one."""
        update = self._updates[table]
        return {} if update is None else update.optimizer.states()[0]

    def step_counts(self) -> dict[str, int]:
        """Per table, how many updates its fused optimizer has made."""
        counts = (0 if update is None else update.optimizer.step_count for update in self._updates)
        return dict(zip(self._names, counts, strict=True))

    def load_step_counts(self, counts: Mapping[str, int]) -> None:
        """Set what :meth:`step_counts` gave."""
        for name, update in zip(self._names, self._updates, strict=True):
            if update is not None:
                update.optimizer.step_count = counts.get(name, 0)

    def set_learning_rate(self, optimizer: FusedOptimizer, lr: float) -> None:
        """Use ``lr`` for the tables that were given ``optimizer``."""
        for update in filter(None, self._updates):
            if update.optimizer.optimizer == optimizer:
                update.optimizer.lr = lr

    def __call__(self, ids: Tensor, lengths: Tensor, id_weights: Tensor | None, counts: Sequence[int]) -> Tensor:
        """(B, D_r) float32 pooled columns of the local batch.

        Args:
            ids: (N,) slot after slot.
            lengths: (S, B).
            id_weights: (N,) or None.
            counts: S numbers of ids.
        """
        self._drop_unfinished()
        if len(self._runs) == 1:
            bank, parameters = self._runs[0]
            return dense_lookup(bank, ids, lengths, id_weights, parameters)
        # Columns of tables with different dtypes, side by side.
        slots = [len(bank.slot_tables) for bank, _ in self._runs]
        counts_by_run = [sum(counts[start:end]) for start, end in pairwise(accumulate(slots, initial=0))]
        id_weights_by_run = [None] * len(slots) if id_weights is None else id_weights.split(counts_by_run)
        args_by_run = zip(ids.split(counts_by_run), lengths.split(slots), id_weights_by_run, strict=True)
        parts = [
            dense_lookup(bank, *args, parameters)
            for (bank, parameters), args in zip(self._runs, args_by_run, strict=True)
        ]
        return torch.cat(parts, dim=1)

    def rows(self, table: int, ids: Tensor) -> Tensor:
        """(N, dim) float32 rows of one table, one per id. Their gradient reaches the table's parameter."""
        self._drop_unfinished()
        parameter = self.parameters[table]
        if parameter.dtype is torch.float32:
            return nn.functional.embedding(ids, parameter)
        rows: Tensor = _RowsFunction.apply(parameter, ids)  # type: ignore[no-untyped-call]
        return rows

    def scripted(self, slot_tables: Sequence[int], *, pooled: bool) -> nn.Module:
        """The lookup for TorchScript, with the number of its table per slot. Without pooling there is one slot."""
        return Tables(self.parameters, slot_tables, pooled=pooled)

    def _on_gradient(self, parameter: Tensor) -> None:
        gradients = self._gradients
        if not gradients.are_reduced:
            raise ConfigError(
                f"replicated tables {', '.join(map(repr, self._names))} need their gradients averaged over the "
                "ranks. Shard the whole model with shardrec.shard, or cut these tables"
            )
        if self._at_step or self._unfinished or not gradients.reduce_this_backward or not any(self._updates):
            return
        self._unfinished = True
        if gradients.reducer is None:
            # A callback that is queued by a callback runs after the callbacks of a user's wrapper, which averages.
            queue = Variable._execution_engine.queue_callback
            queue(partial(queue, self.step))

    def _drop_unfinished(self) -> None:
        """Drop the gradients of fused tables left by a backward that raised, which no optimizer would clear."""
        if self._unfinished and torch._C._current_graph_task_id() == -1:  # not recomputed in a backward
            self._unfinished = False
            for update, parameter in zip(self._updates, self.parameters, strict=True):
                if update is not None:
                    parameter.grad = None

    def step(self) -> None:
        """Update the tables with an optimizer that have a gradient, and drop it."""
        self._unfinished = False
        for update, parameter in zip(self._updates, self.parameters, strict=True):
            if update is not None and parameter.grad is not None:
                update.step(parameter.grad)
                parameter.grad = None


def dense_lookup(
    bank: TableBank,
    ids: Tensor,
    lengths: Tensor,
    id_weights: Tensor | None,
    parameters: Sequence[nn.Parameter],
) -> Tensor:
    """A lookup that gives each table's parameter a dense gradient, summed in float32, in the parameter's dtype.

    Args:
        bank: forward-only bank, one table per parameter. The parameters share its memory.
        ids: with ``lengths`` and ``id_weights`` as :meth:`TableBank.look_up` takes them. Gives its result.
        parameters: one (rows, cols) parameter per table of the bank.
    """
    bags = ids, lengths.to(torch.int32), id_weights
    pooled: Tensor = _DenseLookup.apply(bank, *bags, *parameters)  # type: ignore[no-untyped-call]
    return pooled


class _DenseLookup(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx,
        bank: TableBank,
        ids: Tensor,
        lengths: Tensor,
        id_weights: Tensor | None,
        *parameters: nn.Parameter,
    ) -> Tensor:
        ctx.save_for_backward(ids, lengths, id_weights)  # type: ignore[arg-type]
        ctx.bank = bank  # type: ignore[attr-defined]
        return bank.look_up(ids, lengths, id_weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        ids, lengths, id_weights = ctx.saved_tensors
        of_weights = ctx.bank.id_weight_gradient(ids, lengths, gradient) if ctx.needs_input_grad[3] else None
        return None, None, None, of_weights, *ctx.bank.parameter_gradients(ids, lengths, id_weights, gradient)


class _RowsFunction(torch.autograd.Function):
    """``embedding`` of a 16-bit weight: float32 rows, and a gradient summed in float32 before it is rounded."""

    @staticmethod
    def forward(ctx: FunctionCtx, weight: Tensor, ids: Tensor) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.shape, ctx.dtype = weight.shape, weight.dtype  # type: ignore[attr-defined]
        return weight.index_select(0, ids).to(torch.float32)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (ids,) = ctx.saved_tensors
        return gradient.new_zeros(ctx.shape).index_add_(0, ids, gradient).to(ctx.dtype), None


class _RowUpdate:
    """One table's fused optimizer, applied to the rows whose averaged gradient is not zero."""

    def __init__(self, weight: Tensor, optimizer: FusedOptimizer) -> None:
        rows, width = weight.shape
        none = torch.zeros(0, dtype=torch.int64, device=weight.device)
        cls = WidthClass(width=width, tables=(0,), bases=(0, rows), weight=weight, slot_bases=none)
        self.optimizer = RowOptimizer([cls], 1, optimizer)
        self._weight = weight

    def step(self, gradient: Tensor) -> None:
        """Update from the dense (rows, dim) gradient."""
        if gradient.device.type == "cpu":
            rows = gradient.any(dim=1).nonzero().squeeze(1)
            values = gradient.index_select(0, rows).to(torch.float32)
            self.optimizer.step(self.optimizer.decayed([RowGradient(rows=rows, values=values)]))
            return
        # The host would have to read the number of rows: all rows are updated, and those without a gradient restored
        # where that matters (Adam's moments decay, and Adagrad's step is 0 / 0 without eps).
        restores = not self.optimizer.optimizer.keeps_rows_without_gradient
        memory = [self._weight, *self.optimizer.states()[0].values()] if restores else []
        before, used = [tensor.clone() for tensor in memory], gradient.any(dim=1)
        rows = torch.arange(gradient.size(0), device=gradient.device)
        gradients = [RowGradient(rows=rows, values=gradient.to(torch.float32))]
        self.optimizer.step(self.optimizer.decayed(gradients))
        for tensor, old in zip(memory, before, strict=True):
            tensor.copy_(torch.where(used if tensor.dim() == 1 else used.unsqueeze(1), tensor, old))

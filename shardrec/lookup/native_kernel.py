"""The native kernel: lookup and fused update by shardrec's C++ operators, with their arguments for a bank.

They replace fbgemm's kernels on the CPU, for float32 weights, with and without SGD, Adagrad or rowwise Adagrad in
backward. The memory remains fbgemm's, so that code that uses it (``state_dict``, checkpoints, scripted lookups) does
not change. The update rules and the order of a bag's sum are also fbgemm's. The order in which a row's gradients are
added up depends on the sizes.

Shapes: S slots, B_all samples, N ids, D columns of all the slots, w columns of a row without pooling.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shardrec.lookup.optimizers import FusedOptimizer, OptimizerKind

RULES = {OptimizerKind.SGD: 0, OptimizerKind.ADAGRAD: 1, OptimizerKind.ROWWISE_ADAGRAD: 2}
"""The optimizers of native/update.cpp, by its numbers."""
_MAX_ROWS = 2**31 - 1


@dataclass(frozen=True, kw_only=True)
class NativeKernel:
    """The arguments of the operators that do not change from step to step.

    Args:
        weights: flat weights of all the tables.
        states: flat states of the optimizer, if it has any.
        slots: (S, 6) int64: table, first element in ``weights``, rows, columns, first output column, first element in
            ``states``.
        columns: D, or w without pooling.
        pooled: sums of bags; else rows.
        rule: number of the optimizer that is fused into backward (:data:`RULES`); -1 without one.
        eps: of the optimizer.
    """

    weights: Tensor
    states: Tensor | None
    slots: Tensor
    columns: int
    pooled: bool
    rule: int
    eps: float

    def look_up(self, ids: Tensor, lengths: Tensor, id_weights: Tensor | None, out: Tensor | None = None) -> Tensor:
        """Look up without gradient. ``lengths`` are int32, all arguments are contiguous."""
        if out is not None:
            torch.ops.shardrec.look_up_out(out, self.weights, self.slots, ids, lengths, id_weights)
            return out
        rows: Tensor = torch.ops.shardrec.look_up(
            self.weights, self.slots, ids, lengths, id_weights, self.columns, self.pooled
        )
        return rows

    def update(self, ids: Tensor, lengths: Tensor, id_weights: Tensor | None, gradient: Tensor, lr: float) -> None:
        """Make one step of the optimizer, with the gradient of the result of :meth:`look_up`."""
        torch.ops.shardrec.update(
            self.weights,
            self.states,
            self.slots,
            ids,
            lengths,
            id_weights,
            gradient if gradient.stride(1) == 1 else gradient.contiguous(),
            self.pooled,
            self.rule,
            lr,
            self.eps,
        )

    def id_weight_gradient(self, ids: Tensor, lengths: Tensor, gradient: Tensor) -> Tensor:
        """(N,) gradient of the ids' weights, for pooled sums."""
        gradients: Tensor = torch.ops.shardrec.weight_gradient(
            self.weights, self.slots, ids, lengths, with_neighbouring_columns(gradient)
        )
        return gradients


def native_kernel(
    shapes: Sequence[tuple[int, int]],
    slot_tables: Sequence[int],
    weights: Sequence[Tensor],
    states: Sequence[Mapping[str, Tensor]],
    optimizer: FusedOptimizer | None,
    *,
    pooled: bool,
) -> NativeKernel | None:
    """The kernel of some tables, or None if they need fbgemm's: not float32 on the CPU, or another optimizer.

    Args:
        shapes: (rows, columns) per table.
        slot_tables: per slot, the number of its table.
        weights: per table, a view of memory that all of them share.
        states: per table, its states by name, as views of shared memory.
        optimizer: fused into backward.
        pooled: sums of bags; else rows.
    """
    if optimizer is not None and optimizer.kind not in RULES:
        return None
    if any(weight.dtype is not torch.float32 or weight.device.type != "cpu" for weight in weights):
        return None
    if max(rows for rows, _ in shapes) > _MAX_ROWS:
        return None
    kept = [state for by_name in states for state in by_name.values()]
    whole = [_memory(part) for part in (weights, kept)]
    if whole[0] is None or (kept and whole[1] is None):
        return None
    described, column = [], 0
    for table in slot_tables:
        rows, cols = shapes[table]
        state = kept[table].storage_offset() if kept else 0
        described.append([table, weights[table].storage_offset(), rows, cols, column, state])
        column += cols if pooled else 0
    return NativeKernel(
        weights=whole[0],
        states=whole[1],
        slots=torch.tensor(described, dtype=torch.int64).view(len(slot_tables), 6),
        columns=column if pooled else shapes[0][1],
        pooled=pooled,
        rule=-1 if optimizer is None else RULES[optimizer.kind],
        eps=0.0 if optimizer is None else optimizer.eps,
    )


def _memory(views: Sequence[Tensor]) -> Tensor | None:
    """The whole storage of the views, flat. None if they have several, or are not dense."""
    if not views or any(not view.is_contiguous() for view in views):
        return None
    storage = views[0].untyped_storage()
    if any(view.untyped_storage().data_ptr() != storage.data_ptr() for view in views):
        return None
    return torch.empty(0, dtype=views[0].dtype).set_(storage)


def with_neighbouring_columns(gradient: Tensor) -> Tensor:
    """A matrix with contiguous columns, as the operators take it. Its rows need not be contiguous."""
    return gradient if gradient.stride(1) == 1 else gradient.contiguous()

"""Fused optimizers that update rows in torch, for cases that fbgemm's kernels do not support.

They are used if :func:`shardrec.lookup.kernels.has_fused_kernel` is False, for row-wise states of a table cut by
columns (whose mean square is over the whole row, of which a rank holds a part) and for replicated tables (whose
gradient is complete only after the all-reduce). States are float32, and so is the update; the rows of a 16-bit table
are rounded to nearest when they are written back. The rules are those of :mod:`torch.optim` and
``torchrec.optim.RowWiseAdagrad``, on the rows given; partial rowwise Adam and LAMB (You et al., 2020) are fbgemm's,
whose trust ratio is a row's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from shardrec import native
from shardrec.lookup.bank import RowGradient, WidthClass
from shardrec.lookup.native_kernel import RULES
from shardrec.lookup.optimizers import FusedOptimizer, OptimizerKind

__all__ = ["RowOptimizer"]


class RowOptimizer:
    """The states of some tables' optimizer, and its step on some of their rows.

    Args:
        classes: the width classes whose weights are updated in place.
        tables: number of tables in the classes.
        optimizer: rule and settings.

    Attributes:
        step_count: updates so far; Adam's bias correction reads it.
        lr: learning rate of the next step.
    """

    def __init__(self, classes: Sequence[WidthClass], tables: int, optimizer: FusedOptimizer) -> None:
        self.optimizer = optimizer
        self.step_count = 0
        self.lr = optimizer.lr
        self._tables = tables
        self._classes = [(cls, self._new_states(cls)) for cls in classes]

    def states(self) -> list[dict[str, Tensor]]:
        """Per table, its states by name, as views."""
        per_table: list[dict[str, Tensor]] = [{} for _ in range(self._tables)]
        for cls, states in self._classes:
            for table, (start, end) in zip(cls.tables, pairwise(cls.bases), strict=True):
                per_table[table] = {name: state[start:end] for name, state in states.items()}
        return per_table

    @torch.no_grad()
    def decayed(self, gradients: Sequence[RowGradient]) -> Sequence[RowGradient]:
        """The gradients with the weight decay of their rows, for :meth:`step`."""
        factor = self.optimizer.weight_decay
        if not factor or self.optimizer.is_decay_decoupled:
            return gradients
        return [
            RowGradient(
                rows=gradient.rows,
                values=gradient.values.add(cls.weight.index_select(0, gradient.rows).to(torch.float32), alpha=factor),
            )
            for (cls, _), gradient in zip(self._classes, gradients, strict=True)
        ]

    @torch.no_grad()
    def step(self, gradients: Sequence[RowGradient], mean_squares: Sequence[Tensor] | None = None) -> None:
        """Update the rows of ``gradients``, one entry per width class.

        Args:
            gradients: distinct rows and their gradients, :meth:`decayed`.
            mean_squares: for row-wise states, the mean square (U,) of each row's gradient, if it is not the mean over
                the columns of ``gradients``.
        """
        self.step_count += 1
        squares: Sequence[Tensor | None] = mean_squares or [None] * len(gradients)
        for (cls, states), gradient, square in zip(self._classes, gradients, squares, strict=True):
            if gradient.rows.numel():
                self._update(cls.weight, states, gradient, square)

    def _new_states(self, cls: WidthClass) -> dict[str, Tensor]:
        options = self.optimizer
        first = options.initial_accumulator_value
        return {
            name: cls.weight.new_full(
                cls.weight.shape[: 1 if name in options.row_states else 2], first, dtype=torch.float32
            )
            for name in options.states
        }

    def _update(
        self, weight: Tensor, states: Mapping[str, Tensor], gradient: RowGradient, mean_square: Tensor | None
    ) -> None:
        rows, values = gradient.rows, gradient.values
        options = self.optimizer
        if options.row_states and mean_square is None:
            mean_square = gradient.square_sums() / values.size(1)
        if options.kind in RULES and weight.dtype is torch.float32 and weight.is_cpu and native.is_loaded():
            torch.ops.shardrec.update_rows(
                weight, states.get("sum"), rows, values, mean_square, RULES[options.kind], self.lr, options.eps
            )
            return
        match options.kind:
            case OptimizerKind.SGD:
                change = values
            case OptimizerKind.ADAGRAD:
                total = states["sum"].index_select(0, rows).addcmul_(values, values)
                states["sum"].index_copy_(0, rows, total)
                change = values / total.sqrt_().add_(options.eps)
            case OptimizerKind.ROWWISE_ADAGRAD:
                assert mean_square is not None, "computed above"
                total = states["sum"].index_select(0, rows).add_(mean_square)
                states["sum"].index_copy_(0, rows, total)
                change = values / total.sqrt_().add_(options.eps).unsqueeze(1)
            case OptimizerKind.LION:
                old = states["exp_avg"].index_select(0, rows)
                change = old.lerp(values, 1 - options.betas[0]).sign_()
                states["exp_avg"].index_copy_(0, rows, old.lerp_(values, 1 - options.betas[1]))
            case _:
                change = self._adam(states, rows, values, mean_square)
        if options.is_decay_decoupled:
            held = weight.index_select(0, rows).to(torch.float32)
            change = change.add_(held, alpha=options.weight_decay)
            if options.kind is OptimizerKind.LAMB:
                ratio = held.norm(dim=1) / change.norm(dim=1)
                # Of a row or a change of zeros there is no ratio.
                change *= torch.where(ratio.isfinite() & (ratio > 0), ratio, 1.0).unsqueeze(1)
        if weight.dtype is torch.float32:
            weight.index_add_(0, rows, change, alpha=-self.lr)
        else:
            updated = weight.index_select(0, rows).to(torch.float32).add_(change, alpha=-self.lr)
            weight.index_copy_(0, rows, updated.to(weight.dtype))

    def _adam(self, states: Mapping[str, Tensor], rows: Tensor, values: Tensor, mean_square: Tensor | None) -> Tensor:
        """(U, w) change of the rows, before the learning rate, from Adam's two moments."""
        beta1, beta2 = self.optimizer.betas
        first = states["exp_avg"].index_select(0, rows).lerp_(values, 1 - beta1)
        second = states["exp_avg_sq"].index_select(0, rows).mul_(beta2)
        if mean_square is None:
            second.addcmul_(values, values, value=1 - beta2)
        else:
            second.add_(mean_square, alpha=1 - beta2)
        states["exp_avg"].index_copy_(0, rows, first)
        states["exp_avg_sq"].index_copy_(0, rows, second)
        root = second.div_(1 - beta2**self.step_count).sqrt_().add_(self.optimizer.eps)
        return first.div_(1 - beta1**self.step_count) / (root if mean_square is None else root.unsqueeze(1))

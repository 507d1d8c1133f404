"""Optimizers of tables that update rows apart from the lookup's kernel, in torch or by operators in C++.

They are used for all cut tables with ``update="step"``; and in backward where
:func:`shardrec.lookup.fbgemm_kernel.has_fused_kernel` is False, for row-wise states of a table cut by
columns (the mean square is over the whole row, and a rank holds a part of it) and for replicated tables (the
gradient is complete only after the all-reduce). States and updates are float32. The rows of a 16-bit table
are rounded to nearest when they are written back. The rules are from :mod:`torch.optim` and
``torchrec.optim.RowWiseAdagrad``, on the rows given. Partial rowwise Adam and LAMB (You et al., 2020) are fbgemm's,
with a trust ratio per row.

[Note: averages of rows]
With decay d, the average of n steps is a_n = sum of d^(n - i) w_i / sum of d^(n - i), over the values w_i after step i.
A row that no step looks up between steps m and n keeps its value w, so that a_n = w + f (a_m - w) with

    f = d^(n - m) (1 - d^m) / (1 - d^n)

Rows are brought up to date so before they change. M is kept for each, 0 for a row that has not changed yet (f = 0).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from shardrec import native
from shardrec.lookup.backward import LookupGradient
from shardrec.lookup.group_shards import RowGradient, TableBank, WidthClass
from shardrec.lookup.native_kernel import RULES
from shardrec.lookup.optimizers import FusedOptimizer, OptimizerKind


class RowOptimizer:
    """The states of some tables' optimizer, and its step on some of their rows.

    Attributes:
        step_count: updates so far. Adam's bias correction reads it.
        lr: learning rate of the next step.
    """

    def __init__(self, classes: Sequence[WidthClass], tables: int, optimizer: FusedOptimizer) -> None:
        self.optimizer = optimizer
        self.step_count = 0
        self.lr = optimizer.lr
        self._log_decay: float | None = None
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
                values=gradient.scaled().values.add(
                    cls.weight.index_select(0, gradient.rows).to(torch.float32), alpha=factor
                ),
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
                if self._log_decay is not None:
                    before = self.step_count - 1
                    average = self._average(cls, states, gradient.rows, before)
                    states["average"].index_copy_(0, gradient.rows, average)
                    states["average_step"].index_fill_(0, gradient.rows, before)
                self._update(cls.weight, states, gradient, square)

    @property
    def reads_lookups(self) -> bool:
        """Whether there is :meth:`step_from_lookups` for these tables."""
        options = self.optimizer
        return (
            options.kind in RULES
            and not options.weight_decay
            and self._log_decay is None
            and native.has_operators()
            and all(cls.weight.is_cpu and cls.weight.dtype is torch.float32 for cls, _ in self._classes)
        )

    @torch.no_grad()
    def step_from_lookups(self, bank: TableBank, lookups: Sequence[LookupGradient]) -> None:
        """:meth:`step` with the gradients of some backwards, which are not added up before."""
        self.step_count += 1
        operands, rule = bank.operands(lookups), RULES[self.optimizer.kind]
        for cls, states in self._classes:
            torch.ops.shardrec.update_matrix(
                cls.weight,
                states.get("sum"),
                *operands,
                cls.slot_bases,
                bank.columns,
                bank.pooled,
                rule,
                self.lr,
                self.optimizer.eps,
            )

    def keep_averages(self, decay: float) -> None:
        """Average each row's values from now on, as states. Decay is in (0, 1), see [Note: averages of rows]."""
        if self._log_decay == math.log(decay):
            return  # as before
        self._log_decay = math.log(decay)
        for cls, states in self._classes:
            states["average"] = torch.zeros_like(cls.weight, dtype=torch.float32)
            states["average_step"] = torch.zeros(len(cls.weight), dtype=torch.int32, device=cls.weight.device)

    @torch.no_grad()
    def averages(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Per width class its weight, and the averages of its rows after the last step, (rows, w) float32."""
        for cls, states in self._classes:
            rows = torch.arange(len(cls.weight), device=cls.weight.device)
            yield cls.weight, self._average(cls, states, rows, self.step_count)

    @torch.no_grad()
    def settle_averages(self) -> None:
        """Bring the averages of all rows up to the last step, before rows change without a step."""
        for (_, states), (_, average) in zip(self._classes, self.averages(), strict=True):
            states["average"].copy_(average)
            states["average_step"].fill_(self.step_count)

    def _average(self, cls: WidthClass, states: Mapping[str, Tensor], rows: Tensor, now: int) -> Tensor:
        """(U, w) float32: the averages of some rows after ``now`` steps, up to which they have had their values."""
        weight, log = cls.weight.index_select(0, rows).to(torch.float32), self._log_decay
        assert log is not None, "averages are kept"
        if not now:
            return weight
        last = states["average_step"].index_select(0, rows).to(torch.float64)
        factor = torch.exp((now - last) * log) * torch.expm1(last * log) / math.expm1(now * log)
        return weight.lerp_(states["average"].index_select(0, rows), factor.to(torch.float32).unsqueeze(1))

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
        rows = gradient.rows
        options = self.optimizer
        if options.row_states and mean_square is None:
            mean_square = gradient.square_sums() / weight.size(1)
        if options.kind in RULES and weight.dtype is torch.float32 and weight.is_cpu and native.has_operators():
            scale = 1.0 if gradient.scale is None else gradient.scale.item()
            setting = scale, RULES[options.kind], self.lr, options.eps
            torch.ops.shardrec.update_rows(weight, states.get("sum"), rows, gradient.values, mean_square, *setting)
            return
        values = gradient.scaled().values
        match options.kind:
            case OptimizerKind.SGD:
                change = values
            case OptimizerKind.ADAGRAD:
                total = states["sum"].index_select(0, rows).addcmul_(values, values)
                states["sum"].index_copy_(0, rows, total)
                total.sqrt_().add_(options.eps)
                change = torch.div(values, total, out=total)
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
                # A row of zeros, or a change of zeros, does not define a ratio.
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
        return first.div_(1 - beta1**self.step_count).div_(root if mean_square is None else root.unsqueeze(1))

"""A bank: the shards of one lookup group that this rank holds, looked up by one kernel call.

Shapes: T local tables (shards), S slots, B_all samples, N ids, D columns of all the slots, U distinct rows.

The kernel keeps all the weights in one flat tensor. A bank that is used forward only has its tables laid out in it by
width, so that the tables of one width are also one matrix, whose rows the row-by-row optimizers can address::

    flat   | t1 (500 × 16) | t3 (90 × 16) | t2 (40 × 8) |
    class    width 16: matrix (590, 16)     width 8: matrix (40, 8)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from shardrec.lookup.kernels import kernel_states, make_kernel, set_first_sums
from shardrec.lookup.optimizers import FusedOptimizer

__all__ = ["RowGradient", "TableBank", "WidthClass"]


@dataclass(frozen=True, kw_only=True)
class WidthClass:
    """The tables of one width as one matrix.

    Args:
        width: columns w.
        tables: numbers of the tables, in order.
        bases: per table, its first row in the matrix; one more entry for the end.
        weight: (rows, w), a view of the kernel's memory.
        slots: numbers of the slots that look these tables up.
        slot_bases: (slots,) int64, the first matrix row of each slot's table.
    """

    width: int
    tables: tuple[int, ...]
    bases: tuple[int, ...]
    weight: Tensor
    slots: tuple[int, ...]
    slot_bases: Tensor


@dataclass(frozen=True, kw_only=True)
class RowGradient:
    """The gradient of one width class: ``rows`` (U,) distinct, ascending matrix rows, ``values`` (U, w)."""

    rows: Tensor
    values: Tensor


class TableBank:
    """Local tables and their kernel.

    Args:
        shapes: (rows, columns) of each local table; at least one.
        slot_tables: per slot, the number of its table; the order is that of ids and of pooled columns.
        optimizer: fused into the kernel's backward; None for a kernel used forward only.
        device: CPU or CUDA.
        pooled: look up sums of bags; else one row per id, which takes tables of one width.

    Attributes:
        weights: per table, its (rows, columns) weights, a view of the kernel's memory.
        classes: the same memory by width; empty with a fused optimizer.
        step_count: updates made by a fused Adam.
    """

    def __init__(
        self,
        shapes: Sequence[tuple[int, int]],
        slot_tables: Sequence[int],
        optimizer: FusedOptimizer | None,
        device: torch.device,
        *,
        pooled: bool = True,
    ) -> None:
        self.pooled = pooled
        self.shapes = tuple(shapes)
        self.slot_tables = tuple(slot_tables)
        self.optimizer = optimizer
        self.device = device
        self.step_count = 0
        self._lr = 0.0 if optimizer is None else optimizer.lr
        order = list(range(len(shapes)))
        if optimizer is None:
            order.sort(key=lambda table: -shapes[table][1])
        place = {table: position for position, table in enumerate(order)}
        self.kernel = make_kernel(
            [self.shapes[table] for table in order],
            [place[table] for table in slot_tables],
            optimizer,
            device,
            pooled=pooled,
        )
        if optimizer is not None:
            set_first_sums(self.kernel, optimizer)
        in_kernel = self.kernel.split_embedding_weights()
        self.weights: list[Tensor] = [in_kernel[place[table]] for table in range(len(shapes))]
        self._place = place
        self.classes = self._classes(order) if optimizer is None else ()

    def states(self) -> list[dict[str, Tensor]]:
        """Per table, the kernel's optimizer states by name (views); empty dicts without fused optimizer."""
        if self.optimizer is None:
            return [{} for _ in self.shapes]
        states = kernel_states(self.kernel, self.optimizer)
        return [states[self._place[table]] for table in range(len(self.shapes))]

    def look_up(self, ids: Tensor, lengths: Tensor, weights: Tensor | None) -> Tensor:
        """Sums of rows, or the rows.

        Args:
            ids: (N,) rows of each slot's table, slot after slot.
            lengths: (S, B_all) int32, ids of each bag.
            weights: (N,) float32 or None.

        Returns:
            (B_all, D) float32, or (N, w) without pooling. With a fused optimizer, its backward updates the weights.
        """
        offsets = torch.ops.fbgemm.asynchronous_complete_cumsum(lengths.reshape(-1))
        ids = ids.to(torch.int64)
        counts_steps = self.optimizer is not None and self.optimizer.counts_steps
        if counts_steps:
            # The kernel would count each forward as a step of Adam; one without a backward must not count.
            self.kernel.iter.fill_(self.step_count)
            self.kernel.iter_cpu.fill_(self.step_count)
        if torch.is_inference_mode_enabled():
            # fbgemm registers its training kernels for autograd only, which inference mode leaves out.
            with torch.inference_mode(False), torch.no_grad():
                values: Tensor = self.kernel(ids, offsets.to(torch.int64), weights)
            return values
        pooled: Tensor = self.kernel(ids, offsets.to(torch.int64), weights)
        if counts_steps and pooled.requires_grad:
            pooled.register_hook(self._count_step)
        return pooled

    def set_learning_rate(self, lr: float) -> None:
        """Use ``lr`` from the next look-up on."""
        if lr != self._lr:
            self.kernel.set_learning_rate(lr)
            self._lr = lr

    def _count_step(self, gradient: Tensor) -> None:
        self.step_count += 1

    def row_gradients(
        self, ids: Tensor, lengths: Tensor, weights: Tensor | None, gradient: Tensor
    ) -> list[RowGradient]:
        """The gradient of each distinct row, per width class.

        Args:
            ids: (N,) as looked up.
            lengths: (S, B_all).
            weights: (N,) or None.
            gradient: (B_all, D) of the pooled output, or (N, w).
        """
        batch = lengths.size(1)
        count = ids.numel()
        slot_count = len(self.slot_tables)
        bags = torch.arange(slot_count * batch, device=ids.device)
        bag_N = bags.repeat_interleave(lengths.reshape(-1).to(torch.int64), output_size=count)
        starts = [0, *accumulate(self.shapes[table][1] for table in self.slot_tables)]
        found = []
        for cls in self.classes:
            if len(cls.slots) == slot_count:
                ids_n, bag_n, weights_n, part = ids, bag_N, weights, gradient
            else:
                chosen = torch.zeros(slot_count, dtype=torch.bool, device=ids.device)
                chosen[list(cls.slots)] = True
                mask = chosen[bag_N // max(batch, 1)]
                renumber = chosen.cumsum(0) - 1
                ids_n, weights_n = ids[mask], None if weights is None else weights[mask]
                bag_n = bag_N[mask]
                bag_n = renumber[bag_n // batch] * batch + bag_n % batch if len(bag_n) else bag_n
                part = torch.cat([gradient[:, starts[slot] : starts[slot + 1]] for slot in cls.slots], dim=1)
            slot_n, sample_n = bag_n // max(batch, 1), bag_n % max(batch, 1)
            values_n = part
            if self.pooled:
                slots = len(cls.slots)
                values_n = part.reshape(batch * slots, cls.width).index_select(0, sample_n * slots + slot_n)
            if weights_n is not None:
                values_n = values_n * weights_n.unsqueeze(1)
            found.append(_sum_by_row(cls, ids_n.to(torch.int64), slot_n, values_n))
        return found

    def _classes(self, order: Sequence[int]) -> tuple[WidthClass, ...]:
        classes = []
        flat = self.kernel.weights_dev if self.device.type == "cuda" else self.kernel.weights_host
        start = 0
        for width in dict.fromkeys(self.shapes[table][1] for table in order):
            tables = tuple(table for table in order if self.shapes[table][1] == width)
            bases = (0, *accumulate(self.shapes[table][0] for table in tables))
            base_of = dict(zip(tables, bases, strict=False))
            slots = tuple(slot for slot, table in enumerate(self.slot_tables) if table in base_of)
            numel = bases[-1] * width
            classes.append(
                WidthClass(
                    width=width,
                    tables=tables,
                    bases=bases,
                    weight=flat.detach()[start : start + numel].view(bases[-1], width),
                    slots=slots,
                    slot_bases=torch.tensor(
                        [base_of[self.slot_tables[slot]] for slot in slots], dtype=torch.int64, device=self.device
                    ),
                )
            )
            start += numel
        return tuple(classes)


def _sum_by_row(cls: WidthClass, ids: Tensor, slot_n: Tensor, values_n: Tensor) -> RowGradient:
    """Sum the gradient (N, w) of each id by row; ``slot_n`` numbers the class's slots."""
    rows, place_n = torch.unique(ids + cls.slot_bases[slot_n], sorted=True, return_inverse=True)
    values = values_n.new_zeros((rows.numel(), cls.width)).index_add_(0, place_n, values_n)
    return RowGradient(rows=rows, values=values)

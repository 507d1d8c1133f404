"""Gradients that backward has left for the optimizer's ``step()``: ``shard(..., update="step")``.

::

    backward 1   rows 2 5 9 2    ┐
    backward 2   rows 1 5 5      ├─ step(): rows 1 2 5 9, each once, the gradients of equal rows added in this order
    backward 3   rows 2 9        ┘

A backward only stores references to the ids and the output's gradient. The step adds up a row's gradients while it
updates the row. Where sums are needed before (a norm, GradScaler), or after ``_MAX_LOOKUPS`` backwards, they are added
up: from then on a row of w columns takes 4 w + 12 bytes.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from shardrec.lookup.backward import LookupGradient
from shardrec.lookup.group_shards import RowGradient, TableBank, summed

_MAX_LOOKUPS = 4


class DeferredGradients:
    """The gradients of a bank's rows since the last step.

    Args:
        bank: forward only. None on a rank without rows.

    Attributes:
        backwards: calls of :meth:`add` since the last step or :meth:`drop`.
    """

    def __init__(self, bank: TableBank | None) -> None:
        self._bank = bank
        self._lookups: list[LookupGradient] = []
        self._sums: list[RowGradient] = []
        self.drop()

    def add(self, lookup: LookupGradient) -> None:
        """Keep the gradient of a backward."""
        self.backwards += 1
        if self._bank is not None:
            self._lookups.append(lookup)
            if len(self._lookups) > _MAX_LOOKUPS:
                self._sum()

    def sums(self, *, to_change: bool = False) -> list[RowGradient]:
        """The gradient of each distinct row, per width class. Empty if there was no backward.

        Args:
            to_change: the caller changes the ``values`` in place.
        """
        self._sum()
        if to_change:
            self._sums = [replace(gradient.scaled(), squares=None) for gradient in self._sums]
        return self._sums

    def tensors(self) -> list[Tensor]:
        """The values of the sums, (U, w) float32 each, to be changed in place."""
        return [gradient.values for gradient in self.sums(to_change=True)]

    def scale(self, factor: Tensor) -> None:
        """Multiply what :meth:`sums` returned by a () float32 factor, in the step."""
        self._sums = [gradient.times(factor) for gradient in self._sums]

    def take_lookups(self) -> list[LookupGradient]:
        """All of the backwards, which are then no longer kept. Empty if some have been added up."""
        lookups = [] if self._sums else self._lookups
        if lookups:
            self.drop()
        return lookups

    def take(self) -> list[RowGradient]:
        """:meth:`sums`, which are then no longer kept."""
        gradients = self.sums()
        self.drop()
        return gradients

    def drop(self) -> None:
        """Let go of the gradients."""
        self.backwards = 0
        self._lookups = []
        self._sums = []

    def drop_rows(self, table: int, rows: Tensor) -> None:
        """Let go of the gradients of some rows.

        Args:
            table: number of the table in the bank.
            rows: (E,) int64, of the table.
        """
        self._sum()
        for number, gradient in enumerate(self._sums):
            assert self._bank is not None, "there are sums"
            cls = self._bank.classes[number]
            if table in cls.tables:
                base = cls.bases[cls.tables.index(table)]
                kept = torch.isin(gradient.rows, rows.to(gradient.rows) + base, invert=True)
                self._sums[number] = replace(
                    gradient, rows=gradient.rows[kept], values=gradient.values[kept], squares=None
                )

    def _sum(self) -> None:
        """Add up the gradients of equal rows, in the order in which they came."""
        if self._bank is None or not self._lookups:
            return
        gradients = self._bank.row_gradients(self._lookups)
        for number, (before, cls) in enumerate(zip(self._sums, self._bank.classes, strict=False)):
            pair = before.scaled(), gradients[number]
            rows, values = torch.cat([part.rows for part in pair]), torch.cat([part.values for part in pair])
            gradients[number] = summed(rows, values, cls)
        self._sums, self._lookups = gradients, []

"""Gradients of rows that a backward has left for the optimizer's ``step()``: ``shard(..., update="step")``.

::

    backward 1   rows 2 5 9      ┐
    backward 2   rows 1 5        ├─ step(): rows 1 2 5 9, each once, the gradients of equal rows added in this order
    backward 3   rows 2 9        ┘

What waits is at most ``_MOST_WAITING`` times the distinct rows since the last step, and the rows of one backward: as
soon as more wait, those of equal rows are added. A row of w columns takes 4 w + 12 bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from shardrec.lookup.bank import RowGradient, WidthClass, summed

__all__ = ["DeferredGradients"]

_MOST_WAITING = 4


class DeferredGradients:
    """The gradients of some tables' rows since the last step, by width class.

    Args:
        classes: of the tables.

    Attributes:
        backwards: calls of :meth:`add` since the last :meth:`take` or :meth:`drop`.
    """

    def __init__(self, classes: Sequence[WidthClass]) -> None:
        self._classes = classes
        self.backwards = 0
        self._waiting: list[list[RowGradient]] = [[] for _ in classes]

    def add(self, gradients: Sequence[RowGradient]) -> None:
        """Keep the gradients of a backward, one entry per width class."""
        self.backwards += 1
        for number, gradient in enumerate(gradients):
            waiting = self._waiting[number]
            waiting.append(gradient)
            if sum(part.rows.numel() for part in waiting) > _MOST_WAITING * max(part.rows.numel() for part in waiting):
                self._sum(number)

    def sums(self, *, to_change: bool) -> list[RowGradient]:
        """The gradient of each distinct row, per width class.

        Args:
            to_change: the caller changes the ``values`` in place.
        """
        for number, waiting in enumerate(self._waiting):
            if not waiting:
                return []
            self._sum(number)
            if to_change:
                self._waiting[number] = [replace(self._waiting[number][0], squares=None)]
        return [waiting[0] for waiting in self._waiting]

    def take(self) -> list[RowGradient]:
        """The gradient of each distinct row, per width class, which is then no longer kept."""
        for number in range(len(self._waiting)):
            self._sum(number)
        gradients = [gradient for waiting in self._waiting for gradient in waiting]
        self.drop()
        return gradients

    def drop(self) -> None:
        """Let go of the gradients."""
        self.backwards = 0
        self._waiting = [[] for _ in self._classes]

    def drop_rows(self, table: int, rows: Tensor) -> None:
        """Let go of the gradients of some rows.

        Args:
            table: number of the table in its classes.
            rows: (E,) int64, of the table.
        """
        for cls, waiting in zip(self._classes, self._waiting, strict=True):
            if table in cls.tables:
                base = cls.bases[cls.tables.index(table)]
                for place, gradient in enumerate(waiting):
                    kept = torch.isin(gradient.rows, rows.to(gradient.rows) + base, invert=True)
                    waiting[place] = RowGradient(rows=gradient.rows[kept], values=gradient.values[kept])

    def _sum(self, number: int) -> None:
        """Add up the gradients of equal rows of a width class, in the order in which they came."""
        cls, waiting = self._classes[number], self._waiting[number]
        if len(waiting) < 2:
            return
        rows = torch.cat([gradient.rows for gradient in waiting])
        values = torch.cat([gradient.values for gradient in waiting])
        self._waiting[number] = [summed(rows, values, cls)]

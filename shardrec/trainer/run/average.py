"""``Average``: the exponentially averaged weights of a run's model, of its dense layers and its tables (``--ema``).

The average of n steps is the average of the weights after each step, with the weights after step i weighted by ``decay
** (n - i)``. A dense parameter's average is its optimizer's state ``average``. For rows see [Note: averages of rows].
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Protocol

import torch
from torch import Tensor

from shardrec import ShardedModel


class _AveragedRows(Protocol):
    """The optimizer of a table's rows, which keeps their averages."""

    def averages(self) -> Iterable[tuple[Tensor, Tensor]]:
        """The rows on this rank, and their averages, which have the same shape."""


class Average:
    """Averages the weights of a model from now on.

    Args:
        model: its tables are updated at the step.
        optimizer: of its dense part. Its states and settings hold what a checkpoint needs.
        decay: from 0 to 1 (neither included).
    """

    def __init__(self, model: ShardedModel, optimizer: torch.optim.Optimizer, decay: float) -> None:
        self._model, self._decay, self._optimizer = model, decay, optimizer
        self._rows()
        for group in optimizer.param_groups:
            group["averaged"] = 0
        optimizer.register_step_post_hook(self._after_step)

    def _rows(self) -> list[_AveragedRows]:
        """What has the averages of this rank's rows."""
        return [
            rows for collection in self._model.sharded_collections for rows in collection.keep_averages(self._decay)
        ]

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        for group in optimizer.param_groups:
            group["averaged"] += 1
            share = (1 - self._decay) / (1 - self._decay ** group["averaged"])
            for parameter in group["params"]:
                state = optimizer.state[parameter]
                if "average" in state:
                    state["average"].lerp_(parameter.detach().to(torch.float32), share)
                elif parameter.grad is not None:  # before its first gradient, its optimizer makes its states
                    state["average"] = parameter.detach().to(torch.float32, copy=True)

    @torch.no_grad()
    def apply(self) -> list[tuple[Tensor, Tensor]]:
        """Give the model its averaged weights.

        Returns:
            Each weight, and a copy of its former value.
        """
        dense = ((weight, state["average"]) for weight, state in self._optimizer.state.items() if "average" in state)
        before = []
        for weight, average in chain(*(rows.averages() for rows in self._rows()), dense):
            before.append((weight, weight.clone()))
            weight.copy_(average)
        return before

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Inside, the model has its averaged weights."""
        before = self.apply()
        try:
            yield
        finally:
            with torch.no_grad():
                for weight, value in before:
                    weight.copy_(value)

"""What a side can do."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

from benchmarks.harness.timing.inputs import Batch

__all__ = ["Side"]


class Side(Protocol):
    """One way to make a case's step.

    Attributes:
        keys: of the output's runs of columns, known after the first step.
        widths: columns of each.
    """

    keys: list[str]
    widths: list[int]

    def prepare(self, batch: Batch) -> Any:
        """What a data loader would hand to :meth:`step`. Made before the clock runs."""

    def step(self, inputs: Any) -> Tensor:
        """The whole step. Returns the output, (B, sum(widths)) floats."""

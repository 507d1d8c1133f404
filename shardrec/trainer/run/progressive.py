"""``Progressive``: metrics of the rows that a run trains on, each scored before the step that learns from it.

"Beating the hold-out", Blum et al., 1999. Training computes the scores anyway, in its own mode (with dropout).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from shardrec.trainer.data import ClickMetrics, click_metrics
from shardrec.trainer.run.held_out import gather_rows

__all__ = ["Progressive"]


class Progressive:
    """The labels and scores of the last rows.

    Args:
        rows: of this rank, that are kept.
    """

    def __init__(self, rows: int) -> None:
        self._most, self._rows = rows, 0
        self._scored: deque[Tensor] = deque()

    def scoring(self, model: nn.Module, labels: Tensor) -> Callable[..., Any]:
        """The model, for one call on the rows with these labels, (B,), whose logits are then kept."""

        def forward(*inputs: Any) -> Any:
            logits = model(*inputs)
            self._add(torch.stack((labels, logits.detach().view(-1).float())))  # read on the host at a point only
            return logits

        return forward

    def metrics(self) -> ClickMetrics | None:
        """Of the last rows of all ranks; None if all of them have one label. Collective.

        Raises:
            ConfigError: for scores that are not numbers.
        """
        labels, logits = gather_rows(self.state())
        if labels.numel() == 0 or bool((labels == labels[0]).all()):
            return None
        return click_metrics(labels.numpy(), torch.sigmoid(logits.double()).numpy())

    def state(self) -> Tensor:
        """Labels and logits, (2, N) float32 on the CPU."""
        rows = torch.cat([torch.zeros((2, 0)), *(batch.cpu() for batch in self._scored)], dim=1)
        return rows[:, -self._most :].contiguous()

    def load(self, rows: Tensor) -> None:
        """Go on from :meth:`state`."""
        self._scored, self._rows = deque([rows]), rows.size(1)

    def _add(self, rows: Tensor) -> None:
        if not rows.size(1):  # as of a rank that has none of small arrivals
            return
        self._scored.append(rows)
        self._rows += rows.size(1)
        while self._rows - self._scored[0].size(1) >= self._most:
            self._rows -= self._scored.popleft().size(1)

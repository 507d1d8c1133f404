"""A run's curves for TensorBoard: ``tensorboard --logdir runs``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from shardrec.train.display import Display

if TYPE_CHECKING:
    from shardrec.train.report import CurvePoint

__all__ = ["Board"]

_HELD_OUT = ("auc", "logloss", "normalized_entropy", "gauc", "ndcg")


class Board(Display):
    """A display that also writes event files: the loss, samples a second, learning rates, held-out metrics, id counts.

    Args:
        shown: is told of everything, too.
        folder: of the event files.
        rates: gives the learning rates by name.
        samples: rows trained on before; what a run that was cut off has written after them is not shown.
        seconds: that they took.
    """

    def __init__(
        self,
        shown: Display,
        folder: Path,
        rates: Callable[[], Mapping[str, float]],
        *,
        samples: int = 0,
        seconds: float = 0.0,
    ) -> None:
        # A second of imports, on one rank.
        from torch.utils.tensorboard import SummaryWriter

        self._shown = shown
        self._rates = rates
        self._writer = SummaryWriter(str(folder), purge_step=samples or None)
        self._write = self._writer.add_scalar
        self._last = (samples, seconds)

    def advance(self, samples: int, seconds: float, loss: float) -> None:
        self._shown.advance(samples, seconds, loss)
        rows, spent = samples - self._last[0], seconds - self._last[1]
        self._last = (samples, seconds)
        self._write("train/loss", loss, samples)
        if spent > 0 and rows > 0:
            self._write("train/samples_per_second", rows / spent, samples)
        for name, rate in self._rates().items():
            self._write(f"learning_rate/{name}", rate, samples)

    def evaluated(self, point: CurvePoint) -> None:
        self._shown.evaluated(point)
        for name in _HELD_OUT:
            value = getattr(point, name)
            if value is not None:
                self._write(f"held_out/{name}", value, point.samples)
        for table, counts in point.ids.items():
            for name, count in counts.items():
                self._write(f"ids/{table}/{name}", count, point.samples)
            self._write(f"ids/{table}/load", counts["used"] / counts["rows"], point.samples)

    def close(self) -> None:
        self._shown.close()
        self._writer.close()

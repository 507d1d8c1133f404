"""A run's curves for TensorBoard: ``tensorboard --logdir runs``."""

from __future__ import annotations

from torch.optim import Optimizer

from shardrec.trainer.run.config import BOARD
from shardrec.trainer.run.display import Display
from shardrec.trainer.run.report import CurvePoint
from shardrec.trainer.run.run import Run

_HELD_OUT = ("auc", "logloss", "normalized_entropy", "gauc", "ndcg")


class Board(Display):
    """A display that also writes event files: losses, samples a second, rates, norms, held-out metrics, ids, plans.

    Args:
        shown: a display that also gets everything.
        run: the run, which continues from its progress. Points that an interrupted run wrote after that are not shown.
    """

    def __init__(self, shown: Display, run: Run) -> None:
        # A second of imports, on one rank.
        from torch.utils.tensorboard import SummaryWriter

        self._shown = shown
        self._optimizers: dict[str, Optimizer] = {"dense": run.optimizer, "tables": run.model.fused_optimizer}
        self._norms = run.progress.grad_norms
        self._last = (run.progress.samples, run.progress.seconds)
        self._writer = SummaryWriter(str(run.folder / BOARD), purge_step=run.progress.samples or None)
        self._write = self._writer.add_scalar

    def advance(self, samples: int, seconds: float, loss: float, waits: float) -> None:
        self._shown.advance(samples, seconds, loss, waits)
        rows, spent = samples - self._last[0], seconds - self._last[1]
        self._last = (samples, seconds)
        self._write("train/loss", loss, samples)
        self._write("train/waits_for_data", waits, samples)
        if spent > 0 and rows > 0:
            self._write("train/samples_per_second", rows / spent, samples)
        for name, optimizer in self._optimizers.items():
            self._write(f"learning_rate/{name}", float(optimizer.param_groups[0]["lr"]), samples)
        for name, norm in self._norms.items():
            self._write(f"gradient_norm/{name}", norm.mean(), samples)

    def evaluated(self, point: CurvePoint) -> None:
        self._shown.evaluated(point)
        rows = "progressive" if point.progressive else "held_out"
        for name, value in ({name: getattr(point, name) for name in _HELD_OUT} | {**point.tasks}).items():
            if value is not None:
                self._write(f"{rows}/{name}", value, point.samples)
        for table, counts in point.ids.items():
            for name, count in counts.items():
                self._write(f"ids/{table}/{name}", count, point.samples)
            self._write(f"ids/{table}/load", counts["used"] / counts["rows"], point.samples)

    def keep(self, name: str, value: float, samples: int) -> None:
        self._write(name, value, samples)

    def close(self) -> None:
        self._shown.close()
        self._writer.close()

"""What the loop of a run has done so far: steps, losses, points of the held-out curve, and the time they took."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from shardrec import ConfigError
from shardrec.trainer.run.report import CurvePoint

_KEPT = ("steps", "epoch", "epoch_steps", "seconds", "evaluated_at", "best_step")


class RecentMean:
    """Means over the last steps of a number such as the loss, kept on the device: reading one makes the host wait."""

    def __init__(self, device: torch.device) -> None:
        self._sum = torch.zeros((), device=device)
        self._steps = 0
        self._smooth: float | None = None
        self._point_sum = 0.0
        self._point_steps = 0

    def add(self, value: Tensor) -> None:
        """Take in a step's number."""
        self._sum += value.detach()
        self._steps += 1

    def mean(self) -> float:
        """Exponentially smoothed over the last few reads. Every call reads what was added since."""
        if self._steps:
            total = float(self._sum)
            mean = total / self._steps
            self._smooth = mean if self._smooth is None else 0.7 * self._smooth + 0.3 * mean
            self._point_sum += total
            self._point_steps += self._steps
            self._sum.zero_()
            self._steps = 0
        return math.nan if self._smooth is None else self._smooth

    def since_point(self) -> float | None:
        """The plain mean since the last call."""
        self.mean()
        mean = self._point_sum / self._point_steps if self._point_steps else None
        self._point_sum, self._point_steps = 0.0, 0
        return mean

    def state(self) -> list[float | None]:
        """All of it, JSON-compatible. Nothing is read that would round a later sum otherwise."""
        return [float(self._sum), self._steps, self._smooth, self._point_sum, self._point_steps]

    def load(self, state: Sequence[Any]) -> None:
        """Continue from the result of :meth:`state`."""
        total, self._steps, self._smooth, self._point_sum, self._point_steps = state
        self._sum.fill_(total)


def undefined_monitor(watched: str, rows: int) -> ConfigError:
    """What is wrong where points are compared by a metric that some held-out rows do not have."""
    return ConfigError(
        f"patience (--patience) and the best checkpoint (--checkpoint best) compare points by {watched!r} (--monitor), "
        f"and the {rows:,} held-out rows lack it, because all or none of them, or of any group, were clicked: hold out "
        "others (--valid), or give --monitor logloss"
    )


@dataclass(kw_only=True)
class Progress:
    """What the loop has done so far, over all epochs and restarts.

    Attributes:
        world_size: number of ranks.
        loss: of this rank.
        grad_norms: of all ranks' gradients before they are clipped, by part of the model. Empty without clipping.
        steps: optimizer steps.
        epoch: epochs that are over.
        epoch_steps: steps in the present one, which say how many of its batches were read.
        rows: rows of this rank.
        seconds: time of the steps, without evaluations and checkpoints.
        curve: the points evaluated.
        evaluated_at: the step of the last of them.
        best_step: the step of the best point that is saved. None if none is.
        watched: metric of a :class:`CurvePoint` that decides which of two points is better.
    """

    world_size: int
    loss: RecentMean
    grad_norms: Mapping[str, RecentMean] = field(default_factory=dict)
    steps: int = 0
    epoch: int = 0
    epoch_steps: int = 0
    rows: int = 0
    seconds: float = 0.0
    curve: list[CurvePoint] = field(default_factory=list)
    evaluated_at: int = 0
    best_step: int | None = None
    watched: str = "logloss"
    _begin: float | None = field(default=None, init=False, repr=False)

    def stalled(self, patience: int | None) -> bool:
        """Whether the last ``patience`` points of the curve brought no improvement. Raises as ``improved``."""
        return patience is not None and not self.improved(patience)

    def improved(self, points: int = 1) -> bool:
        """Whether any of the last points of the curve is better than all before.

        Raises:
            ConfigError: for a point without the watched metric.
        """
        sign = -1 if self.watched in ("logloss", "normalized_entropy", "loss") else 1
        values = [point.value(self.watched) for point in self.curve]
        worths = [sign * value for value in values if value is not None]
        if len(worths) < len(values):
            raise undefined_monitor(self.watched, self.curve[-1].rows)
        return len(worths) <= points or max(worths[-points:]) > max(worths[:-points])

    def next_epoch(self) -> None:
        """The present epoch, of a feed the arrival, is over."""
        self.epoch, self.epoch_steps = self.epoch + 1, 0

    @property
    def samples(self) -> int:
        """Rows over all ranks, as if each had as many as this one: in the last step of an epoch they may not."""
        return self.rows * self.world_size

    @contextmanager
    def on_the_clock(self) -> Iterator[None]:
        """Adds the time that passes inside to ``seconds``."""
        self._begin = time.perf_counter()
        try:
            yield
        finally:
            self.seconds, self._begin = self.seconds_now(), None

    @contextmanager
    def off_the_clock(self) -> Iterator[None]:
        """Inside of :meth:`on_the_clock`: leaves the time that passes inside out. Elsewhere, does nothing."""
        runs = self._begin is not None
        self.seconds, self._begin = self.seconds_now(), None
        try:
            yield
        finally:
            self._begin = time.perf_counter() if runs else None

    def seconds_now(self) -> float:
        """``seconds``, with those that are running."""
        return self.seconds if self._begin is None else self.seconds + time.perf_counter() - self._begin

    def state(self) -> dict[str, object]:
        """All but the rows, JSON-compatible."""
        kept = {name: getattr(self, name) for name in _KEPT}
        norms = {name: mean.state() for name, mean in self.grad_norms.items()}
        curve = [dataclasses.asdict(point) for point in self.curve]
        return kept | {"loss": self.loss.state(), "grad_norms": norms, "curve": curve}

    def state_dict(self) -> dict[str, Any]:
        """All of it, as a replica takes it that joins."""
        return {**self.state(), "rows": self.rows}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from the result of :meth:`state_dict`."""
        self.load(state, state["rows"])

    def load(self, state: Mapping[str, Any], rows: int) -> None:
        """Continue from the result of :meth:`state`."""
        for name in _KEPT:
            setattr(self, name, state[name])
        self.loss.load(state["loss"])
        for name, mean in self.grad_norms.items():
            mean.load(state["grad_norms"][name])
        self.curve = [CurvePoint(**point) for point in state["curve"]]
        self.rows = rows

"""A plan that follows the data of a run (``--replan``): what it is made from, when, and the gain of a change."""

from __future__ import annotations

from collections import deque

from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from shardrec import CheckpointError, ConfigError, PlanError
from shardrec.trainer.run.display import Display
from shardrec.trainer.run.run import Run

_SAMPLED = 4
"""Number of last batches with ids that the planner sees."""


class Replanner:
    """Plans a run's model again at an interval of steps. Every rank has one and calls it at the same steps.

    Args:
        run: its model gets the plans, its announcer is told of them.
        interval: steps from one plan to the next, in which a change has to pay for itself.
        display: keeps the figures of a change.
        last_step: of the run, after which no plan is made. 0 if it does not end.
    """

    def __init__(self, run: Run, interval: int, display: Display, last_step: int = 0) -> None:
        self._run, self._interval, self._display, self._last_step = run, interval, display, last_step
        self._recent = deque[KeyedJaggedTensor](maxlen=_SAMPLED)
        self._begin = run.progress.steps, run.progress.seconds
        self._old_ms: float | None = None  # a step before the last change, if its interval is not over

    def saw(self, features: KeyedJaggedTensor) -> None:
        """Take in what the model was called with."""
        self._recent.append(features)

    def after_step(self) -> None:
        """Plan again if it is time. Training continues under the old plan if that fails."""
        progress, say = self._run.progress, self._run.announcer.say
        if progress.steps % self._interval:
            return
        step_ms = 1e3 * (progress.seconds_now() - self._begin[1]) / max(1, progress.steps - self._begin[0])
        if self._old_ms is not None:
            say(f"since the plan has changed, a step takes {step_ms:.2f} ms; before, it took {self._old_ms:.2f} ms")
        self._old_ms, change = None, None
        if progress.steps == self._last_step:
            return
        try:
            change = self._run.model.replan(
                self._recent, self._run.optimizer, steps=self._interval, constraints=self._run.constraints
            )
        except (CheckpointError, ConfigError, PlanError) as error:
            say(f"warning: the plan stays ({error})")
        if change is not None:
            say(f"step {progress.steps:,}: {change}")
            self._old_ms = step_ms
            self._display.keep("replan/predicted_ms", change.new_ms - change.old_ms, progress.samples)
            self._display.keep("replan/moved_bytes", change.moved_bytes, progress.samples)
        self._begin = progress.steps, progress.seconds_now()

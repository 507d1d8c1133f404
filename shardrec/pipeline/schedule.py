"""Schedules: the order of each stage's actions, as pure functions.

F2 is the forward of micro-batch 2, B2 its backward (here as long as a forward). 3 stages, 4 micro-batches::

    gpipe     stage 0  F0 F1 F2 F3  .  .  .  . B3 B2 B1 B0
              stage 1   . F0 F1 F2 F3  .  . B3 B2 B1 B0  .
              stage 2   .  . F0 F1 F2 F3 B3 B2 B1 B0  .  .

    1f1b      stage 0  F0 F1 F2  .  . B0 F3 B1  . B2  . B3
              stage 1   . F0 F1  . B0 F2 B1 F3 B2  . B3  .
              stage 2   .  . F0 B0 F1 B1 F2 B2 F3 B3  .  .

Both leave every stage idle for the same time; with 1F1B, stage s keeps the activations of at most S - s micro-batches
instead of all. GPipe: Huang et al., 2019. 1F1B: Narayanan et al., 2019 (PipeDream), with flushes.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Literal

from shardrec.errors import ConfigError

ScheduleName = Literal["gpipe", "1f1b"]


@dataclass(frozen=True, slots=True)
class Action:
    """A forward or backward of a stage.

    Args:
        kind: ``"F"``, a forward, or ``"B"``, a backward (with the recomputation, where there is one).
        batch: number of the micro-batch.
    """

    kind: Literal["F", "B"]
    batch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.batch}"


Schedule = list[list[Action]]
"""Per stage, its actions in order."""


def gpipe(stages: int, batches: int) -> Schedule:
    """All forwards, then all backwards, the last micro-batch first.

    Args:
        stages: number of stages S.
        batches: number of micro-batches M. May be less than S.
    """
    forwards = [Action("F", batch) for batch in range(batches)]
    backwards = [Action("B", batch) for batch in reversed(range(batches))]
    return [[*forwards, *backwards] for _ in range(stages)]


def one_f_one_b(stages: int, batches: int) -> Schedule:
    """Forwards until the first micro-batch has come back, then a backward after each forward.

    Args:
        stages: number of stages S.
        batches: number of micro-batches M. May be less than S.
    """
    schedule = []
    for stage in range(stages):
        ahead = min(stages - 1 - stage, batches)
        actions = [Action("F", batch) for batch in range(ahead)]
        for batch in range(ahead, batches):
            actions += [Action("F", batch), Action("B", batch - ahead)]
        actions += [Action("B", batch) for batch in range(batches - ahead, batches)]
        schedule.append(actions)
    return schedule


def only(kind: Literal["F", "B"], schedule: Schedule) -> Schedule:
    """The forwards of a schedule only, or the backwards."""
    return [[action for action in actions if action.kind == kind] for actions in schedule]


SCHEDULES = {"gpipe": gpipe, "1f1b": one_f_one_b}
"""The schedules by name."""


def in_order(schedule: Schedule) -> list[list[tuple[int, Action]]]:
    """Start each action, of one unit of time, as early as its stage and its neighbour (the stage before for a forward,
    the next one for a backward) allow.

    Returns:
        Per unit of time, the stages that start an action then, and the actions: one thread can do them all in this
        order.

    Raises:
        ConfigError: if some can never start.
    """
    everything = {(stage, action) for stage, actions in enumerate(schedule) for action in actions}
    done: set[tuple[int, Action]] = set()
    left = [deque(actions) for actions in schedule]
    units = []

    def can_start(stage: int, action: Action) -> bool:
        before = (
            {(stage - 1, action)} if action.kind == "F" else {(stage + 1, action), (stage, Action("F", action.batch))}
        )
        return before & everything <= done

    while any(left):
        started = [
            (stage, actions[0]) for stage, actions in enumerate(left) if actions and can_start(stage, actions[0])
        ]
        if not started:
            stuck = ", ".join(f"stage {stage} at {actions[0]}" for stage, actions in enumerate(left) if actions)
            raise ConfigError(f"the schedule cannot continue, {stuck}: put actions after the actions that they need")
        for stage, _ in started:
            left[stage].popleft()
        done.update(started)
        units.append(started)
    return units

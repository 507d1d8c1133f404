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

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from shardrec.errors import ConfigError

__all__ = [
    "SCHEDULES",
    "Action",
    "Schedule",
    "ScheduleName",
    "TimedAction",
    "backwards",
    "bubble",
    "draw",
    "forwards",
    "gpipe",
    "idle_share",
    "one_f_one_b",
    "simulate",
]

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


@dataclass(frozen=True, slots=True)
class TimedAction:
    """An action of a stage with its time, from ``start`` to ``end``."""

    stage: int
    action: Action
    start: float
    end: float


def gpipe(stages: int, batches: int) -> Schedule:
    """All forwards, then all backwards, the last micro-batch first.

    Args:
        stages: number of stages S.
        batches: number of micro-batches M; may be less than S.
    """
    forwards = [Action("F", batch) for batch in range(batches)]
    backwards = [Action("B", batch) for batch in reversed(range(batches))]
    return [[*forwards, *backwards] for _ in range(stages)]


def one_f_one_b(stages: int, batches: int) -> Schedule:
    """Forwards until the first micro-batch has come back, then a backward after each forward.

    Args:
        stages: number of stages S.
        batches: number of micro-batches M; may be less than S.
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


def forwards(schedule: Schedule) -> Schedule:
    """The forwards of a schedule only."""
    return [[action for action in actions if action.kind == "F"] for actions in schedule]


def backwards(schedule: Schedule) -> Schedule:
    """The backwards of a schedule only."""
    return [[action for action in actions if action.kind == "B"] for actions in schedule]


SCHEDULES = {"gpipe": gpipe, "1f1b": one_f_one_b}
"""The schedules by name."""


def simulate(schedule: Schedule) -> list[TimedAction]:
    """Start each action, of one unit of time, as early as its stage and its neighbour (the stage before for a forward,
    the next one for a backward) allow.

    Returns:
        The actions in order of their starts: an order in which one thread can do them all.

    Raises:
        ConfigError: if some can never start.
    """
    members = [set(actions) for actions in schedule]
    ends: dict[tuple[int, Action], float] = {}
    free = [0.0] * len(schedule)
    left = [list(reversed(actions)) for actions in schedule]
    timed: list[TimedAction] = []

    def needs(stage: int, action: Action) -> list[tuple[int, Action]]:
        forward_of = (stage, Action("F", action.batch))
        needed = [(stage - 1, action)] if action.kind == "F" else [(stage + 1, action), forward_of]
        return [
            (at, needed_action)
            for at, needed_action in needed
            if 0 <= at < len(schedule) and needed_action in members[at]
        ]

    progress = True
    while progress:
        progress = False
        for stage, actions in enumerate(left):
            while actions and all(need in ends for need in needs(stage, actions[-1])):
                action = actions.pop()
                start = max([free[stage], *(ends[need] for need in needs(stage, action))])
                free[stage] = ends[stage, action] = start + 1
                timed.append(TimedAction(stage, action, start, start + 1))
                progress = True
    stuck = [f"stage {stage} at {actions[-1]}" for stage, actions in enumerate(left) if actions]
    if stuck:
        raise ConfigError(f"the schedule cannot go on, {', '.join(stuck)}: put actions after those that they need")
    return sorted(timed, key=lambda entry: (entry.start, entry.end, entry.stage))


def draw(schedule: Schedule) -> str:
    """The schedule as text, a line per stage and a column per unit of time; forward and backward take one each."""
    timed = simulate(schedule)
    width = 1 + max((len(str(entry.action)) for entry in timed), default=0)
    columns = int(max((entry.end for entry in timed), default=0))
    lines = [["."] * columns for _ in schedule]
    for entry in timed:
        lines[entry.stage][int(entry.start)] = str(entry.action)
    return "\n".join(
        f"stage {stage} " + "".join(cell.rjust(width) for cell in cells) for stage, cells in enumerate(lines)
    )


def bubble(stages: int, batches: int) -> float:
    """Share of the time that a stage is idle, in either schedule: (S - 1) / (M + S - 1)."""
    return (stages - 1) / (batches + stages - 1)


def idle_share(timed: Sequence[TimedAction]) -> float:
    """Share of the stages' time, from the first start to the last end, in which they do nothing."""
    stages = len({entry.stage for entry in timed})
    begin, end = min(entry.start for entry in timed), max(entry.end for entry in timed)
    busy = sum(entry.end - entry.start for entry in timed)
    return 1 - busy / (stages * (end - begin))

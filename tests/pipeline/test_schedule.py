"""Schedules: every micro-batch goes forward and back once, in an order that stages can keep."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardrec.errors import ConfigError
from shardrec.pipeline import schedule as module
from shardrec.pipeline.schedule import (
    SCHEDULES,
    Action,
    Schedule,
    gpipe,
    in_order,
    one_f_one_b,
    only,
)

SIZES = {"stages": st.integers(1, 9), "batches": st.integers(1, 12), "name": st.sampled_from(sorted(SCHEDULES))}


@given(**SIZES)
def test_each_micro_batch_goes_forward_and_back_once(stages: int, batches: int, name: str) -> None:
    for actions in SCHEDULES[name](stages, batches):  # type: ignore[index]
        assert sorted(map(str, actions)) == sorted(f"{kind}{batch}" for kind in "FB" for batch in range(batches))
        for batch in range(batches):
            assert actions.index(Action("F", batch)) < actions.index(Action("B", batch))


@given(**SIZES)
def test_all_of_it_can_be_done_and_the_bubble_is_the_formula_s(stages: int, batches: int, name: str) -> None:
    units = in_order(SCHEDULES[name](stages, batches))  # type: ignore[index]
    assert sum(map(len, units)) == 2 * stages * batches
    idle_share = 1 - sum(map(len, units)) / (stages * len(units))
    assert idle_share == pytest.approx((stages - 1) / (batches + stages - 1))
    assert len(units) == 2 * (batches + stages - 1)


@given(st.integers(1, 9), st.integers(1, 12))
def test_one_f_one_b_keeps_few_micro_batches(stages: int, batches: int) -> None:
    for stage, actions in enumerate(one_f_one_b(stages, batches)):
        kept = most = 0
        for action in actions:
            kept += 1 if action.kind == "F" else -1
            most = max(most, kept)
        assert most == min(stages - stage, batches)
    assert [action.batch for action in gpipe(stages, batches)[0]] == [*range(batches), *reversed(range(batches))]


def draw(schedule: Schedule) -> str:
    """A line per stage and a column per unit of time."""
    units = [dict(unit) for unit in in_order(schedule)]
    return "\n".join(
        f"stage {stage} " + "".join(str(unit.get(stage, ".")).rjust(3) for unit in units)
        for stage in range(len(schedule))
    )


def test_drawings_are_those_of_the_docs() -> None:
    drawn = re.sub(r"^ {4}(gpipe|1f1b) {2,}", "", str(module.__doc__), flags=re.M)
    lines = [line.strip() for line in drawn.splitlines() if line.strip().startswith("stage ")]
    assert lines == [*draw(gpipe(3, 4)).splitlines(), *draw(one_f_one_b(3, 4)).splitlines()]


def test_forwards_alone_can_be_placed() -> None:
    assert len(in_order(only("F", gpipe(3, 4)))) == 6


def test_a_schedule_that_cannot_go_on() -> None:
    with pytest.raises(ConfigError, match="cannot continue, stage 0 at B0: put actions after"):
        in_order([[Action("B", 0), Action("F", 0)]])

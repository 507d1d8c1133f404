"""The clock of a search: what is done at once counts once."""

from __future__ import annotations

import threading
from time import thread_time

import pytest

from shardrec.planner.solve.clock import Clock


def spin(seconds: float) -> int:
    until = thread_time() + seconds
    while thread_time() < until:
        pass
    return threading.get_ident()


def test_what_is_done_at_once_counts_as_the_longest_of_it() -> None:
    clock = Clock()
    idents = clock.together([lambda: spin(0.02), lambda: spin(0.1), lambda: spin(0.05)])
    passed = clock.passed()
    assert 0.1 <= passed < 0.15
    assert idents[0] == threading.get_ident()
    assert len(set(idents)) == 3
    spin(0.02)
    assert clock.passed() >= passed + 0.02


def test_one_task_needs_no_other_thread() -> None:
    assert Clock().together([threading.get_ident]) == [threading.get_ident()]


def test_an_error_is_raised_when_all_have_ended() -> None:
    ended = threading.Event()

    def fail() -> None:
        raise ValueError("no")

    def last() -> None:
        spin(0.02)
        ended.set()

    with pytest.raises(ValueError, match="no"):
        Clock().together([fail, last])
    assert ended.is_set()

"""Ranks that raise, die or hang: what is reported, how soon, and what is left."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

import pytest
import torch
import torch.distributed as dist

from tests.ranks import POOL, RankDied, RankErrors, RankHung, UnpicklableError, raises_on_all
from tests.ranks import ranks as run_ranks


class FaultError(ValueError):
    """An exception class that only this module has."""


class AwkwardError(Exception):
    """Cannot be unpickled: `args` does not fit `__init__`."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first} and {second}")


def _pid() -> int:
    return os.getpid()


def test_exception_on_one_rank_has_type_message_and_traceback() -> None:
    def fail() -> str:
        if dist.get_rank() == 1:
            print("about to fail")
            raise FaultError("row 7 is broken")
        return "fine"

    with pytest.raises(RankErrors, match=r"1 of 2 ranks failed:\nrank 1: FaultError: row 7 is broken") as caught:
        run_ranks(2, fail)
    failed = caught.value
    assert list(failed.errors) == [1]
    assert type(failed.errors[1]) is FaultError
    assert str(failed.errors[1]) == "row 7 is broken"
    assert 'raise FaultError("row 7 is broken")' in failed.tracebacks[1]
    assert "worker.py" not in failed.tracebacks[1]
    assert failed.results == {0: "fine"}
    assert failed.outputs[1] == "about to fail\n"
    assert "about to fail" in str(failed)


def test_peers_that_wait_for_a_failed_rank_fail_soon() -> None:
    def fail() -> None:
        if dist.get_rank() == 1:
            raise FaultError("gone")
        dist.barrier()

    with pytest.raises(RankErrors) as caught:
        run_ranks(2, fail, grace=60.0)
    assert isinstance(caught.value.errors[0], RuntimeError)
    assert not isinstance(caught.value.errors[0], RankHung)
    assert isinstance(caught.value.errors[1], FaultError)


def test_a_pending_collective_does_not_delay_the_report() -> None:
    def fail() -> None:
        if dist.get_rank() == 1:
            dist.all_reduce(torch.ones(1), async_op=True)
            raise FaultError("in the middle of an all-reduce")
        dist.barrier()

    with pytest.raises(RankErrors) as caught:
        run_ranks(2, fail, grace=60.0)
    assert sorted(caught.value.errors) == [0, 1]
    assert not any(isinstance(error, RankHung) for error in caught.value.errors.values())
    assert run_ranks(2, dist.get_rank) == [0, 1]


def test_ranks_that_fail_just_after_a_collective_all_say_why() -> None:
    def fail() -> None:
        fault = torch.tensor([float(dist.get_rank())])
        dist.all_reduce(fault)
        raise FaultError(f"fault code {fault.item():.0f}")

    for _ in range(3):
        assert raises_on_all(4, FaultError, "fault code 6", fail) == ["fault code 6"] * 4


def test_a_rank_that_failed_lingers_for_its_peers() -> None:
    def fail() -> None:
        if dist.get_rank() == 0:
            threading.Timer(0.05, dist.send, (torch.ones(1), 1)).start()
        else:
            dist.recv(torch.ones(1), 0)
        raise FaultError("same")

    assert raises_on_all(2, FaultError, "same", fail) == ["same", "same"]


def test_raises_on_all_refuses_other_outcomes() -> None:
    def fail(on: tuple[int, ...], message: str) -> int:
        if dist.get_rank() in on:
            raise FaultError(message)
        return dist.get_rank()

    assert raises_on_all(2, ValueError, "^x$", fail, (0, 1), "x") == ["x", "x"]
    with pytest.raises(AssertionError, match=r"they returned \[0, 1\]"):
        raises_on_all(2, FaultError, "x", fail, (), "x")
    with pytest.raises(AssertionError, match=r"not so on \[0\]"):
        raises_on_all(2, FaultError, "x", fail, (1,), "x")
    with pytest.raises(AssertionError, match=r"not so on \[0, 1\]"):
        raises_on_all(2, FaultError, "y", fail, (0, 1), "x")
    with pytest.raises(AssertionError, match=r"not so on \[0, 1\]"):
        raises_on_all(2, KeyError, "x", fail, (0, 1), "x")


def test_assertions_in_ranks_tell_the_values() -> None:
    def claim() -> None:
        rank = dist.get_rank()
        assert rank == 5

    assert raises_on_all(2, AssertionError, r"assert \d == 5", claim) == ["assert 0 == 5", "assert 1 == 5"]


def test_sys_exit_is_an_exception_of_its_rank() -> None:
    raises_on_all(2, SystemExit, "4", sys.exit, 4)


def test_exceptions_that_cannot_be_pickled_arrive_as_text() -> None:
    def awkward() -> None:
        raise AwkwardError(1, 2)

    def locked() -> None:
        raise ValueError("has a lock", threading.Lock())

    assert all("AwkwardError: 1 and 2" in text for text in raises_on_all(2, UnpicklableError, "1 and 2", awkward))
    raises_on_all(2, UnpicklableError, "ValueError: .*has a lock", locked)


def test_results_that_cannot_be_pickled_are_errors() -> None:
    raises_on_all(2, TypeError, "pickle", threading.Lock)


# -------------------------------------------------------------------------------------------------- death and hanging


def _die(rank: int, code: int) -> int:
    if dist.get_rank() == rank:
        os._exit(code)
    return dist.get_rank()


def test_death_is_reported_and_the_rank_replaced() -> None:
    before = run_ranks(2, _pid)
    with pytest.raises(RankErrors, match=r"exit code 3") as caught:
        run_ranks(2, _die, 1, 3)
    error = caught.value.errors[1]
    assert isinstance(error, RankDied)
    assert error.code == 3
    assert caught.value.results == {0: 0}
    after = run_ranks(2, _pid)
    assert after[0] == before[0]
    assert after[1] != before[1]


def test_expected_death_leaves_the_outcomes_of_the_others() -> None:
    def exchange_with_the_dead() -> str:
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if dist.get_rank() == 2:
            dist.barrier()
        return "alive"

    alive, dead, broken = run_ranks(3, exchange_with_the_dead, expect_death={1})
    assert alive == "alive"
    assert isinstance(dead, RankDied)
    assert dead.code == -signal.SIGKILL
    assert isinstance(broken, RuntimeError)


def test_expected_death_that_does_not_come_is_an_error() -> None:
    with pytest.raises(RankErrors, match=r"rank 0: AssertionError: was expected to die, but returned 0") as caught:
        run_ranks(2, _die, 1, 0, expect_death={0, 1})
    assert isinstance(caught.value.errors[1], RankDied)
    with pytest.raises(RankErrors, match="rank 1: RankDied"):
        run_ranks(2, _die, 1, 0, expect_death={0})


def test_crash_is_reported_with_its_stack() -> None:
    def crash() -> None:
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGSEGV)

    with pytest.raises(RankErrors, match="signal 11") as caught:
        run_ranks(2, crash)
    assert "in crash" in caught.value.tracebacks[1]


def test_a_rank_that_dies_between_calls_is_replaced() -> None:
    victim = run_ranks(2, _pid)[1]
    os.kill(victim, signal.SIGKILL)
    while POOL._workers[1].is_idle():
        time.sleep(0.005)
    assert run_ranks(2, _pid)[1] != victim


def _oversleep() -> str:
    if dist.get_rank() == 1:
        time.sleep(60)
    return "awake"


def test_hanging_is_reported_with_stacks_and_the_rank_replaced() -> None:
    before = run_ranks(2, _pid)
    with pytest.raises(RankErrors) as caught:
        run_ranks(2, _oversleep, timeout=0.5)
    error = caught.value.errors[1]
    assert isinstance(error, RankHung)
    assert "in _oversleep" in error.stack
    assert caught.value.results == {0: "awake"}
    after = run_ranks(2, _pid)
    assert after[0] == before[0]
    assert after[1] != before[1]


def test_hanging_in_a_collective_shows_every_stack() -> None:
    def mismatched() -> None:
        dist.barrier() if dist.get_rank() == 0 else dist.recv(torch.ones(1), 0)

    with pytest.raises(RankErrors) as caught:
        run_ranks(2, mismatched, timeout=0.5)
    stacks = [error.stack for error in caught.value.errors.values() if isinstance(error, RankHung)]
    assert "in barrier" in stacks[0]
    assert "in recv" in stacks[1]


def test_grace_ends_the_wait_after_a_failure() -> None:
    def fail() -> None:
        if dist.get_rank() == 0:
            raise FaultError("first")
        time.sleep(1000)

    with pytest.raises(RankErrors) as caught:
        run_ranks(2, fail, grace=0.2, timeout=1000.0)
    assert isinstance(caught.value.errors[0], FaultError)
    assert isinstance(caught.value.errors[1], RankHung)

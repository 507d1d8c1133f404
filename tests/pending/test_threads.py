"""Exactly once, from several threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from shardrec.pending import LazyAwaitable
from tests.pending.counted import Counted, failing

THREADS = 8


def from_all_threads(task: Callable[[], object]) -> list[object]:
    """Runs ``task`` in every thread at once; an exception is returned as a result."""
    barrier = threading.Barrier(THREADS)

    def run() -> object:
        barrier.wait()
        try:
            return task()
        except Exception as error:
            return error

    with ThreadPoolExecutor(THREADS) as pool:
        return [each.result(timeout=30) for each in [pool.submit(run) for _ in range(THREADS)]]


def test_each_of_many_waits_once() -> None:
    awaitables = [Counted(object()) for _ in range(200)]
    results = from_all_threads(lambda: [each.wait() for each in awaitables])
    assert all(result == results[0] for result in results)
    assert [each.waits for each in awaitables] == [1] * len(awaitables)


def test_others_are_held_until_it_is_there() -> None:
    value = object()

    def slow() -> object:
        time.sleep(0.05)
        return value

    awaitable = Counted(value, slow)
    assert from_all_threads(awaitable.wait) == [value] * THREADS
    assert awaitable.waits == 1


def test_all_get_the_same_error() -> None:
    error = ValueError("broken pipe")
    awaitable = failing(error)
    results = from_all_threads(awaitable.wait)
    assert all(result is error for result in results)
    assert awaitable.waits == 1


def test_none_is_a_value_for_all() -> None:
    awaitable = Counted(None)
    assert from_all_threads(awaitable.wait) == [None] * THREADS
    assert awaitable.waits == 1


def test_no_callback_is_lost_or_called_twice() -> None:
    awaitable = Counted(0)

    def add_then_wait() -> int:
        for _ in range(50):
            awaitable.add_callback(lambda value: value + 1)
        return awaitable.wait()

    from_all_threads(add_then_wait)
    assert awaitable.wait() == 50 * THREADS


def test_chains_from_both_ends() -> None:
    for _ in range(20):
        first = Counted(0)
        last: LazyAwaitable[int] = first
        for _ in range(10):
            last = last.then(lambda value: value + 1)
        assert from_all_threads(lambda tip=last, root=first: (tip.wait(), root.wait())) == [(10, 0)] * THREADS  # type: ignore[misc]
        assert first.waits == 1


def test_done_does_not_block_while_another_thread_waits() -> None:
    entered, leave = threading.Event(), threading.Event()

    def slow() -> int:
        entered.set()
        assert leave.wait(30)
        return 1

    awaitable = Counted(0, slow)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(awaitable.wait)
        assert entered.wait(30)
        assert not awaitable.done()
        assert repr(awaitable) == "<Counted pending>"
        leave.set()
        assert waiting.result(30) == 1
    assert awaitable.done()


@pytest.mark.parametrize("name", ["wait", "value"])
def test_another_thread_is_not_taken_for_the_one_that_waits(name: str) -> None:
    """Only the thread inside ``_wait_impl()`` must not ask; one that comes meanwhile gets the value."""
    entered = threading.Event()

    class Box:
        value = 7

        def wait(self) -> int:
            return self.value

    def slow() -> Box:
        entered.set()
        time.sleep(0.02)
        return Box()

    awaitable = Counted(Box(), slow)
    with ThreadPoolExecutor(2) as pool:
        pool.submit(awaitable.wait)
        assert entered.wait(30)
        other = pool.submit(getattr, awaitable, name)
        assert other.result(30) is not None
    assert awaitable.value == 7
    assert awaitable.waits == 1

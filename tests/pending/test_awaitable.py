"""What every awaitable does: waits once, keeps what came of it, tells its state."""

from __future__ import annotations

import copy
import pickle
import traceback
from typing import Any

import pytest
import torch

from shardrec import ShardrecError
from shardrec.pending import Awaitable, AwaitableError, LazyNoWait, NoWait
from tests.pending.counted import Counted, CountedPlain, failing


@pytest.mark.parametrize("make", [Counted, CountedPlain])
@pytest.mark.parametrize("value", [None, False, 0, [], "text", 3.5])
def test_waits_once_for_any_value(make: Any, value: object) -> None:
    awaitable = make(value)
    assert [awaitable.wait() for _ in range(3)] == [value] * 3
    assert awaitable.waits == 1


def test_value_is_the_same_object() -> None:
    value = object()
    awaitable = CountedPlain(value)
    assert awaitable.wait() is value
    assert awaitable.wait() is value


def test_error_is_kept() -> None:
    error = ValueError("broken pipe")
    awaitable = failing(error)
    for _ in range(3):
        with pytest.raises(ValueError, match="broken pipe") as caught:
            awaitable.wait()
        assert caught.value is error
    assert awaitable.waits == 1


def test_traceback_does_not_grow() -> None:
    awaitable = failing(ValueError("broken pipe"))
    lengths = set()
    for _ in range(5):
        try:
            awaitable.wait()
        except ValueError as error:
            frames = traceback.extract_tb(error.__traceback__)
            lengths.add(len(frames))
            # Where it happened is still told.
            assert frames[-1].name == "fail"
    assert len(lengths) == 1


def test_interrupt_does_not_come_back() -> None:
    awaitable = failing(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        awaitable.wait()
    with pytest.raises(AwaitableError, match="Counted was cut off by KeyboardInterrupt"):
        awaitable.wait()
    assert awaitable.waits == 1


def test_asking_for_its_own_value_is_an_error() -> None:
    class Circle(Awaitable[int]):
        def _wait_impl(self) -> int:
            return self.wait()

    circle = Circle()
    for _ in range(2):
        with pytest.raises(AwaitableError, match=r"Circle was asked for its own value"):
            circle.wait()


def test_callback_that_asks_for_the_value_is_an_error() -> None:
    awaitable = CountedPlain(1)
    awaitable.add_callback(lambda value: value + awaitable.wait())
    with pytest.raises(AwaitableError, match="CountedPlain was asked for its own value"):
        awaitable.wait()


def test_errors_are_shardrecs_and_runtime_errors() -> None:
    assert issubclass(AwaitableError, ShardrecError)
    assert issubclass(AwaitableError, RuntimeError)


def test_callbacks_chain_in_order_and_run_once() -> None:
    calls: list[str] = []

    def named(name: str) -> Any:
        return lambda value: (calls.append(name), f"{value}{name}")[1]

    awaitable = CountedPlain("0")
    assert awaitable.add_callback(named("a")).add_callback(named("b")) is awaitable
    awaitable.callbacks.append(named("c"))
    awaitable.callbacks.extend([named("d")])
    awaitable.callbacks.insert(0, named("e"))
    assert awaitable.wait() == "0eabcd"
    assert awaitable.wait() == "0eabcd"
    assert calls == ["e", "a", "b", "c", "d"]
    assert awaitable.callbacks == []


def test_callback_added_by_a_callback_runs_last() -> None:
    awaitable = CountedPlain("0")

    def first(value: str) -> str:
        awaitable.add_callback(lambda later: f"{later}c")
        return f"{value}a"

    awaitable.add_callback(first).add_callback(lambda value: f"{value}b")
    assert awaitable.wait() == "0abc"


def test_callback_added_when_done_is_applied_at_once() -> None:
    awaitable = CountedPlain(1)
    assert awaitable.wait() == 1
    assert awaitable.add_callback(lambda value: value + 1).wait() == 2
    assert awaitable.waits == 1


def test_callback_that_raises_when_done_leaves_the_value() -> None:
    awaitable = CountedPlain(1)
    awaitable.wait()
    with pytest.raises(ZeroDivisionError):
        awaitable.add_callback(lambda value: value // 0)
    assert awaitable.wait() == 1


def test_callback_that_raises_in_the_wait_is_its_error() -> None:
    awaitable = CountedPlain(1).add_callback(lambda value: value // 0)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            awaitable.wait()
    assert awaitable.waits == 1


def test_callback_added_after_a_failure_is_not_called() -> None:
    awaitable = failing(ValueError("broken pipe"))
    with pytest.raises(ValueError, match="broken pipe"):
        awaitable.wait()
    awaitable.add_callback(pytest.fail)
    with pytest.raises(ValueError, match="broken pipe"):
        awaitable.wait()


def test_callback_list_is_closed_after_the_wait() -> None:
    awaitable = CountedPlain(1)
    callbacks = awaitable.callbacks
    awaitable.wait()
    for late in (lambda: callbacks.append(abs), lambda: callbacks.extend([abs]), lambda: callbacks.insert(0, abs)):
        with pytest.raises(AwaitableError, match=r"add_callback\(\)"):
            late()


def test_done_does_not_wait() -> None:
    awaitable = CountedPlain(None)
    assert not awaitable.done()
    assert awaitable.waits == 0
    awaitable.wait()
    assert awaitable.done()
    failed = failing(ValueError())
    assert not failed.done()
    with pytest.raises(ValueError):
        failed.wait()
    assert failed.done()


def test_done_asks_the_subclass() -> None:
    class Work(CountedPlain[int]):
        ready = False

        def _is_ready(self) -> bool:
            return self.ready

    work = Work(1)
    assert not work.done()
    work.ready = True
    assert work.done()
    assert work.waits == 0


def test_repr_tells_the_state_without_waiting() -> None:
    awaitable, failed = Counted([1, 2]), failing(ValueError("broken\n pipe"))
    assert repr(awaitable) == "<Counted pending>"
    assert awaitable.waits == 0
    awaitable.wait()
    assert repr(awaitable) == "<Counted done: [1, 2]>"
    with pytest.raises(ValueError):
        failed.wait()
    assert repr(failed) == r"<Counted failed: ValueError('broken\n pipe')>"
    long = Counted(torch.zeros(100, 2))
    long.wait()
    assert len(repr(long)) < 100
    assert "\n" not in repr(long)


@pytest.mark.parametrize(("made", "kept"), [(Counted, LazyNoWait), (CountedPlain, NoWait)])
def test_pickle_and_copy_when_done(made: Any, kept: type) -> None:
    awaitable = made({"a": [1]})
    value = awaitable.wait()
    pickled, shallow, deep = pickle.loads(pickle.dumps(awaitable)), copy.copy(awaitable), copy.deepcopy(awaitable)
    for each in (pickled, shallow, deep):
        assert type(each) is kept
        assert each.done()
        assert each.wait() == value
        assert each.wait() is not value
    assert shallow.wait()["a"] is value["a"]
    assert deep.wait()["a"] is not value["a"]


@pytest.mark.parametrize("act", [pickle.dumps, copy.copy, copy.deepcopy])
def test_pickle_and_copy_refuse_while_pending(act: Any) -> None:
    awaitable = Counted(1)
    with pytest.raises(AwaitableError, match=r"Counted is still pending and cannot be (pickled|copied): call wait\(\)"):
        act(awaitable)
    assert awaitable.waits == 0


def test_pickle_of_a_failed_one_raises_its_error() -> None:
    awaitable = failing(ValueError("broken pipe"))
    with pytest.raises(ValueError):
        awaitable.wait()
    with pytest.raises(ValueError, match="broken pipe"):
        pickle.dumps(awaitable)


@pytest.mark.parametrize("make", [NoWait, LazyNoWait])
def test_no_wait_is_done_from_the_start(make: Any) -> None:
    awaitable = make([1])
    assert awaitable.done()
    assert pickle.loads(pickle.dumps(awaitable)).wait() == [1]
    assert make([1]).add_callback(len).wait() == 1


def test_attributes_may_come_before_super_init() -> None:
    class Early(Awaitable[int]):
        def __init__(self) -> None:
            self._obj = 1
            super().__init__()

        def _wait_impl(self) -> int:
            return self._obj

    assert Early().wait() == 1


def test_wait_impl_is_required() -> None:
    with pytest.raises(TypeError, match="_wait_impl"):
        Awaitable()  # type: ignore[abstract]


def test_profile_names_the_wait() -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        CountedPlain(1).wait()
    assert "## CountedPlain wait() ##" in {event.key for event in profile.key_averages()}

"""Futures and several pending values as lazily awaited ones."""

from __future__ import annotations

import pytest
import torch
from torch.futures import Future

import shardrec
from shardrec.pending import Awaitable, NoWait, as_lazy
from tests.pending.counted import Counted


def test_a_future_is_awaited_at_its_first_use() -> None:
    future: Future[torch.Tensor] = Future()
    lazy = as_lazy(future)
    doubled = lazy.then(lambda value: 2 * value)
    assert not lazy.done()
    assert not doubled.done()
    future.set_result(torch.ones(2))
    assert lazy.done()
    assert torch.equal(torch.add(lazy, 1), torch.full((2,), 2.0))
    assert torch.equal(shardrec.wait(doubled), torch.full((2,), 2.0))


def test_a_futures_error_comes_at_its_first_use() -> None:
    future: Future[int] = Future()
    lazy = as_lazy(future)
    future.set_exception(ValueError("no rows"))
    for _ in range(2):
        with pytest.raises(ValueError, match="no rows"):
            lazy.wait()


def test_then_of_an_awaitable_that_is_not_lazy() -> None:
    one: Awaitable[int] = NoWait(3)
    assert one.then(lambda value: value + 1) == 4


def test_gather_waits_for_none_before_its_first_use_and_for_each_once() -> None:
    pending = Counted(1)
    future: Future[int] = Future()
    gathered = shardrec.pending.gather(
        pending, future, shardrec.pending.fork(torch.neg, torch.ones(1)), shardrec.pending.as_await(4), 5
    )
    assert not gathered.done()
    assert pending.waits == 0
    future.set_result(2)
    first, second, third, fourth, fifth = gathered
    assert (first, second, float(third), fourth, fifth) == (1, 2, -1.0, 4, 5)
    assert gathered.wait() is gathered.wait()
    assert pending.waits == 1
    assert shardrec.pending.gather().wait() == []


def test_gather_raises_the_first_error() -> None:
    futures: list[Future[int]] = [Future(), Future()]
    for number, future in enumerate(futures):
        future.set_exception(ValueError(f"error {number}"))
    with pytest.raises(ValueError, match="error 0"):
        shardrec.pending.gather(*futures).wait()

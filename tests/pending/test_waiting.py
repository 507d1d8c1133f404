"""``wait``, for every kind of pending value."""

from __future__ import annotations

import pytest
import torch
from torch.futures import Future

import shardrec
from shardrec.pending import LazyNoWait, NoWait, wait
from tests.pending.counted import Counted, CountedPlain


def test_awaitables() -> None:
    for pending in (Counted(1), CountedPlain(1)):
        assert wait(pending) == 1
        assert wait(pending) == 1
        assert pending.waits == 1


@pytest.mark.parametrize("value", [None, 1, "text", [LazyNoWait(1)], torch.ones(2)])
def test_plain_values_come_back_as_they_are(value: object) -> None:
    assert wait(value) is value


def test_not_searched_further() -> None:
    inner = NoWait(1)
    assert wait(NoWait(inner)) is inner


def test_torch_future() -> None:
    future: Future[int] = Future()
    future.set_result(5)
    assert wait(future) == 5


def test_torch_future_error() -> None:
    future: Future[int] = Future()
    future.set_exception(ValueError("broken pipe"))  # type: ignore[no-untyped-call]
    with pytest.raises(ValueError, match="broken pipe"):
        wait(future)


def test_await_of_torchscript() -> None:
    pending = torch.jit._awaitable(torch.add, torch.ones(2), 1)
    assert torch.equal(wait(pending), torch.full((2,), 2.0))


def test_is_the_public_name() -> None:
    assert shardrec.wait is wait

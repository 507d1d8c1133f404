"""The background thread: order, errors in their place, and an end that leaves nothing behind."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardrec.trainer.run.prefetch import Prefetcher


@given(items=st.lists(st.integers(), max_size=50), depth=st.integers(1, 5))
def test_gives_the_same_items_in_order(items: list[int], depth: int) -> None:
    with Prefetcher(iter(items), depth) as prefetcher:
        assert list(prefetcher) == items
        assert list(prefetcher) == []


def test_an_error_comes_after_the_items_before_it_and_again() -> None:
    def source() -> Iterator[int]:
        yield 1
        yield 2
        raise ValueError("row 3 is broken")

    seen = []
    with Prefetcher(source()) as prefetcher:
        with pytest.raises(ValueError, match="row 3 is broken"):
            seen.extend(next(prefetcher) for _ in range(3))
        with pytest.raises(ValueError, match="row 3 is broken"):
            next(prefetcher)
    assert seen == [1, 2]


def test_works_ahead_but_not_further_than_its_depth() -> None:
    made: list[int] = []

    def source() -> Iterator[int]:
        for number in range(100):
            made.append(number)
            yield number

    with Prefetcher(source(), depth=3) as prefetcher:
        assert next(prefetcher) == 0
        give_up = time.monotonic() + 100
        while len(made) < 5 and time.monotonic() < give_up:
            time.sleep(0.001)
        time.sleep(0.02)
        # One given, three in the queue, one in the thread's hand.
        assert len(made) == 5


def test_leaving_early_ends_the_thread() -> None:
    def endless() -> Iterator[int]:
        while True:
            yield 0

    with Prefetcher(endless(), depth=1) as prefetcher:
        next(prefetcher)
    assert all(thread.name != "prefetch" for thread in threading.enumerate())

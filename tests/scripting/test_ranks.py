"""A scripted model over two ranks: trains as the eager one, saves, loads, and issues everything before it waits."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from tests.ranks import ranks
from tests.scripting.on_ranks import ISSUE, WAIT


def call(name: str) -> Any:
    return getattr(import_module("tests.scripting.on_ranks"), name)()


def test_trains_as_eager() -> None:
    ranks(2, call, "eager_and_scripted")


def test_three_all_to_alls_are_issued_before_the_first_wait() -> None:
    for graph, loaded in ranks(2, call, "order_in_graphs"):
        assert graph == [ISSUE] * 3 + [WAIT] * 3
        assert loaded == graph

"""A backward that raises is told, with its error, and one that does not is not."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from shardrec.errors import AnomalyError
from shardrec.exchange.backward_watch import BackwardWatch


class _Raise(torch.autograd.Function):
    """Raises in backward."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, error: Exception) -> Tensor:
        ctx.error = error
        return values.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise ctx.error


def watched(error: Exception | None = None) -> tuple[Tensor, list[str]]:
    """A watched output whose backward raises an error, if any is given; and what is told."""
    told: list[str] = []
    values = torch.ones(3, requires_grad=True)
    output = (values if error is None else _Raise.apply(values, error)) * 2
    BackwardWatch(told.append).watch({"scores": [output], "steps": 3})
    return output, told


def test_a_backward_that_raises_is_told_once_with_its_error() -> None:
    output, told = watched(ValueError("row 7"))
    with pytest.raises(ValueError, match="row 7"):
        output.sum().backward()
    assert told == ["raised in backward: ValueError: row 7"]
    assert sys.gettrace() is None


def test_an_error_of_torch_is_told_and_a_backward_that_ends_well_is_not() -> None:
    told: list[str] = []
    values = torch.ones(3, requires_grad=True)
    output = values.exp() * 2
    BackwardWatch(told.append).watch(output)
    output.sum().backward()
    assert told == []
    with pytest.raises(RuntimeError, match="second time"):
        output.sum().backward()
    assert len(told) == 1
    assert told[0].startswith("raised in backward: RuntimeError: Trying to backward through the graph a second time")


def test_a_backward_that_raises_what_all_ranks_raise_is_not_told() -> None:
    output, told = watched(AnomalyError("rank 0: a gradient is NaN"))
    with pytest.raises(AnomalyError):
        output.sum().backward()
    assert told == []


def test_under_a_debugger_it_is_told_without_the_error() -> None:
    output, told = watched(ValueError("row 7"))

    def debugger(*_: object) -> None:
        return None

    before = sys.gettrace()
    sys.settrace(debugger)
    try:
        with pytest.raises(ValueError, match="row 7"):
            output.sum().backward()
        assert sys.gettrace() is debugger
    finally:
        sys.settrace(before)
    assert told == ["raised in backward"]


def test_each_backward_through_a_graph_is_watched() -> None:
    output, told = watched(ValueError("row 7"))
    for number in (1, 2):
        with pytest.raises(ValueError, match="row 7"):
            output.sum().backward(retain_graph=True)
        assert len(told) == number


def test_what_raises_before_the_output_is_reached_is_not_seen() -> None:
    output, told = watched()
    with pytest.raises(ValueError, match="loss"):
        _Raise.apply(output, ValueError("the loss")).sum().backward()
    assert told == []

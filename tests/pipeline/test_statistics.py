"""Running statistics are those of the mini-batch, once."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from shardrec.pipeline import Pipeline
from tests.pipeline.networks import Fails


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("checkpoint", ["always", "except_last", "never"])
@pytest.mark.parametrize("chunks", [1, 4, 40])
def test_running_statistics_equal_the_unpipelined_model_s(momentum: float | None, checkpoint: Any, chunks: int) -> None:
    model = nn.Sequential(nn.BatchNorm2d(3, momentum=momentum), nn.Flatten(), nn.Linear(12, 1))
    pipeline = Pipeline(copy.deepcopy(model), [1, 2], chunks=chunks, checkpoint=checkpoint)
    for step in range(3):
        x = torch.randn(10, 3, 2, 2) * (step + 1) + step
        model(x)
        pipeline.step(x, loss_fn=lambda output, _: output.sum())
    for name, value in model[0].state_dict().items():
        torch.testing.assert_close(pipeline[0].state_dict()[name], value)
    x = torch.randn(10, 3, 2, 2)
    torch.testing.assert_close(pipeline.eval()(x), model.eval()(x))


def test_of_float64_they_are_as_exact_as_the_unpipelined_model_s() -> None:
    model = nn.Sequential(nn.BatchNorm1d(2)).double()
    pipeline = Pipeline(copy.deepcopy(model), [1], chunks=2)
    x = torch.randn(8, 2, dtype=torch.float64) + 1e8
    model(x), pipeline(x)
    torch.testing.assert_close(pipeline[0].running_var, model[0].running_var)


def test_one_micro_batch_normalizes_as_the_unpipelined_model_does() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
    pipeline = Pipeline(copy.deepcopy(model), [1, 2], checkpoint="always")
    x = torch.randn(10, 3)
    torch.testing.assert_close(pipeline(x), model(x))
    with torch.no_grad():
        torch.testing.assert_close(pipeline(x), model(x))
    torch.testing.assert_close(dict(pipeline.state_dict()), dict(model.state_dict()))


def test_evaluation_and_failure_leave_them_alone() -> None:
    norm, fails = nn.BatchNorm1d(2), Fails()
    pipeline = Pipeline(nn.Sequential(norm, fails), [2], chunks=2)
    before = copy.deepcopy(norm.state_dict())
    fails.error = ValueError("on purpose")
    with pytest.raises(ValueError, match="on purpose"):
        pipeline(torch.randn(4, 2))
    torch.testing.assert_close(norm.state_dict(), before)
    fails.error = None
    pipeline.eval()(torch.randn(4, 2))
    torch.testing.assert_close(norm.state_dict(), before)
    assert norm.track_running_stats
    assert not norm._forward_pre_hooks

"""Which layers go to which stage."""

from __future__ import annotations

import time
from itertools import combinations, pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from shardrec.errors import ConfigError
from shardrec.pipeline import balance, balance_by_size, balance_by_time
from shardrec.pipeline.balance import check_balance, partition
from tests.pipeline.skip.layers import Pop, Stash


@given(st.lists(st.integers(0, 9), min_size=1, max_size=8), st.data())
def test_no_other_cut_is_better(costs: list[int], data: Any) -> None:
    stages = data.draw(st.integers(1, len(costs)))

    def largest(counts: list[int]) -> int:
        ends = [sum(counts[:end]) for end in range(len(counts) + 1)]
        return max(sum(costs[begin:end]) for begin, end in pairwise(ends))

    found = partition([float(cost) for cost in costs], stages)
    assert len(found) == stages
    assert sum(found) == len(costs)
    assert min(found) >= 1
    cuts = [(0, *cut, len(costs)) for cut in combinations(range(1, len(costs)), stages - 1)]
    best = min(largest([end - begin for begin, end in pairwise(cut)]) for cut in cuts)
    assert largest(found) == best


def test_by_size() -> None:
    model = nn.Sequential(nn.Linear(10, 100), nn.Linear(10, 50), nn.Linear(100, 100), nn.Linear(100, 1))
    assert balance_by_size(2, model) == [2, 2]
    assert balance_by_size(3, model.to("meta")) == [2, 1, 1]
    with pytest.raises(ConfigError, match="4 layers cannot be cut into 5 stages: take 1 to 4"):
        balance_by_size(5, model)


def test_by_time_leaves_the_model_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])

    class Slow(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            clock[0] += 3.0 if self.training else 0.0
            return super().forward(input)

    model = nn.Sequential(Stash(), Slow(4, 4), nn.BatchNorm1d(4), nn.Dropout(), Pop(), nn.Linear(4, 1))
    model.eval()
    model[3].train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    sample = torch.randn(5, 4)
    random = torch.get_rng_state()
    model[5].weight.grad = gradient = torch.ones(1, 4)
    assert balance.layer_seconds(model, sample, repeats=2) == [0, 3, 0, 0, 0, 0]
    assert balance_by_time(2, model, sample) in ([1, 5], [2, 4])
    torch.testing.assert_close(dict(model.state_dict()), before)
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert gradients.keys() == {"5.weight"} and gradients["5.weight"] is gradient and bool((gradient == 1).all())
    assert torch.equal(random, torch.get_rng_state())
    assert [layer.training for layer in model] == [False, False, False, True, False, False]
    assert not model.training


def test_by_time_takes_layers_that_change_their_input_in_place() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 1))
    assert sum(balance_by_time(2, model, torch.ones(2, 4))) == 3


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        ([2, 0, 1], r"balance is \[2, 0, 1\]: every stage needs at least one layer"),
        ([4, -1], r"every stage needs at least one layer"),
        ([], r"every stage needs at least one layer"),
        ([2, 2], r"balance is \[2, 2\], which is 4 layers, and the sequential has 3"),
    ],
)
def test_balances_that_do_not_fit(counts: list[int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_balance(nn.Sequential(nn.ReLU(), nn.ReLU(), nn.ReLU()), counts)


def test_only_sequentials() -> None:
    with pytest.raises(TypeError, match=r"cut out of an nn\.Sequential, and not of a Linear"):
        check_balance(nn.Linear(1, 1), [1])  # type: ignore[arg-type]


def test_stages_share_no_parameters_and_no_buffers() -> None:
    first, last = nn.Linear(3, 3), nn.Linear(3, 3)
    last.weight = first.weight
    model = nn.Sequential(first, nn.ReLU(), last)
    check_balance(model, [3])
    with pytest.raises(ConfigError, match=r"0.weight \(stage 0\) is 2.weight \(stage 1\)\. Put the"):
        check_balance(model, [2, 1])
    norm = nn.BatchNorm1d(3, affine=False)
    with pytest.raises(ConfigError, match=r"0.running_mean \(stage 0\) is 1.running_mean \(stage 1\)"):
        check_balance(nn.Sequential(norm, norm), [1, 1])

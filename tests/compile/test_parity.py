"""A compiled model learns what the eager one does: outputs, gradients, and weights after ten steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torchrec

from tests.compile.compiled import MODELS, assert_trains_alike
from tests.ranks import ranks

FAST = {("least", "traced"), ("towers", "boundary")}
"""On two ranks; the others take their time to compile."""

ONE = {("sequences", "boundary"), ("sequences", "traced")}
"""On one rank."""

REGIONS = {("dlrm", "traced"): 1, ("least", "traced"): 1, ("towers", "boundary"): 3}
"""What lies between breaks; DistributedDataParallel adds none."""

PAIRS = [(name, mode) for name in sorted(MODELS) for mode in ("boundary", "traced")]


def slow_unless(fast: bool, *values: str) -> Any:
    return pytest.param(*values, marks=[] if fast else pytest.mark.slow)


@pytest.mark.some(1, of="parity")
@pytest.mark.parametrize(("name", "mode"), [slow_unless((name, mode) in ONE, name, mode) for name, mode in PAIRS])
def test_one_rank(name: str, mode: str) -> None:
    # Compiled for all sizes at once, which takes half the time; test_shapes.py has models compiled for one size first.
    assert_trains_alike(name, mode, fullgraph=mode == "traced", dynamic=True)


@pytest.mark.some(1, of="parity")
@pytest.mark.parametrize(("name", "mode"), [slow_unless(pair in FAST, *pair) for pair in PAIRS])
def test_two_ranks(name: str, mode: str) -> None:
    ranks(
        2,
        assert_trains_alike,
        name,
        mode,
        fullgraph=mode == "traced",
        dynamic=True,
        regions=REGIONS.get((name, mode)),
        exchanges={"shardrec::all_to_all": 3} if name in ("dlrm", "least") and mode == "traced" else None,
        timeout=200,
    )


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["boundary", "traced"])
def test_two_ranks_with_inductor(mode: str) -> None:
    ranks(2, assert_trains_alike, "dlrm", mode, steps=4, backend="inductor", timeout=300)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam, torchrec.optim.RowWiseAdagrad, None])
def test_other_optimizers_of_the_tables(optimizer: Any) -> None:
    ranks(2, assert_trains_alike, "towers", "traced", optimizer, steps=5, timeout=200)

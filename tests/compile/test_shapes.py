"""Batches of many sizes: few compilations, and right values for sizes that tracers treat apart."""

from __future__ import annotations

from random import Random

import pytest
import torch
import torch.distributed as dist

from tests.compile.compiled import assert_models_equal, batch, fresh, graphs, make
from tests.ranks import ranks


def fifty(name: str, mode: str, regions: int, dynamic: bool | None = None) -> None:
    rank = dist.get_rank() if dist.is_initialized() else 0
    with fresh():
        compiled = torch.compile(make(name, mode), backend="aot_eager", dynamic=dynamic)
        rng = Random(rank)
        found = []
        for step in range(50):
            compiled(*batch(rng, 5 if step == 0 else rng.randint(3, 40))).sum().backward()
            found.append(graphs())
    assert found[0] == regions
    assert found[-1] <= 2 * regions, f"{found[-1] - regions} recompilations in {regions} regions"
    assert found[-1] == found[4], "after a few batches there is nothing new"


@pytest.mark.parametrize(("mode", "regions"), [("boundary", 2), ("traced", 1)])
def test_fifty_batches_compile_each_region_twice_at_most(mode: str, regions: int) -> None:
    fifty("dlrm", mode, regions)


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "regions"), [("boundary", 3), ("traced", 1)])
def test_fifty_batches_on_two_ranks(mode: str, regions: int) -> None:
    ranks(2, fifty, "towers", mode, regions, timeout=200)


@pytest.mark.slow
def test_sizes_that_are_dynamic_from_the_start_compile_once() -> None:
    fifty("dlrm", "traced", 1, dynamic=True)


def small(name: str, mode: str) -> None:
    """Batches of 0 and 1 samples, of no id at all, and of one, among others; uneven over the ranks."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    with fresh():
        model, reference = make(name, mode), make(name, None)
        compiled = torch.compile(model, backend="aot_eager")
        for step, size in enumerate((4, 0, 1, 3, 1, 0, 5)):
            dense, features = batch(Random(step), (size + rank) % 6)
            if step == 3:
                features = type(features)(
                    keys=features.keys(),
                    values=features.values()[:0],
                    lengths=torch.zeros_like(features.lengths()),
                )
            outputs = [one(dense, features) for one in (compiled, reference)]
            torch.testing.assert_close(*outputs, msg=lambda text, step=step: f"step {step}: {text}")
            for output in outputs:
                output.square().sum().backward()
        assert_models_equal(model, reference)


@pytest.mark.parametrize("mode", ["boundary", pytest.param("traced", marks=pytest.mark.slow)])
def test_empty_and_single_sample_batches(mode: str) -> None:
    small("dlrm", mode)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dlrm", "sequences"])
def test_empty_and_single_sample_batches_on_two_ranks(name: str) -> None:
    ranks(2, small, name, "traced", timeout=200)

"""Batches of many sizes: few compilations, and right values for sizes that tracers treat apart."""

from __future__ import annotations

from random import Random

import pytest
import torch
import torch.distributed as dist

from tests.compile.compiled import assert_models_equal, batch, fresh, graphs, make
from tests.ranks import ranks


def many_sizes(name: str, mode: str, regions: int, *, small: bool = True, dynamic: bool | None = None) -> None:
    """Fifty batches compile each region twice at most; small ones (0 and 1 samples, no id at all) are right, too."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    with fresh():
        model, reference = make(name, mode), make(name, None)
        compiled = torch.compile(model, backend="aot_eager", dynamic=dynamic)

        def step(size: int, what: str, *, ids: bool = True) -> None:
            dense, features = batch(rng, size)
            if not ids:
                lengths = torch.zeros_like(features.lengths())
                features = type(features)(keys=features.keys(), values=features.values()[:0], lengths=lengths)
            outputs = [one(dense, features) for one in (compiled, reference)]
            torch.testing.assert_close(*outputs, msg=lambda text: f"{what}: {text}")
            for output in outputs:
                output.square().mean().backward() if size else output.sum().backward()

        rng, found = Random(rank), []
        for number in range(50):
            step(5 if number == 0 else rng.randint(3, 40), f"step {number}")
            found.append(graphs())
        assert found[0] == regions
        assert found[-1] <= (1 if dynamic else 2) * regions, (
            f"{found[-1] - regions} recompilations in {regions} regions"
        )
        assert found[-1] == found[4], "after a few batches there is nothing new"
        # Uneven over the ranks.
        for size in (4, 0, 1, 3, 1, 0, 5) if small else ():
            step((size + rank) % 6, f"{(size + rank) % 6} samples", ids=size != 3)
        assert_models_equal(model, reference)


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("mode", "regions", "small"),
    # Each size that torch takes for special is traced anew.
    [("boundary", 2, True), ("traced", 1, False), pytest.param("traced", 1, True, marks=pytest.mark.slow)],
)
def test_batches_of_all_sizes(mode: str, regions: int, small: bool) -> None:
    many_sizes("least", mode, regions, small=small)


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "regions"), [("boundary", 3), ("traced", 1)])
def test_batches_of_all_sizes_on_two_ranks(mode: str, regions: int) -> None:
    ranks(2, many_sizes, "towers", mode, regions, timeout=200)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dlrm", "sequences"])
def test_other_models_on_two_ranks(name: str) -> None:
    ranks(2, many_sizes, name, "traced", 1, timeout=200)


@pytest.mark.slow
def test_sizes_that_are_dynamic_from_the_start_compile_once() -> None:
    many_sizes("dlrm", "traced", 1, dynamic=True)

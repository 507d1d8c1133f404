"""Mini-batches cut and put together."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardrec.errors import ConfigError
from shardrec.pipeline.microbatch import batch_size, gather, scatter, sizes_of
from tests.batches import Bags, random_bags
from tests.plans import randoms


@given(st.integers(0, 30), st.integers(1, 40))
def test_sizes_add_up_and_are_even(total: int, chunks: int) -> None:
    sizes = sizes_of(total, chunks)
    assert sum(sizes) == total
    assert len(sizes) == max(1, min(total, chunks))
    assert max(sizes) - min(sizes) <= 1
    assert min(sizes) > 0 or total == 0


@given(st.integers(0, 12), st.integers(1, 15))
def test_scatter_and_gather_are_inverse(total: int, chunks: int) -> None:
    value = (torch.randn(total, 3), {"a": torch.arange(total), "none": None}, [torch.randn(total)])
    parts = scatter(value, sizes_of(total, chunks))
    torch.testing.assert_close(gather(parts), value)


@given(randoms(), st.integers(0, 6), st.integers(1, 8), st.booleans())
def test_jagged_tensors_are_cut_by_samples(rng: Random, samples: int, chunks: int, weighted: bool) -> None:
    whole = random_bags(rng, {"a": 5, "b": 9, "c": 2}, samples, weighted=weighted)
    sizes = sizes_of(samples, chunks)
    assert batch_size((whole.kjt(), torch.ones(samples))) == samples
    begin = 0
    for part, size in zip(scatter(whole.kjt(), sizes), sizes, strict=True):
        ids = {key: bags[begin : begin + size] for key, bags in whole.ids.items()}
        weights = None
        if whole.weights is not None:
            weights = {key: bags[begin : begin + size] for key, bags in whole.weights.items()}
        wanted = Bags(keys=whole.keys, size=size, ids=ids, weights=weights).kjt()
        assert part.keys() == wanted.keys()
        assert part.stride() == size
        assert torch.equal(part.values(), wanted.values())
        assert torch.equal(part.lengths(), wanted.lengths())
        assert not weighted or torch.equal(part.weights(), wanted.weights())
        begin += size


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        ((torch.ones(2), torch.ones(3)), ConfigError, r"\[0\] has 2, \[1\] has 3"),
        ((), ConfigError, r"it holds no tensor"),
        (torch.tensor(1.0), ConfigError, r"without dimensions. Its first has to be the batch"),
        ({"a": 3}, TypeError, r"the input\['a'\] is a int: a pipeline takes \(B, ...\) tensors"),
    ],
)
def test_what_has_no_batch(value: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        batch_size(value)


def test_outputs_that_cannot_be_gathered() -> None:
    with pytest.raises(ConfigError, match=r"cannot be gathered from 2 micro-batches.*Pipeline.step with loss_fn"):
        gather([torch.tensor(1.0), torch.tensor(2.0)])
    with pytest.raises(ConfigError, match="nested differently for some micro-batches"):
        gather([torch.ones(1), (torch.ones(1),)])

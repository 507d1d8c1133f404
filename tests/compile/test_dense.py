"""The dense part in FSDP2, or left alone, learns what it does in DistributedDataParallel, compiled or not."""

from __future__ import annotations

from random import Random

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from shardrec.errors import ConfigError
from shardrec.modules import ShardedModel
from tests.compile.compiled import assert_models_equal, assert_trains_alike, batch, make, whole
from tests.ranks import ranks


def train(model: ShardedModel, steps: int = 4) -> None:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    for step in range(steps):
        dense, features = batch(Random(10 * step + dist.get_rank()), 3 + step)
        optimizer.zero_grad()
        model(dense, features).square().sum().backward()
        optimizer.step()


def fsdp_equals_ddp(name: str) -> None:
    models = [make(name, None, dense=dense) for dense in ("fsdp", "ddp")]
    tables = {id(p) for one in models[0]._sharded for t in one.tables().values() for p in t.parameters()}
    dense = [one for one in models[0].parameters() if id(one) not in tables]
    assert dense and all(isinstance(one, DTensor) for one in dense)
    for model in models:
        train(model)
    assert_models_equal(*models)


def test_fsdp_learns_what_ddp_does() -> None:
    ranks(2, fsdp_equals_ddp, "towers")


def accumulated() -> None:
    models = [make("dlrm", None, None, dense=dense, replicated=False) for dense in ("fsdp", "ddp")]
    gradients = []
    for model in models:
        with model.no_sync():
            model(*batch(Random(dist.get_rank()), 4)).sum().backward()
        model(*batch(Random(5 + dist.get_rank()), 3)).sum().backward()
        gradients.append([whole(one.grad) for one in model.parameters() if one.grad is not None])
    assert len(gradients[0]) == len(gradients[1])
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)


def test_no_sync_accumulates_in_fsdp_too() -> None:
    ranks(2, accumulated)


def left_alone() -> None:
    model, averaged = (make("towers", None, None, dense=dense, replicated=False) for dense in ("none", "ddp"))
    for one in (model, averaged):
        one(*batch(Random(dist.get_rank()), 4)).sum().backward()
    weight, its_mean = (one.after.weight.grad for one in (model, averaged))  # type: ignore[union-attr]
    assert not torch.allclose(weight, its_mean)
    dist.all_reduce(weight)
    torch.testing.assert_close(weight / 2, its_mean)


def test_none_leaves_the_gradients_to_the_user() -> None:
    ranks(2, left_alone)


def test_another_word_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"dense is 'zero'\. Give one of 'ddp', 'fsdp', 'none'"):
        make("dlrm", None, dense="zero")


@pytest.mark.parametrize("mode", ["boundary", pytest.param("traced", marks=pytest.mark.slow)])
@pytest.mark.slow
def test_compiled_fsdp_learns_what_eager_ddp_does(mode: str) -> None:
    ranks(2, assert_trains_alike, "towers", mode, steps=4, dense="fsdp", timeout=120)

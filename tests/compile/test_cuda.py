"""The same checks on CUDA with NCCL: one rank always, two where there are two devices."""

from __future__ import annotations

from random import Random

import pytest
import torch

from shardrec.errors import InputError
from tests.compile.changed import too_large
from tests.compile.compiled import assert_trains_alike, batch, breaks, fresh, graphs, make
from tests.cuda_ranks import DEVICES, WORLDS, cuda_ranks

pytestmark = pytest.mark.skipif(DEVICES == 0, reason="needs a CUDA device, and this machine has none")


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("mode", ["boundary", "traced"])
@pytest.mark.parametrize("name", ["dlrm", "dcn", "towers", "sequences"])
def test_trains_as_the_eager_model_does(name: str, mode: str, world_size: int) -> None:
    cuda_ranks(world_size, train, name, mode)


def train(name: str, mode: str) -> None:
    assert_trains_alike(name, mode, backend="inductor", fullgraph=mode == "traced", device="cuda")


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize(("mode", "regions"), [("boundary", 3), ("traced", 1)])
def test_breaks_and_compilations(mode: str, regions: int, world_size: int) -> None:
    cuda_ranks(world_size, count, mode, regions)


def count(mode: str, regions: int) -> None:
    with fresh():
        compiled = torch.compile(make("towers", mode, device="cuda"), backend="aot_eager")
        for step in range(50):
            dense, features = batch(Random(step), 5 if step == 0 else 3 + step % 30)
            compiled(dense.cuda(), features.to(torch.device("cuda"))).sum().backward()
            if step == 0:
                assert graphs() == regions
        assert graphs() <= 2 * regions
        assert mode == "boundary" or breaks() == 0


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("mode", ["boundary", "traced"])
def test_bad_input_fails_on_every_rank(mode: str, world_size: int) -> None:
    cuda_ranks(world_size, fail, mode)


def fail(mode: str) -> None:
    with fresh():
        compiled = torch.compile(make("dlrm", mode, device="cuda"), backend="aot_eager")
        dense, features = batch(Random(0), 4)
        for given in (features, too_large(features), features):
            moved = given.to(torch.device("cuda"))
            if given is features:
                compiled(dense.cuda(), moved).sum().backward()
            else:
                with pytest.raises(InputError, match="id 1000000 in sample"):
                    compiled(dense.cuda(), moved)


@pytest.mark.parametrize("world_size", WORLDS)
def test_fsdp(world_size: int) -> None:
    cuda_ranks(world_size, train_fsdp)


def train_fsdp() -> None:
    assert_trains_alike("towers", "boundary", steps=4, backend="aot_eager", device="cuda", dense="fsdp")

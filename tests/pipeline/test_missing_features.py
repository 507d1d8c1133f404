"""Batches without some of the features, for which a model looks nothing up."""

from __future__ import annotations

import warnings
from random import Random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardrec.errors import InputError
from shardrec.layout import Topology
from shardrec.modules import ShardedModel, shard
from tests.models import click_model, table_sizes
from tests.modules.clicks import CONFIGS, batch
from tests.pipeline.loops import pipeline_of, plain, world
from tests.plans import random_plan
from tests.ranks import ranks


class Sometimes(nn.Module):
    """A model that looks up what a batch has, unless it is told to look up nothing or to fail."""

    def __init__(self) -> None:
        super().__init__()
        self.clicks = click_model(CONFIGS)
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, batch: dict[str, Any]) -> Tensor:
        if batch.get("how") == "fails":
            raise RuntimeError("breaks")
        parts = [] if batch.get("how") == "skips" else [batch.get("a"), batch.get("b")]
        means = [self.clicks(part.dense, part.sparse).square().mean() for part in parts if part is not None]
        return torch.stack([self.bias.sum(), *means]).sum()


def sometimes() -> ShardedModel:
    torch.manual_seed(0)
    topology = Topology(ranks_per_host=dist.get_world_size())
    return shard(Sometimes(), random_plan(Random(1), table_sizes(CONFIGS, "clicks.sparse"), topology))


@pytest.mark.some(1)
@pytest.mark.parametrize("depth", [1, 2])
def test_a_batch_without_features_is_one_without_lookups(depth: int) -> None:
    def run() -> None:
        rank, _ = world()
        names: list[str] = ["ab", "ab", "a", "", "ab", "b", "a", "", "ab"]
        batches = [{name: batch(step, rank) for name in here} for step, here in enumerate(names)]
        batches[2]["b"] = None
        wanted = plain(sometimes(), batches, nn.Module.__call__)
        assert [float(loss) for loss in pipeline_of(sometimes(), batches, depth, None)] == wanted

    ranks(1, run)
    ranks(2, run)


@pytest.mark.parametrize("missing", ["a", "b", "ab"])
def test_features_that_one_rank_lacks_are_an_error_on_every_rank(missing: str) -> None:
    def run() -> None:
        rank, _ = world()
        batches: list[dict[str, Any]] = [{"a": batch(step, rank), "b": batch(step, rank)} for step in range(5)]
        wanted = plain(sometimes(), [*batches[:2], *batches[3:]], nn.Module.__call__)
        if not rank:
            batches[2] = {name: part for name, part in batches[2].items() if name not in missing}
        steps = pipeline_of(sometimes(), batches, 2, None)
        losses = [float(next(steps)) for _ in range(2)]
        with pytest.raises(InputError, match="the ranks disagree about their input"):
            next(steps)
        assert [*losses, *map(float, steps)] == wanted

    ranks(2, run, timeout=30.0)


def test_a_forward_that_fails_after_one_without_lookups_is_told() -> None:
    def run() -> None:
        rank, _ = world()
        batches: list[dict[str, Any]] = [{"a": batch(step, rank)} for step in range(6)]
        batches[2]["how"] = "skips"
        if rank:
            batches[3]["how"] = "fails"
        steps = pipeline_of(sometimes(), batches, 2, None)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for _ in range(3):
                next(steps)
            own = pytest.raises(RuntimeError, match=r"^breaks")
            with own if rank else pytest.raises(InputError, match="rank 1: the model's forward failed: RuntimeError: "):
                next(steps)
            assert len(list(steps)) == 2

    ranks(2, run, timeout=30.0)

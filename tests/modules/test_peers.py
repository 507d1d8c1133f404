"""A rank that is gone: the others get an error that says so, and do not wait for ever."""

from __future__ import annotations

import os
import re
import time
from datetime import timedelta
from random import Random

import pytest
import torch
import torch.distributed as dist

from shardrec.errors import PeerError
from shardrec.layout import ShardingPlan, Topology
from shardrec.modules import shard
from tests.batches import random_bags
from tests.models import click_model, collection, feature_rows, random_configs, table_sizes
from tests.plans import random_plan
from tests.ranks import RankDied, RankErrors, ranks

CONFIGS = random_configs(Random(11))
ROWS = feature_rows(CONFIGS)
PROMPT_S = 10.0
"""Far below the timeout of the group, which a rank that hung would need."""


def plan_of(world_size: int, path: str = "") -> ShardingPlan:
    return random_plan(Random(12), table_sizes(CONFIGS, path), Topology(ranks_per_host=world_size))


def assert_prompt_peer_error(start: float, error: PeerError) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    assert time.monotonic() - start < PROMPT_S
    assert f"rank {rank} of {world_size}: the " in str(error)
    assert re.search(
        r"rank \d has stopped|did not come within the process group's timeout of 1 s|an exchange has failed before|"
        "another rank stopped or did not come within the process group's timeout",
        str(error),
    )
    assert "start all the ranks again" in str(error)


TRANSPORTS = pytest.mark.parametrize("transport", ["auto", "group"])


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("whole_model", [False, True])
@TRANSPORTS
def test_death_between_steps(world_size: int, whole_model: bool, transport: str) -> None:
    def rank_main() -> str:
        os.environ["SHARDREC_TRANSPORT"] = transport
        features = random_bags(Random(0), ROWS, 2).kjt()
        inputs = (torch.randn(2, 3), features) if whole_model else (features,)
        if whole_model:
            model = shard(click_model(CONFIGS), plan_of(world_size, "sparse"))
        else:
            model = shard(collection(CONFIGS, optimizers="sgd"), plan_of(world_size))
        for step in range(4):
            if step == 2 and dist.get_rank() == 1:
                os._exit(3)
            start = time.monotonic()
            try:
                output = model(*inputs)
                (output if whole_model else output.values()).sum().backward()
            except PeerError as error:
                assert_prompt_peer_error(start, error)
                return f"PeerError in step {step}"
        return "no error"

    results = ranks(world_size, rank_main, expect_death={1}, timeout=30.0)
    assert isinstance(results.pop(1), RankDied)
    # A rank may have all it needs of the second step, or not: the dead rank's last messages count.
    assert all(result in ("PeerError in step 1", "PeerError in step 2") for result in results), results


@TRANSPORTS
def test_death_between_forward_and_backward(transport: str) -> None:
    def rank_main() -> str:
        os.environ["SHARDREC_TRANSPORT"] = transport
        model = shard(collection(CONFIGS, optimizers="sgd"), plan_of(2))
        output = model(random_bags(Random(0), ROWS, 2).kjt()).values()
        dist.barrier()
        if dist.get_rank() == 0:
            os._exit(0)
        start = time.monotonic()
        with pytest.raises(PeerError, match="the gradient exchange failed") as caught:
            output.sum().backward()
        assert_prompt_peer_error(start, caught.value)
        return "told"

    assert ranks(2, rank_main, expect_death={0}, timeout=30.0)[1] == "told"


def test_a_rank_that_fails_after_its_lookup() -> None:
    """It cannot tell the others any more: they hear of it when its process ends."""

    def rank_main() -> None:
        model = shard(collection(CONFIGS, optimizers="sgd"), plan_of(2))
        values = model(random_bags(Random(0), ROWS, 2).kjt()).values()
        if dist.get_rank() == 1:
            raise ValueError("a loss that this rank cannot compute")
        values.sum().backward()

    with pytest.raises(RankErrors) as caught:
        ranks(2, rank_main, timeout=30.0)
    assert {rank: type(error) for rank, error in caught.value.errors.items()} == {0: PeerError, 1: ValueError}
    assert "the gradient exchange failed" in str(caught.value.errors[0])


def test_death_before_sharding() -> None:
    def rank_main() -> str:
        if dist.get_rank() == 1:
            os._exit(0)
        with pytest.raises(PeerError, match="the header exchange failed"):
            shard(collection(CONFIGS), plan_of(2))
        return "told"

    assert ranks(2, rank_main, expect_death={1}, timeout=30.0)[0] == "told"


@TRANSPORTS
def test_a_rank_that_does_not_come_in_time(transport: str) -> None:
    def rank_main() -> str:
        os.environ["SHARDREC_TRANSPORT"] = transport
        group = dist.new_group()
        model = shard(collection(CONFIGS), plan_of(2), group=group)
        features = random_bags(Random(0), ROWS, 2).kjt()
        model(features).values()
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=1), group)
        dist.barrier()
        if dist.get_rank() == 1:
            time.sleep(2)
            return "late"
        start = time.monotonic()
        with pytest.raises(PeerError, match="the header exchange failed") as caught:
            model(features)
        assert_prompt_peer_error(start, caught.value)
        return "told"

    assert ranks(2, rank_main, timeout=30.0) == ["told", "late"]

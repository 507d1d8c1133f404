"""A rank that is gone: the others get an error that says so, and do not wait for ever."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from random import Random
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from shardrec.errors import PeerError
from shardrec.exchange import peers as peers_module
from shardrec.layout import ShardingPlan, Topology, cuts
from shardrec.modules import ShardedModel, shard
from shardrec.replicas import Replicas, ReplicatedModel
from tests.batches import random_bags
from tests.models import ClickModel, click_model, collection, feature_rows, random_configs, table_sizes
from tests.plans import random_plan
from tests.ranks import RankDied, RankErrors, ranks

CONFIGS = random_configs(Random(11))
ROWS = feature_rows(CONFIGS)
LIMIT_S = 90.0
"""Rank processes are ended then, before the group's own time limit: what is reported was not found out by that."""


def plan_of(world_size: int, path: str = "") -> ShardingPlan:
    return random_plan(Random(12), table_sizes(CONFIGS, path), Topology(ranks_per_host=world_size))


def assert_peer_error(error: PeerError, lost: int = 1) -> None:
    """It names this rank, the one that is gone and what it waited for, with the flight record."""
    assert error.ranks == (lost,)
    me, what = f"rank {dist.get_rank()} of {dist.get_world_size()}", error.waited_for
    gone = rf"{me}: the {what} failed, because rank {lost}('s process \d+ (has ended|is stopped)| did not come)"
    late = rf"{me} waited [^(]*for rank {lost} \(.*\) to take part in the {what} \("
    assert re.match(rf"{gone}|{late}", str(error)), error
    assert "start all the ranks again" in str(error)
    assert re.search(rf"Last collectives:\n  rank {dist.get_rank()}: #\d+ .*under way for", str(error))


TRANSPORTS = pytest.mark.parametrize("transport", ["auto", "group"])


@pytest.mark.some(2)
@pytest.mark.parametrize(
    ("world_size", "whole_model", "transport"),
    [(2, False, "auto"), (2, True, "group"), (4, True, "auto"), (4, False, "group")],
)
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
            try:
                output = model(*inputs)
                (output if whole_model else output.values()).sum().backward()
            except PeerError as error:
                assert_peer_error(error)
                return f"PeerError in step {step}"
        return "no error"

    results = ranks(world_size, rank_main, expect_death={1}, timeout=LIMIT_S)
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
        with pytest.raises(PeerError, match="the gradient exchange failed") as caught:
            output.sum().backward()
        assert_peer_error(caught.value, lost=0)
        return "told"

    assert ranks(2, rank_main, expect_death={0}, timeout=LIMIT_S)[1] == "told"


def test_a_rank_that_fails_after_its_lookup() -> None:
    """It cannot tell the others any more: they hear of it when its process ends."""

    def rank_main() -> None:
        model = shard(collection(CONFIGS, optimizers="sgd"), plan_of(2))
        values = model(random_bags(Random(0), ROWS, 2).kjt()).values()
        if dist.get_rank() == 1:
            raise ValueError("a loss that this rank cannot compute")
        values.sum().backward()

    with pytest.raises(RankErrors) as caught:
        ranks(2, rank_main, timeout=LIMIT_S)
    assert {rank: type(error) for rank, error in caught.value.errors.items()} == {0: PeerError, 1: ValueError}
    assert "the gradient exchange failed" in str(caught.value.errors[0])


# --- A rank that dies or is stopped, anywhere


def quick(seconds: float = 3.0) -> None:
    """A shorter time limit, once all is set up: a stopped rank is noticed by nothing else."""
    for group in list(dist.distributed_c10d._world.pg_map):
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), group)


def lose(how: str) -> None:
    """This rank dies, or is stopped until a survivor ends it."""
    if how == "dies":
        os._exit(3)
    dist.distributed_c10d._get_default_store().set("stopped", str(os.getpid()))
    os.kill(os.getpid(), signal.SIGSTOP)


def survive(run: Callable[[], object], how: str) -> str:
    """Run into the gap that the lost rank left; returns what was waited for."""
    with pytest.raises(PeerError) as caught:
        run()
    assert_peer_error(caught.value, lost=dist.get_world_size() - 1)
    assert ("is stopped by a signal" in str(caught.value)) == (how == "is stopped")
    store = dist.distributed_c10d._get_default_store()
    if store.add("survivors", 1) == dist.get_world_size() - 1 and how == "is stopped":
        os.kill(int(store.get("stopped")), signal.SIGKILL)
    return caught.value.waited_for


class Detached(ClickModel):
    """Only its dense part has gradients, so that backward makes no exchange but the reducer's."""

    def forward(self, dense: Tensor, features: KeyedJaggedTensor) -> Tensor:
        pooled = self.sparse(features).values().detach()
        logits: Tensor = self.top(torch.cat([self._hidden(dense), pooled], dim=1))
        return logits


def lose_one(where: str, how: str, transport: str) -> str:
    """Rank W - 1 is lost at one place of a step; returns what the others waited for."""
    os.environ["SHARDREC_TRANSPORT"] = transport
    world_size = dist.get_world_size()
    lost = dist.get_rank() == world_size - 1
    inputs = (torch.randn(2, 3), random_bags(Random(0), ROWS, 2).kjt())

    def make() -> ShardedModel:
        model = click_model(CONFIGS)
        if where in ("reducer", "fsdp"):
            model.__class__ = Detached
            sizes = table_sizes(CONFIGS, "sparse").items()
            tables = tuple(cuts.table_wise(name, *size, rank=world_size - 1) for name, size in sizes)
            plan = ShardingPlan(topology=Topology(ranks_per_host=world_size), tables=tables)
            return shard(model, plan, dense="fsdp" if where == "fsdp" else "ddp")
        if where == "sync":
            return shard(model, plan_of(1, "sparse"), replicas=Replicas(world_size, sync_every=100))
        return shard(model, plan_of(world_size, "sparse"))

    if where == "start":
        peers_module.introduce()
        dist.barrier()
        quick()
        lose(how) if lost else None
        return survive(make, how)
    model = make()
    model(*inputs).sum().backward()
    output = model(*inputs).sum()
    dist.barrier()
    quick()
    if lost:
        # Its own part of a collective that others wait for is not to be made.
        lose(how)
    if where == "sync":
        assert isinstance(model, ReplicatedModel)
        return survive(model.sync_replicas, how)
    if where in ("backward", "reducer", "fsdp"):
        return survive(output.backward, how)
    return survive(lambda: model(*inputs), how)


WAITED = {
    "start": r"header exchange",
    "forward": r"header exchange",
    "backward": r"gradient (exchange|all-reduce)",
    "reducer": r"gradient all-reduce",
    "fsdp": r"gradient reduce-scatter",
    "sync": r"averaging of the replicas' tables",
}


@pytest.mark.some(6)
@pytest.mark.parametrize(
    ("world_size", "how"),
    [
        (2, "dies"),
        pytest.param(3, "dies", marks=pytest.mark.slow),
        pytest.param(2, "is stopped", marks=pytest.mark.slow),
        pytest.param(3, "is stopped", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("where", WAITED)
@TRANSPORTS
def test_a_lost_rank_is_named(world_size: int, where: str, how: str, transport: str) -> None:
    *told, last = ranks(world_size, lose_one, where, how, transport, expect_death={world_size - 1}, timeout=LIMIT_S)
    assert isinstance(last, RankDied)
    assert all(isinstance(one, str) and re.fullmatch(WAITED[where], one) for one in told), told


@pytest.mark.some(1)
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
        told = dist.distributed_c10d._get_default_store()
        if dist.get_rank() == 1:
            told.wait(["told"])
            return "late"
        late = pytest.raises(PeerError, match="the header exchange")
        with late as caught, mock.patch.object(peers_module, "_LOOK_S", 0.2):
            model(features)
        assert_peer_error(caught.value)
        told.set("told", "")
        assert re.search(r"waited for rank 1 \(its process \d+ runs\) to take part in the ", str(caught.value))
        return "told"

    assert ranks(2, rank_main, timeout=LIMIT_S) == ["told", "late"]


# --- A rank that raises, and lives


class Faulty(ClickModel):
    """Raises ``fault`` on the last rank, at one place."""

    where: str = ""
    everywhere: bool = False
    fault: Exception = ValueError("a loss that this rank cannot compute")

    def _raise(self, *_: object) -> None:
        raise self.fault

    def forward(self, dense: Tensor, features: KeyedJaggedTensor) -> Tensor:
        faulty = self.everywhere or dist.get_rank() == dist.get_world_size() - 1
        hidden, pooled = self._hidden(dense), self.sparse(features).values()
        if faulty and self.where == "forward":
            self._raise()
        if faulty and self.where == "after the gradient exchange":
            # The engine takes the nodes made last first: this one comes after those of the lookups.
            hidden.register_hook(self._raise)
        both = torch.cat([hidden, pooled], dim=1)
        if faulty and self.where == "before the gradient exchange":
            both.register_hook(self._raise)
        logits: Tensor = self.top(both)
        return logits


def raise_in(where: str) -> tuple[str, str]:
    """The last rank raises and goes on living; the type and text of each rank's error."""
    os.environ["SHARDREC_TRANSPORT"] = "auto"
    inputs = (torch.randn(2, 3), random_bags(Random(0), ROWS, 2).kjt())
    model = click_model(CONFIGS)
    model.__class__ = Faulty
    sharded = shard(model, plan_of(dist.get_world_size(), "sparse"))
    sharded(*inputs).sum().backward()
    model.where = where
    with pytest.raises((PeerError, ValueError)) as caught:
        sharded(*inputs).sum().backward()
    # No rank has ended meanwhile.
    store = dist.distributed_c10d._get_default_store()
    store.add(where, 1)
    while store.add(where, 0) < dist.get_world_size():
        time.sleep(0.01)
    return type(caught.value).__name__, str(caught.value)


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("where", ["forward", "before the gradient exchange", "after the gradient exchange"])
def test_a_rank_that_raises_and_lives_is_named_with_its_error(world_size: int, where: str) -> None:
    *told, (kind, _) = ranks(world_size, raise_in, where, timeout=60.0)
    assert kind == "ValueError"
    word = where if where == "forward" else "backward"
    for rank, (kind, text) in enumerate(told):
        assert kind == "PeerError"
        assert re.fullmatch(
            rf"rank {rank} of {world_size}: the gradient (exchange|all-reduce) failed, because rank {world_size - 1} "
            rf"raised in {word}: ValueError: a loss that this rank cannot compute\. Fix the cause and restart all "
            "ranks",
            text,
        ), text


def test_ranks_that_all_raise_in_backward_can_go_on() -> None:
    """What they told each other is of a step that is over."""

    def rank_main() -> str:
        os.environ["SHARDREC_TRANSPORT"] = "auto"
        inputs = (torch.randn(2, 3), random_bags(Random(0), ROWS, 2).kjt())
        model = click_model(CONFIGS)
        model.__class__ = Faulty
        sharded = shard(model, plan_of(2, "sparse"), dense="none")
        model.where = "before the gradient exchange"
        model.everywhere = True
        for _ in range(2):
            with pytest.raises(ValueError, match="cannot compute"):
                sharded(*inputs).sum().backward()
        model.where = ""
        sharded(*inputs).sum().backward()
        return "went on"

    assert ranks(2, rank_main, timeout=60.0) == ["went on"] * 2

"""Sharded modules in forks: refused on several ranks, where they cannot be in step."""

from __future__ import annotations

from threading import Event, Thread, Timer

import pytest
import torch
import torch.distributed as dist
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import shardrec
from shardrec.layout import ShardingPlan, Topology, cuts
from shardrec.modules import ShardedModel, shard
from shardrec.scripting import ScriptError
from tests.models import collection
from tests.modules.faults import CONFIGS
from tests.ranks import ranks
from tests.scripting.scorers import BesideAFork, TwoForks, WithAwaitable, WithFork


def plan(world_size: int, *paths: str) -> ShardingPlan:
    tables = [
        cuts.table_wise(f"{path}.{one.name}", one.num_embeddings, one.embedding_dim, rank=number % world_size)
        for path in paths
        for number, one in enumerate(CONFIGS)
    ]
    return ShardingPlan(topology=Topology(ranks_per_host=world_size), tables=tuple(tables))


def batch() -> KeyedJaggedTensor:
    keys = [feature for one in CONFIGS for feature in one.feature_names]
    return KeyedJaggedTensor(keys=keys, values=torch.ones(len(keys)).long(), lengths=torch.ones(len(keys)).long())


@pytest.mark.some(1)
@pytest.mark.parametrize(("transport", "portable"), [("auto", True), ("group", False)])
def test_exchanges_in_forks_are_refused(transport: str, portable: bool) -> None:
    def rank_main() -> None:
        model = shard(TwoForks(collection(CONFIGS), collection(CONFIGS)), plan(2, "one", "two"), transport=transport)
        with pytest.raises(ScriptError, match=r"called inside of a fork:\n(.|\n)*scorers.py(.|\n)*without"):
            shardrec.script(model, portable=portable)
        dist.barrier()
        assert torch.equal(model(batch()), model(batch())), "eager forks run where they are made"
        beside = shard(BesideAFork(collection(CONFIGS)), plan(2, "one"), transport=transport)
        assert torch.equal(shardrec.script(beside, portable=portable)(batch()), beside(batch()))

    ranks(2, rank_main)


def test_forks_of_a_single_rank() -> None:
    def rank_main() -> None:
        model = shard(TwoForks(collection(CONFIGS), collection(CONFIGS)), plan(1, "one", "two"))
        program = shardrec.script(model)
        assert torch.equal(program(batch()), model(batch()))
        assert isinstance(model, ShardedModel)
        in_call, release = Event(), Event()

        def fork() -> None:
            with model.context.step.lock:
                in_call.set()
                release.wait()

        other = Thread(target=fork)
        other.start()
        in_call.wait()
        Timer(0.2, release.set).start()
        assert torch.equal(program(batch()), model(batch())), "waits for a fork that is in a call"
        other.join()

    ranks(1, rank_main)


def test_frozen_programs_with_awaitables_and_forks() -> None:
    """torch.jit.freeze drops the attributes and methods that these would ask for when they run."""
    columns = sum(one.embedding_dim * len(one.feature_names) for one in CONFIGS)
    for made in (WithAwaitable(collection(CONFIGS), columns), WithFork(collection(CONFIGS))):
        model = shard(made.eval())
        expected = model(batch())
        scripted = shardrec.script(model)
        assert torch.allclose(scripted(batch()), expected)
        assert torch.allclose(torch.jit.freeze(scripted)(batch()), expected)


def test_an_eager_fork() -> None:
    model = shard(WithFork(collection(CONFIGS)))
    assert torch.equal(model(batch()), 2 * model.sparse(batch()).values())

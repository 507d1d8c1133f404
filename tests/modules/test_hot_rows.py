"""Hot rows: the same results as without them, under whatever else a collection can be asked for."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import shardrec
from benchmarks.harness.counting import CountingCollectives
from shardrec import load_checkpoint, save_checkpoint
from shardrec.errors import ConfigError, InputError, PlanError
from shardrec.exchange.collectives import collectives_of
from shardrec.exchange.queue import ModelContext
from shardrec.layout import ShardingPlan, Topology, cuts
from shardrec.modules import ShardedEmbeddingBagCollection, ShardedModel, shard
from tests.batches import random_bags
from tests.models import collection, feature_rows
from tests.modules.parity import check, random_case
from tests.parity.cases import bag_cases, sequence_cases, topology_of
from tests.parity.check import check_all
from tests.plans import with_hot_rows
from tests.ranks import raises_on_all, ranks


def parity(world_size: int, seeds: range) -> None:
    for seed in seeds:
        case = random_case(seed, world_size)
        fused = {one.name for one, kind in zip(case.configs, case.optimizers, strict=True) if kind != "none"}
        check(replace(case, plan=with_hot_rows(Random(seed), case.plan, fused)))


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_random_plans(world_size: int) -> None:
    ranks(world_size, parity, world_size, range(6))


@pytest.mark.slow
@pytest.mark.parametrize("first", range(100, 300, 20))
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_more_random_plans(world_size: int, first: int) -> None:
    ranks(world_size, parity, world_size, range(first, first + 20))


FAST = [(2, "learned", "each"), (2, "none", "one")]


@pytest.mark.parametrize(("world_size", "weights", "sizes"), FAST)
def test_bags(world_size: int, weights: str, sizes: str) -> None:
    """Every optimizer, pooling, cut and dtype; with weights that are learned, and batch sizes of each feature."""
    cases = [replace(case, hot=True) for case in bag_cases(world_size, weights) if case.sizes == sizes]
    ranks(world_size, check_all, cases, hosts=topology_of(world_size).hosts, timeout=200)


@pytest.mark.parametrize(("world_size", "dedup", "sizes"), [(2, True, "one"), (2, False, "each")])
def test_sequences(world_size: int, dedup: bool, sizes: str) -> None:
    cases = [replace(case, hot=True) for case in sequence_cases(world_size, dedup) if case.sizes == sizes]
    ranks(world_size, check_all, cases, hosts=topology_of(world_size).hosts, timeout=200)


CONFIGS = [
    EmbeddingBagConfig(name="t0", num_embeddings=23, embedding_dim=8, feature_names=["a", "b"]),
    EmbeddingBagConfig(name="t1", num_embeddings=11, embedding_dim=4, feature_names=["b"]),
]


def plan_of(hot_rows: Mapping[str, Sequence[int]]) -> ShardingPlan:
    """Row-wise and column-wise."""
    world_size = dist.get_world_size()
    layouts = (
        cuts.row_wise("t0", 23, 8, ranks=range(world_size)),
        cuts.table_wise("t1", 11, 4, rank=world_size - 1),
    )
    plan = ShardingPlan(topology=Topology(ranks_per_host=world_size), tables=layouts)
    return ShardingPlan.from_json(json.loads(json.dumps(plan.with_hot_rows(hot_rows).to_json())))


def model_of(hot_rows: Mapping[str, Sequence[int]], optimizer: str, seed: int = 0) -> ShardedModel:
    return shard(collection(CONFIGS, optimizers=optimizer, seed=seed), plan_of(hot_rows))


def train(model: ShardedModel, steps: range) -> list[Tensor]:
    outputs = []
    for step in steps:
        bags = random_bags(Random(10 * step + dist.get_rank()), feature_rows(CONFIGS), 6)
        values = model(bags.kjt()).values()
        (values * torch.arange(1.0, 1 + values.size(1))).sum().backward()
        outputs.append(values.detach())
    return outputs


def go_on_elsewhere(folder: Path, optimizer: str) -> None:
    without = model_of({}, optimizer)
    expected = train(without, range(4))
    first = model_of({"t0": [3, 4, 20], "t1": [0]}, optimizer)
    found = train(first, range(2))
    save_checkpoint(folder, first)
    for hot_rows in ({}, {"t0": range(23)}, {"t0": [20, 0], "t1": [10, 1]}):
        other = model_of(hot_rows, optimizer, seed=1)
        train(other, range(7, 8))
        load_checkpoint(folder, other)
        torch.testing.assert_close([*found, *train(other, range(2, 4))], expected, atol=1e-5, rtol=1e-5)
        assert other.state_dict().keys() == without.state_dict().keys()
        for name, table in other.module.tables().items():
            for place, parameter in table.locals.items():
                torch.testing.assert_close(parameter, without.module.tables()[name].locals[place], atol=1e-5, rtol=1e-5)
    # A copy of the model, and states that are loaded by name, go on in the same way.
    copied = copy.deepcopy(first)
    state, rates = copy.deepcopy(first.state_dict()), copy.deepcopy(first.fused_optimizer.state_dict())
    torch.testing.assert_close([*found, *train(copied, range(2, 4))], expected, atol=1e-5, rtol=1e-5)
    loaded = model_of({"t0": [3, 4, 20], "t1": [0]}, optimizer, seed=2)
    train(loaded, range(8, 9))
    loaded.load_state_dict(state)
    loaded.fused_optimizer.load_state_dict(rates)
    torch.testing.assert_close([*found, *train(loaded, range(2, 4))], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("optimizer", ["adagrad", "adam"])
def test_a_checkpoint_knows_of_no_hot_rows(tmp_path: Path, optimizer: str) -> None:
    """It is loaded under other hot rows, and under none, and training goes on as without any."""
    ranks(2, go_on_elsewhere, tmp_path, optimizer)


def bytes_sent(hot_rows: Mapping[str, Sequence[int]]) -> dict[str, int]:
    """Bytes of each exchange of a step in which every id is 3."""
    model = model_of(hot_rows, "sgd")
    counted = CountingCollectives(collectives_of())
    context = ModelContext(counted, torch.device("cpu"))
    sharded = ShardedEmbeddingBagCollection(collection(CONFIGS, optimizers="sgd"), plan_of(hot_rows), context=context)
    model = ShardedModel(sharded, plan_of(hot_rows), context, dist.group.WORLD)
    features = KeyedJaggedTensor(keys=["a", "b"], values=torch.full((40,), 3), lengths=torch.full((10,), 4))
    model(features).values().sum().backward()
    counted.take()
    model(features).values().sum().backward()
    sent = counted.take()
    assert sent.calls == {"header": 1, "payload": 1, "output": 1, "gradient": 1}
    return {name: sum(one) for name, one in sent.bytes.items()}


def test_ids_of_hot_rows_do_not_travel() -> None:
    """And there is no collective more."""
    without, some, every = (
        ranks(2, bytes_sent, {"t0": rows, "t1": also}) for rows, also in (([], []), ([3], []), ([3], [3]))
    )
    for before, between, after in zip(without, some, every, strict=True):
        for name in ("header", "output", "gradient"):
            assert before[name] == between[name] == after[name]
    # Row 3 of t0 is rank 0's, which t1 is not on; each of the 40 ids is in t0, and the 20 of b are in t1, too.
    assert [before["payload"] - one["payload"] for before, one in zip(without, some, strict=True)] == [0, 4 * 40]
    assert [before["payload"] - one["payload"] for before, one in zip(without, every, strict=True)] == [4 * 20, 4 * 40]


def differ() -> None:
    """Somebody has written into the tables of one rank alone."""
    model = model_of({"t0": [3]}, "sgd")
    train(model, range(1))
    if dist.get_rank():
        model.module.shards_were_written()
    train(model, range(1))


def test_all_ranks_write_into_tables_or_none() -> None:
    raises_on_all(2, InputError, "tables written to since the last forward", differ)


def test_refusals() -> None:
    """Each names the table and says what to do instead."""
    plan = ShardingPlan(
        topology=Topology(), tables=(cuts.table_wise("t0", 23, 8, rank=0), cuts.data_parallel("t1", 11, 4))
    )
    for hot_rows, words in (
        ({"t0": [23]}, "go from 23 to 23"),
        ({"t1": [1]}, "is replicated"),
        ({"t2": [1]}, "'t2'; the plan"),
    ):
        with pytest.raises(PlanError, match=words):
            plan.with_hot_rows(hot_rows)
    hot = plan.with_hot_rows({"t0": [5, 2, 5]})
    assert hot.by_name["t0"].hot_rows == (2, 5) and hot.fingerprint != plan.fingerprint
    assert [change.name for change in plan.diff(hot)] == ["t0"]
    with pytest.raises(ConfigError, match=r"'t0' has 2 hot rows and no optimizer in backward"):
        shard(collection(CONFIGS), hot)
    model = shard(collection(CONFIGS, optimizers="sgd"), hot)
    for made in (lambda: shardrec.script(model), lambda: shardrec.serve.quantize(model)):
        with pytest.raises(ConfigError, match="'t0' have hot rows"):
            made()


def refuse(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        shard(collection(CONFIGS, optimizers="sgd"), hot_plan(options), **options)


def hot_plan(options: dict[str, Any]) -> ShardingPlan:
    world_size = dist.get_world_size() // options.get("replicas", 1)
    layouts = (cuts.row_wise("t0", 23, 8, ranks=range(world_size)), cuts.data_parallel("t1", 11, 4))
    return ShardingPlan(topology=Topology(ranks_per_host=world_size), tables=layouts).with_hot_rows({"t0": [3]})


def test_what_keeps_copies_alike() -> None:
    """The reducer of the dense part."""
    ranks(2, refuse, {"replicas": 2}, "'t0' have hot rows, whose gradients all ranks average in each step")
    ranks(2, refuse, {"dense": "none"}, "'t0' have hot rows, .* and dense='none' leaves that out")

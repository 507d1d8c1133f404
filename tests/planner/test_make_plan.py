"""``plan``: from a model, and the process group it is in, to a sharding plan."""

from __future__ import annotations

from random import Random
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from shardrec.errors import ConfigError
from shardrec.layout import ShardingPlan, Topology
from shardrec.modules import shard
from shardrec.planner import Constraint, constraints_from_torchrec, plan, plan_tables, replan
from shardrec.planner.describe import sampled_features, table_loads
from tests.batches import random_bags
from tests.models import click_model, collection, feature_rows
from tests.ranks import ranks

CONFIGS = [
    EmbeddingBagConfig(name="movies", num_embeddings=10, embedding_dim=8, feature_names=["watched", "liked"]),
    EmbeddingBagConfig(name="tags", num_embeddings=6, embedding_dim=4, feature_names=["tag"]),
    EmbeddingBagConfig(name="users", num_embeddings=9, embedding_dim=12, feature_names=["liked"]),
]
NAMES = ["sparse.movies", "sparse.tags", "sparse.users"]


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_covers_the_tables_of_every_collection(device: str) -> None:
    model = nn.ModuleDict({"one": collection(CONFIGS, device=device), "two": collection(CONFIGS[:1], device=device)})
    found = plan(model, Topology(ranks_per_host=2))
    assert [(table.name, table.num_embeddings, table.embedding_dim) for table in found.tables] == [
        ("one.movies", 10, 8),
        ("one.tags", 6, 4),
        ("one.users", 9, 12),
        ("two.movies", 10, 8),
    ]


def test_a_constraint_by_a_tables_own_name() -> None:
    """Also one of TorchRec's, which knows tables by nothing else."""
    sequences = EmbeddingCollection(
        tables=[
            EmbeddingConfig(name=name, num_embeddings=10, embedding_dim=8, feature_names=[name])
            for name in ("t_item", "not_t_item")
        ]
    )
    model = nn.ModuleDict({"seq": sequences, "one": collection(CONFIGS), "two": collection(CONFIGS[:1])})
    theirs, _ = constraints_from_torchrec({"t_item": ParameterConstraints(sharding_types=["column_wise"])})
    for constraints in ({"t_item": Constraint(cuts=("column_wise",))}, theirs):
        found = plan(model, Topology(ranks_per_host=2), constraints=constraints)
        assert found.by_name["seq.t_item"].cut == "column_wise"
        assert found.by_name["seq.not_t_item"].cut == "table_wise"
    with pytest.raises(ConfigError, match=r"table 'movies' and there are 'one\.movies', 'two\.movies'"):
        plan(model, constraints={"movies": Constraint(cuts=("row_wise",))})


def test_without_a_process_group_it_is_for_one_rank() -> None:
    assert plan(click_model(CONFIGS)).topology == Topology()


def test_nothing_to_plan() -> None:
    with pytest.raises(ConfigError, match=r"Linear holds no torchrec .* to plan. Was it sharded already"):
        plan(nn.Linear(2, 2))
    with pytest.raises(ConfigError, match="Was it sharded already"):
        plan(shard(click_model(CONFIGS)))


def test_sample_batches_say_what_ids_do() -> None:
    """How many a sample has, how often they come again, which rows they hit; a given pooling goes first."""
    draws = torch.Generator().manual_seed(0)
    model = click_model([EmbeddingBagConfig(name="t", num_embeddings=9000, embedding_dim=8, feature_names=["f", "g"])])
    batches = []
    for _ in range(3):
        frequent = (9000 * torch.rand(600, generator=draws) ** 4).long()
        even = torch.randint(9000, (200,), generator=draws)
        lengths = torch.tensor([3] * 200 + [1] * 200, dtype=torch.int32)
        batches.append(KeyedJaggedTensor(keys=["f", "g"], values=torch.cat([frequent, even]), lengths=lengths))
    (load,) = table_loads(model, poolings={"g": 2.0}, sampled=sampled_features(batches)).values()
    assert load.poolings == (3.0, 2.0)
    assert load.growth is not None
    seen = torch.cat([batch["f"].values() for batch in batches])
    assert load.growth.distinct(1800) == pytest.approx(len(seen.unique()))
    assert load.growth.distinct(600) == pytest.approx(len(seen[:600].unique()))
    assert load.histogram is not None
    share = 0.75 * 0.5 + 0.25 / 16  # three quarters of the ids are f's; half of those are below 9000 / 2**4
    assert load.histogram.share(0, 9000 // 16) == pytest.approx(share, abs=0.03)
    assert plan(model, Topology(ranks_per_host=2), sample_batches=batches).world_size == 2


def test_shard_plans_for_itself() -> None:
    def rank_main() -> None:
        model = shard(click_model(CONFIGS))
        assert model.plan == plan(click_model(CONFIGS))
        assert model.plan.world_size == 2
        features = random_bags(Random(0), feature_rows(CONFIGS), 3).kjt()
        assert model(torch.randn(3, 3), features).shape == (3,)

    ranks(2, rank_main)


def test_sequences_are_priced_as_they_are_sharded() -> None:
    config = EmbeddingConfig(name="t", num_embeddings=9, embedding_dim=8, feature_names=["f"])

    def cost(given: ShardingPlan) -> float:
        assert given.report is not None
        return given.report.cost_ms

    def rank_main() -> None:
        model = EmbeddingCollection(tables=[config])
        topology = Topology.of_world(2)
        distinct, every = (plan(model, topology, dedup=dedup) for dedup in (True, False))
        assert cost(distinct) < cost(every)  # 4,096 ids of 9 rows
        assert cost(replan(every, model, max_moved_bytes=0, dedup=False)) == cost(every)
        for dedup, expected in ((True, distinct), (False, every)):
            assert cost(shard(EmbeddingCollection(tables=[config]), dedup=dedup).plan) == cost(expected)

    ranks(2, rank_main)


def test_hosts_are_those_of_torchrun() -> None:
    def rank_main() -> None:
        assert plan(click_model(CONFIGS)).topology == Topology(hosts=2, ranks_per_host=2)

    ranks(4, rank_main, hosts=2)


def test_constraints_name_tables_by_path() -> None:
    topology = Topology(ranks_per_host=2)
    limits = {"sparse.movies": Constraint(cuts=("column_wise",)), "sparse.*": Constraint(cuts=("row_wise",))}
    found = plan(click_model(CONFIGS), topology, constraints=limits)
    assert dict(zip(NAMES, (found.by_name[name].cut for name in NAMES), strict=True)) == {
        "sparse.movies": "column_wise",
        "sparse.tags": "row_wise",
        "sparse.users": "row_wise",
    }
    with pytest.raises(ConfigError, match=r"unknown table 'films'. The tables are 'sparse\.movies', 'sparse\.tags'"):
        plan(click_model(CONFIGS), topology, constraints={"films": Constraint()})


def test_figures_are_those_of_where_the_tables_are(monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):  # before a CUDA build of torch is told that there is a device
        there = nn.ParameterList([torch.empty(2, device="cuda")])
    h100 = SimpleNamespace(name="NVIDIA H100 80GB HBM3", total_memory=85 * 10**9)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: h100)
    model, topology = click_model(CONFIGS), Topology(ranks_per_host=2)

    def profile(made: ShardingPlan) -> str:
        assert made.report is not None
        return made.report.profile

    assert profile(plan(model, topology)) == "cpu"
    assert profile(replan(plan(model, topology), model, max_moved_bytes=0)) == "cpu"
    assert profile(plan(model, topology, device="cuda:1")) == h100.name
    assert profile(plan(model, topology.with_machine("l4"), device="cpu")) == "l4"
    assert profile(shard(model).plan) == "cpu"
    on_cuda = nn.ModuleDict({"tables": collection(CONFIGS, device="meta"), "there": there})
    assert profile(plan(on_cuda, topology)) == h100.name
    assert profile(plan_tables(table_loads(model), topology)) == h100.name
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"torch sees no CUDA device to detect. Give device='cpu', or a preset"):
        plan(on_cuda, topology)


@pytest.mark.parametrize("batch_size", [0, -3])
def test_batch_size(batch_size: int) -> None:
    with pytest.raises(ConfigError, match=f"batch_size must be at least 1, got {batch_size}"):
        plan(click_model(CONFIGS), batch_size=batch_size)

"""NaN and Inf are named at the step that makes them, on every rank, and no table is touched."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import shardrec
from shardrec.errors import AnomalyError, ConfigError
from shardrec.layout import ShardingPlan, TableLayout, Topology, cuts
from tests.executors import executed
from tests.models import apply_optimizer_in_backward
from tests.modules.both import sharded_both
from tests.ranks import ranks


def features() -> KeyedJaggedTensor:
    return KeyedJaggedTensor(keys=["a", "b", "c"], values=torch.tensor([0, 10, 4, 6]), lengths=torch.tensor([2, 1, 1]))


def made(traced: bool) -> tuple[Any, Any]:
    """A model, and what runs it."""
    model = sharded_both()
    return model, executed(model, "traced" if traced else "eager")


def bad_gradient(value: float, output: int, words: str, traced: bool = False) -> None:
    model, run = made(traced)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    rank = dist.get_rank() if dist.is_initialized() else 0
    with shardrec.detect_anomaly(model):
        outputs = run(features())
        loss = sum(one.sum() for one in outputs)
        if not rank:
            loss = loss + (outputs[output][0, -1] * value)
        with pytest.raises(
            AnomalyError, match=rf"^rank 0: the gradient of {words} has {value:g}; no table was updated"
        ):
            loss.backward()
        assert all(torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True))
        sum(one.sum() for one in run(features())).backward()
        assert not all(torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True))


CASES = [(float("nan"), 0, "feature 'b' of table 'bags.tc'"), (float("inf"), 3, "feature 'c' of table 'rows.te'")]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients_on_one_rank(case: tuple[float, int, str]) -> None:
    bad_gradient(*case)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients_on_two_ranks(case: tuple[float, int, str]) -> None:
    ranks(2, bad_gradient, *case)


def test_a_context_inside_of_another_leaves_it_as_it_was() -> None:
    model = sharded_both()
    with shardrec.detect_anomaly(model):
        with shardrec.detect_anomaly(model):
            model(features())
        with pytest.raises(AnomalyError, match="has nan; no table was updated"):
            (model(features())[0] * float("nan")).sum().backward()


def bad_row(table: str, traced: bool = False) -> None:
    model, run = made(traced)
    path, name = table.split(".")
    rank = dist.get_rank() if dist.is_initialized() else 0
    for shard, parameter in getattr(model.module, path).tables()[name].locals.items():
        if shard is None or shard.rank == rank:
            with torch.no_grad():
                parameter[-1, 0] = float("-inf")
    run(features())
    with (
        shardrec.detect_anomaly(model),
        pytest.raises(AnomalyError, match=rf"in table '{table}' has -?(inf|nan): its rows"),
    ):
        outputs = run(features())
        # Of a replicated table it shows in backward.
        sum(one.sum() for one in outputs).backward()


@pytest.mark.parametrize("table", ["bags.ta", "bags.tb", "rows.td"])
def test_rows_on_two_ranks(table: str) -> None:
    ranks(2, bad_row, table)


@pytest.mark.parametrize("pooled", [False, True])
def test_rows_of_a_replicated_table(pooled: bool) -> None:
    config = EmbeddingBagConfig if pooled else EmbeddingConfig
    tables: list[Any] = [
        config(name=name, num_embeddings=5, embedding_dim=4, feature_names=[key])
        for name, key in (("cut", "a"), ("r", "b"), ("s", "c"))
    ]
    layouts = (cuts.table_wise("cut", 5, 4, rank=0), cuts.data_parallel("r", 5, 4), cuts.data_parallel("s", 5, 4))
    plan = ShardingPlan(topology=Topology(ranks_per_host=1), tables=layouts)
    collection = EmbeddingBagCollection(tables=tables) if pooled else EmbeddingCollection(tables=tables)
    model = shardrec.shard(collection, plan)
    weights = model.state_dict()
    with torch.no_grad():
        weights[next(key for key in weights if ".s." in key)][1, 0] = float("inf")
    ids = torch.tensor([0, 4, 4, 1])
    with (
        shardrec.detect_anomaly(model),
        pytest.raises(AnomalyError, match=r"^rank 0: what was looked up in table 's' has inf: its rows"),
    ):
        outputs = model(KeyedJaggedTensor(keys=["a", "b", "c"], values=ids, lengths=torch.tensor([2, 1, 1])))
        (outputs.values().sum() if pooled else sum(outputs[key].values().sum() for key in "abc")).backward()


def one_table(*layouts: TableLayout, ranks_of_plan: int, **options: Any) -> Any:
    """One table "t" with an optimizer, by feature "f"."""
    config = EmbeddingBagConfig(name="t", num_embeddings=5, embedding_dim=4, feature_names=["f"])
    collection = EmbeddingBagCollection(tables=[config])
    apply_optimizer_in_backward(torch.optim.SGD, collection.parameters(), {"lr": 0.1})
    plan = ShardingPlan(topology=Topology(ranks_per_host=ranks_of_plan), tables=layouts)
    return shardrec.shard(collection, plan, **options)


def loss_of(model: Any, factor: float = 1.0) -> Any:
    features = KeyedJaggedTensor(keys=["f"], values=torch.tensor([0, 4]), lengths=torch.tensor([2]))
    return model(features).values().sum() * factor


def in_one_replica() -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    size, last = world // 2, rank == world - 1
    layout = cuts.table_wise("t", 5, 4, rank=size - 1)
    model = one_table(layout, ranks_of_plan=size, replicas=shardrec.Replicas(2))
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with shardrec.detect_anomaly(model):
        loss = loss_of(model, torch.nan if last else 1.0)
        with pytest.raises(AnomalyError, match=rf"^rank {world - 1}: the gradient of feature 'f' of table 't' has nan"):
            loss.backward()
        assert all(map(torch.equal, before, model.parameters()))
        loss_of(model).backward()
        model.sync_replicas()
        assert not before or not torch.equal(before[0], next(model.parameters()))
        with torch.no_grad():
            for parameter in model.parameters() if last else ():
                parameter[4] = torch.nan
        model.steps_since_sync = 0
        with pytest.raises(AnomalyError, match=rf"^rank {world - 1}: what was looked up in table 't' has nan"):
            loss_of(model)


@pytest.mark.parametrize("world", [2, 4])
def test_an_anomaly_of_one_replica_is_raised_in_all(world: int) -> None:
    ranks(world, in_one_replica)


def with_replicated_tables_alone() -> None:
    model, last = one_table(cuts.data_parallel("t", 5, 4), ranks_of_plan=2), dist.get_rank() == 1
    (weight,) = model.parameters()
    before = weight.detach().clone()
    with shardrec.detect_anomaly(model):
        loss = loss_of(model, torch.nan if last else 1.0)
        with pytest.raises(AnomalyError, match=r"^rank 1: the gradient of feature 'f' of table 't' has nan"):
            loss.backward()
        assert torch.equal(weight, before)
        loss_of(model).backward()
        assert weight.isfinite().all()
    with torch.no_grad():
        weight[4] = torch.nan
    rank = dist.get_rank()
    with (
        pytest.raises(AnomalyError, match=f"^rank {rank}: what was looked up in table 't' has nan"),
        shardrec.detect_anomaly(model),
        torch.no_grad(),
    ):
        loss_of(model)


def test_gradients_of_replicated_tables_alone() -> None:
    """And rows that an evaluation has looked up, which are raised at the latest when the context is left."""
    ranks(2, with_replicated_tables_alone)


def test_a_model_without_sharded_modules_is_refused() -> None:
    with pytest.raises(ConfigError, match="no sharded collection"), shardrec.detect_anomaly(torch.nn.Linear(1, 1)):
        pass


def test_a_traced_program_is_watched_too() -> None:
    bad_gradient(*CASES[0], traced=True)
    bad_row("bags.ta", traced=True)

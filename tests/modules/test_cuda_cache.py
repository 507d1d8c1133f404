"""Tables whose rows are in the host's memory, with and without a cache on the device, on the double of CUDA."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
from torch import Tensor, nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from shardrec import load_checkpoint, save_checkpoint, shard
from shardrec.errors import ConfigError, PlanError
from shardrec.ids import DynamicIds
from shardrec.layout import ShardingPlan, TableLayout, Topology, cuts
from shardrec.lookup import cache
from shardrec.lookup import fbgemm_kernel as kernels
from shardrec.lookup.optimizers import FusedOptimizer, OptimizerKind
from shardrec.modules import ShardedModel
from shardrec.pipeline import TrainPipeline
from shardrec.serve import Publisher
from tests.batches import random_bags
from tests.cuda_double import CachedKernelDouble, CudaDouble, cuda_double, cuda_is_there, to_double, value_of
from tests.models import collection, feature_rows, table_sizes
from tests.modules import sequence_models as sequences

CONFIGS = [
    EmbeddingBagConfig(name="t0", num_embeddings=29, embedding_dim=8, feature_names=["a", "b"]),
    EmbeddingBagConfig(name="t1", num_embeddings=17, embedding_dim=8, feature_names=["b"]),
    EmbeddingBagConfig(name="t2", num_embeddings=13, embedding_dim=4, feature_names=["c"]),
]
SMALL = {"tier": "cached", "load_factor": 0.25}


def plan_of(layouts: list[TableLayout], **placed: Any) -> ShardingPlan:
    return ShardingPlan(topology=Topology(), tables=tuple(replace(one, **placed) for one in layouts))


def row_blocks(**placed: Any) -> ShardingPlan:
    sizes = table_sizes(CONFIGS)
    return plan_of([cuts.row_wise(name, *size, ranks=[0, 0]) for name, size in sizes.items()], **placed)


def batches(count: int, ids: int = 3) -> list[KeyedJaggedTensor]:
    return [random_bags(Random(step), feature_rows(CONFIGS), ids, shuffled=False).kjt() for step in range(count)]


def values(model: ShardedModel) -> dict[str, Tensor]:
    return {name: one.clone().cpu() for name, one in model.state_dict().items()}


def same(found: ShardedModel, expected: ShardedModel) -> bool:
    wanted = values(expected)
    return all(torch.allclose(one, wanted[name], atol=1e-5) for name, one in values(found).items())


def kernels_of(model: ShardedModel) -> list[CachedKernelDouble]:
    banks = [local.bank for one in model.sharded_collections for local in one.shards._local_groups]
    return [bank.kernel for bank in banks if bank is not None and bank.cache is not None]


def train(model: Any, given: list[Any], backward: Callable[[Tensor], None] = Tensor.backward) -> None:
    for features in given:
        backward((value_of(model(features)) ** 2).sum())


@pytest.mark.some(4)
@pytest.mark.parametrize("placed", [SMALL, {"tier": "cached", "load_factor": 1.0}, {"tier": "host"}])
@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "rowwise_adagrad"])
def test_bags(optimizer: str, placed: dict[str, Any]) -> None:
    given = batches(5)
    expected = shard(collection(CONFIGS, optimizers=optimizer), row_blocks())
    train(expected, given)
    with cuda_is_there(), cuda_double() as double, double.may_wait():
        model = shard(collection(CONFIGS, optimizers=optimizer), row_blocks(**placed), device="cuda:0")
        moved = [to_double(one) for one in given]
        train(model, moved[:1])
        double.waits.clear()
        train(model, moved[1:])
        assert {one.partition(":")[0] for one in double.waits} == {"step/id_exchange.py"}
        assert same(model, expected)
        # One kernel for each width of rows; in a small cache rows make room for others.
        found = kernels_of(model)
        assert len(found) == 2 * (placed["tier"] == "cached")
        assert placed is not SMALL or all(one.loads > one.lxu_cache_state.numel() for one in found)
        for tables, numbers in model.sharded_collections[0].shards.cache_statistics():
            assert tables in (("t0", "t1"), ("t2",)) and numbers["calls"] == 5 and numbers["misses"]


@pytest.mark.some(1)
@pytest.mark.parametrize("dynamic", [False, True])
def test_sequences(dynamic: bool) -> None:
    options = {"dynamic_ids": {f"sequences.{name}": DynamicIds() for name in sequences.ROWS}} if dynamic else {}
    layouts = [
        cuts.row_wise(f"sequences.{name}", rows, sequences.DIM, ranks=[0, 0]) for name, rows in sequences.ROWS.items()
    ]
    given = [sequences.batch(Random(step), ["c", "a", "b"], size) for step, size in enumerate((3, 0, 2, 3))]

    def make() -> nn.Module:
        return sequences.Holder(sequences.collection(torch.optim.SGD, 0.1))

    expected = shard(make(), plan_of(layouts), **options)
    train(expected, given)
    with cuda_is_there(), cuda_double() as double, double.may_wait():
        model = shard(make(), plan_of(layouts, **SMALL), device="cuda:0", **options)
        train(model, [to_double(one) for one in given])
        assert same(model, expected)


def test_forwards_before_a_backward() -> None:
    """The rows of the first lose their places to those of the second."""
    given = batches(4)
    expected = shard(collection(CONFIGS, optimizers="sgd"), row_blocks())

    def step(model: Any, first: Any, second: Any) -> None:
        losses = [(value_of(model(features)) ** 2).sum() for features in (first, second)]
        for loss in losses:
            loss.backward()

    with cuda_is_there(), cuda_double() as double, double.may_wait():
        model = shard(collection(CONFIGS, optimizers="sgd"), row_blocks(**SMALL), device="cuda:0")
        moved = [to_double(one) for one in given]
        for first, second in ((0, 1), (2, 3)):
            step(expected, given[first], given[second])
            step(model, moved[first], moved[second])
        assert same(model, expected)


class Clicks(nn.Module):
    """Bags and a dense layer."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = collection(CONFIGS, optimizers="sgd")
        torch.manual_seed(0)
        self.over = nn.Linear(28, 1)

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        found: Tensor = self.over(self.bags(features).values())
        return found


def loss_of(model: nn.Module, features: KeyedJaggedTensor) -> Tensor:
    loss: Tensor = (model(features) ** 2).sum()
    return loss


@pytest.mark.some(1)
@pytest.mark.parametrize("between", ["nothing", "evaluation", "load"])
def test_a_pipeline_prefetches(between: str) -> None:
    """An evaluation between two steps takes the places of the batch that was prefetched, and not what it is told."""
    given, held_out = batches(5), batches(7)[5:]
    layouts = [
        replace(one, name=f"bags.{one.name}", shards=tuple(replace(s, table=f"bags.{s.table}") for s in one.shards))
        for one in row_blocks().tables
    ]

    def steps(model: ShardedModel, double: CudaDouble | None) -> list[float]:
        optimizer = torch.optim.SGD(model.dense_parameters(), lr=0.01, foreach=False)
        pipeline, found = TrainPipeline(model, optimizer, given, loss_fn=loss_of), []

        def note(loss: Tensor) -> None:
            found.append(float(loss))
            populated.append([one.populated for one in kernels_of(model)] if double else [])

        for step, loss in enumerate(pipeline):
            note(loss)
            if between == "evaluation" and step == 2:
                for held_out_loss in pipeline.evaluate(held_out):
                    note(held_out_loss)
            if between == "load" and step == 2:
                model.load_state_dict({name: 0.5 * one for name, one in values(model).items()})
        return found

    populated: list[list[int]] = []
    expected = steps(shard(Clicks(), plan_of(layouts)), None)
    with cuda_is_there(), cuda_double() as double, double.may_wait():
        model = shard(Clicks(), plan_of(layouts, **SMALL), device="cuda:0")
        populated.clear()
        assert steps(model, double) == pytest.approx(expected, rel=1e-4)
    # Each batch is loaded once, all but the first of each loop ahead of their steps; after a load, once more.
    loaded = {"nothing": [2, 3, 4, 5, 5], "evaluation": [2, 3, 4, 6, 6, 7, 7], "load": [2, 3, 4, 6, 6]}[between]
    assert populated == [[count] * 2 for count in loaded]


def test_readers_and_writers(tmp_path: Path) -> None:
    """A checkpoint, another tier, a copy and a published version have the rows that are newer in the cache."""
    given = batches(6)
    expected = shard(collection(CONFIGS, optimizers="adagrad"), row_blocks())
    train(expected, given[:3])
    half = {name: 0.5 * one for name, one in values(expected).items()}
    with cuda_is_there(), cuda_double() as double, double.may_wait():
        model = shard(collection(CONFIGS, optimizers="adagrad"), row_blocks(**SMALL), device="cuda:0")
        publisher = Publisher(model, tmp_path / "published")
        moved = [to_double(one) for one in given]
        train(model, moved[:3])
        save_checkpoint(tmp_path / "saved", model)
        train(model, moved[3:])
        publisher.publish()
        load_checkpoint(tmp_path / "saved", model)
        assert same(model, expected)
        train(model, moved[3:])
        train(expected, given[3:])
        for tier in ({"tier": "cached", "load_factor": 0.5}, {"tier": "host"}, {}):
            model.reshard(row_blocks(**tier))
            assert same(model, expected)
            train(model, moved[:2])
            train(expected, given[:2])
        model.load_state_dict(half)
        train(model, moved[:1])
        expected.load_state_dict(half)
        train(expected, given[:1])
        assert same(model, expected)


def test_a_write_into_a_state_dict_is_read_by_the_next_forward() -> None:
    given = batches(1)
    expected = shard(collection(CONFIGS, optimizers="sgd"), row_blocks())
    with cuda_is_there(), cuda_double() as double, double.may_wait():
        model = shard(collection(CONFIGS, optimizers="sgd"), row_blocks(**SMALL), device="cuda:0")
        for sharded, of_model in ((model, [to_double(one) for one in given]), (expected, given)):
            train(sharded, of_model)
            for value in sharded.state_dict().values():
                value.mul_(0.5)
            train(sharded, of_model)
        assert same(model, expected)


def test_a_reader_that_forgets_to_flush_is_found_out() -> None:
    with cuda_is_there(), cuda_double() as double, double.may_wait():
        model = shard(collection(CONFIGS, optimizers="sgd"), row_blocks(**SMALL), device="cuda:0")
        train(model, [to_double(one) for one in batches(1)])
        assert any(one.inner.isnan().any() for one in model.parameters())  # type: ignore[attr-defined]
        assert not any(one.isnan().any() for one in values(model).values())


def test_what_is_refused() -> None:
    with pytest.raises(PlanError, match="no tier 'ssd': fbgemm's tables on an SSD"):
        row_blocks(tier="ssd")
    with pytest.raises(PlanError, match=r"no tier 'disk'. The tiers are device, cached, host"):
        row_blocks(tier="disk")
    with pytest.raises(PlanError, match=r"load_factor is 0\.0. A cache has room"):
        row_blocks(tier="cached")
    with pytest.raises(PlanError, match=r"load_factor is 0\.5 in tier 'host'"):
        row_blocks(tier="host", load_factor=0.5)
    with pytest.raises(PlanError, match="is replicated, and in tier 'host'"):
        plan_of([cuts.data_parallel("t0", 29, 8)], tier="host")
    with cuda_is_there(), cuda_double() as double, double.may_wait():
        for options in ({"optimizers": "none"}, {"optimizers": "sgd", "update": "step"}):
            update = {"update": options.pop("update")} if "update" in options else {}
            with pytest.raises(PlanError, match="table 't0' is in tier 'cached', which takes an optimizer"):
                shard(collection(CONFIGS, **options), row_blocks(**SMALL), device="cuda:0", **update)
        model = shard(collection(CONFIGS, optimizers="sgd"), row_blocks(**SMALL), device="cuda:0")
        with pytest.raises(ConfigError, match="'t0', 't1' are also in a cache"):
            model.sharded_collections[0].shards.scripted()


def test_on_the_cpu_tiers_are_where_they_are() -> None:
    """In the host's memory."""
    given = batches(2)
    models = [shard(collection(CONFIGS, optimizers="sgd"), row_blocks(**placed)) for placed in ({}, SMALL)]
    for model in models:
        train(model, given)
    assert same(*models)


def test_plans_keep_tiers(tmp_path: Path) -> None:
    plan = row_blocks(**SMALL)
    plan.save(tmp_path / "plan.json")
    assert ShardingPlan.load(tmp_path / "plan.json") == plan
    assert "tier" not in str(row_blocks().to_json())
    assert {one.name for one in plan.diff(row_blocks())} == {"t0", "t1", "t2"}


@pytest.mark.parametrize(("tier", "rows", "sets"), [("device", 0, 0), ("host", 0, 0), ("cached", 33, 2)])
def test_what_fbgemm_is_told(tier: str, rows: int, sets: int, monkeypatch: pytest.MonkeyPatch) -> None:
    told: dict[str, Any] = {}
    monkeypatch.setattr(
        kernels, "SplitTableBatchedEmbeddingBagsCodegen", lambda **given: told.update(given) or nn.Module()
    )
    rule = FusedOptimizer(kind=OptimizerKind.SGD, lr=0.1)
    kernels.make_kernel([(100, 8)], [0], rule, torch.device("cuda", 0), tier=tier, cache_rows=rows)
    location = {"device": "DEVICE", "host": "MANAGED", "cached": "MANAGED_CACHING"}[tier]
    assert told["embedding_specs"][0][2] is EmbeddingLocation[location]
    assert (told["cache_sets"], told["uvm_host_mapped"], told["gather_uvm_cache_stats"]) == (
        sets,
        True,
        tier == "cached",
    )


def test_a_prefetch_waits_for_the_backward_before_it() -> None:
    with cuda_is_there(), cuda_double() as double, double.may_wait():
        model = shard(collection(CONFIGS, optimizers="sgd"), row_blocks(**SMALL), device="cuda:0")
        moved = [to_double(one) for one in batches(2)]
        for features in moved:
            train(model, [features])
            with torch.cuda.stream(torch.cuda.Stream()):
                ids, lengths = torch.zeros(6, device="cuda").int(), torch.ones(6, 1, device="cuda").int()
                model.sharded_collections[0].shards._local_groups[0].bank.prefetch(ids, lengths)  # type: ignore[union-attr]


def test_statistics_wait_for_a_prefetch() -> None:
    with cuda_is_there(), cuda_double() as double, double.may_wait():
        model = shard(collection(CONFIGS, optimizers="sgd"), row_blocks(**SMALL), device="cuda:0")
        shards = model.sharded_collections[0].shards
        with torch.cuda.stream(torch.cuda.Stream()):
            ids, lengths = torch.zeros(6, device="cuda").int(), torch.ones(6, 1, device="cuda").int()
            shards._local_groups[0].bank.prefetch(ids, lengths)  # type: ignore[union-attr]
        assert [numbers["calls"] for _, numbers in shards.cache_statistics()] == [1, 0]


def test_calls_that_are_prefetched_and_dropped_are_forgotten() -> None:
    with cuda_is_there(), cuda_double() as double, double.may_wait():
        model = shard(collection(CONFIGS, optimizers="sgd"), row_blocks(**SMALL), device="cuda:0")
        bank = model.sharded_collections[0].shards._local_groups[0].bank
        assert bank is not None and bank.cache is not None
        for _ in range(20):
            bank.prefetch(
                torch.zeros(6, dtype=torch.int32, device="cuda"), torch.ones(6, 1, dtype=torch.int32, device="cuda")
            )
        assert len(bank.cache._prefetched) == cache._MOST_PREFETCHED

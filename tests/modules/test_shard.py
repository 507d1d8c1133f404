"""``shard``: wherever collections are in a model, and whatever keeps a model or a plan from being used."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner
from torchrec.distributed.planner import Topology as TorchRecTopology
from torchrec.distributed.types import Awaitable as TorchRecAwaitable
from torchrec.distributed.types import LazyAwaitable as TorchRecLazyAwaitable
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from shardrec.errors import ConfigError, PlanError
from shardrec.layout import ShardingPlan, Topology, cuts
from shardrec.layout.discover import default_device
from shardrec.modules import DistributedModelParallel, Servers, ShardedEmbeddingBagCollection, ShardedModel, shard
from shardrec.modules.initial import value_checksums
from shardrec.pending import LazyNoWait
from tests.batches import joined, random_bags
from tests.models import (
    apply_optimizer_in_backward,
    click_model,
    collection,
    table_sizes,
)
from tests.modules.clicks import (
    CONFIGS,
    ROWS,
    SIZES,
    assert_tables_equal,
    mixed_plan,
)
from tests.plans import cut_plan, random_plan
from tests.ranks import raises_on_all, ranks


class Two(nn.Module):
    """Two collections with equal table names, one of them used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.left = collection(CONFIGS, optimizers="sgd", seed=1)
        self.right = nn.ModuleDict({"inner": collection(CONFIGS, optimizers="adagrad", seed=2)})
        self.shared = self.left

    def forward(self, features: Any) -> Tensor:
        left, right = self.left(features), self.right["inner"](features)
        again = self.shared(features)
        total: Tensor = left.values() + 2 * right.values() - 0.5 * again.values()
        return total


def test_two_collections_and_one_with_two_names() -> None:
    def rank_main() -> None:
        world_size, rank = dist.get_world_size(), dist.get_rank()
        sizes = {**table_sizes(CONFIGS, "left"), **table_sizes(CONFIGS, "right.inner")}
        rng = Random(2)
        model = shard(Two(), random_plan(rng, sizes, Topology(ranks_per_host=world_size)))
        reference = Two()
        assert model.module.left is model.module.shared
        assert list(model.state_dict()) == list(reference.state_dict())
        for step in range(3):
            bags = [random_bags(rng, ROWS, 3, shuffled=False) for _ in range(world_size)]
            values = model(bags[rank].kjt())
            expected = reference(joined(bags).kjt())
            assert torch.allclose(values, expected[3 * rank : 3 * rank + 3], atol=1e-5), step
            # The left tables are looked up twice; SGD does not mind whether the two gradients come together.
            values.square().mean().backward()
            expected.square().mean().backward()
            assert_tables_equal(model.module, reference, f"step {step}")

    ranks(1, rank_main)
    ranks(2, rank_main)


@pytest.mark.parametrize(
    ("wrap", "path"),
    [
        (lambda one: one, ""),
        (lambda one: nn.ModuleDict({"users": one}), "users"),
        (lambda one: nn.ModuleList([nn.Identity(), one]), "1"),
        (lambda one: nn.Sequential(nn.Sequential(one)), "0.0"),
    ],
    ids=["root", "dict", "list", "nested"],
)
def test_wherever_the_collection_is(wrap: Callable[[nn.Module], nn.Module], path: str) -> None:
    def rank_main() -> None:
        model = shard(wrap(collection(CONFIGS, seed=1)), mixed_plan(2, path))
        module = model.module.get_submodule(path)
        assert isinstance(module, ShardedEmbeddingBagCollection)
        features = random_bags(Random(dist.get_rank()), ROWS, 3).kjt()
        assert torch.allclose(module(features).values(), collection(CONFIGS, seed=1)(features).values())
        assert list(model.state_dict()) == list(wrap(collection(CONFIGS)).state_dict())

    ranks(2, rank_main)


def test_a_model_without_a_collection() -> None:
    with pytest.raises(ConfigError, match=r"Linear holds no torchrec .*wrap it in DistributedDataParallel"):
        shard(nn.Linear(2, 2))


def test_a_model_that_is_sharded_already() -> None:
    model = shard(click_model(CONFIGS), mixed_plan(1))
    with pytest.raises(ConfigError, match="holds no torchrec"):
        shard(model, mixed_plan(1))


@pytest.mark.parametrize("odd", [0, 1])
def test_plans_that_differ_between_ranks(odd: int) -> None:
    def rank_main() -> None:
        cut = "column_wise" if dist.get_rank() == odd else "row_wise"
        shard(click_model(CONFIGS), cut_plan(cut, Random(0), SIZES, Topology(ranks_per_host=2)))

    raises_on_all(2, PlanError, r"the plan of rank\(s\) 1 differs from rank 0's. Make the plan on one rank", rank_main)


@pytest.mark.parametrize("wrong", [1, 3, 4])
def test_plans_for_another_number_of_ranks(wrong: int) -> None:
    def rank_main() -> None:
        shard(click_model(CONFIGS), mixed_plan(wrong))

    words = rf"the plan is for {wrong} ranks? and the process group has 2. Plan for 2, or start {wrong} ranks?"
    raises_on_all(2, PlanError, words, rank_main)


def test_a_plan_for_another_number_of_ranks_on_one_rank_only() -> None:
    """Nobody is left waiting."""

    def rank_main() -> None:
        shard(click_model(CONFIGS), mixed_plan(2 if dist.get_rank() else 3))

    raises_on_all(2, PlanError, r"rank", rank_main, timeout=20.0, grace=5.0)


def test_another_model_on_one_rank_only() -> None:
    def rank_main() -> None:
        configs = CONFIGS if dist.get_rank() else CONFIGS[:2]
        shard(click_model(configs), mixed_plan(2))

    raises_on_all(2, PlanError, r"'sparse\.users'", rank_main, timeout=20.0, grace=5.0)


def test_an_optimizer_without_a_fused_form() -> None:
    model = click_model(CONFIGS, optimizer="none")
    apply_optimizer_in_backward(torch.optim.RMSprop, model.sparse.parameters(), {"lr": 0.1})
    with pytest.raises(ConfigError, match=r"table 'sparse\.movies': there is no fused form of torch\.optim.*RMSprop"):
        shard(model, mixed_plan(1))


def test_a_group_that_is_not_the_whole_world() -> None:
    """Two pairs of ranks, each with a model of its own."""

    def rank_main() -> None:
        pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        pair, member = divmod(dist.get_rank(), 2)
        planned = shard(click_model(CONFIGS, seed=pair), group=pairs[pair])
        assert planned.plan.world_size == 2
        model = shard(click_model(CONFIGS, seed=pair), mixed_plan(2), group=pairs[pair])
        reference = click_model(CONFIGS, seed=pair)
        rng = Random(pair)
        for _ in range(2):
            bags = [random_bags(rng, ROWS, 2, shuffled=False) for _ in range(2)]
            dense = torch.randn(4, 3, generator=torch.Generator().manual_seed(pair))
            mine = slice(2 * member, 2 * member + 2)
            model(dense[mine], bags[member].kjt()).mean().backward()
            reference(dense, joined(bags).kjt()).mean().backward()
        assert_tables_equal(model.module, reference, f"pair {pair}")
        gradients = dict(model.named_parameters())
        for name, parameter in reference.named_parameters():
            if "embedding_bags" not in name:
                assert torch.allclose(gradients[name].grad, parameter.grad, atol=1e-6), name  # type: ignore[arg-type]
        state = model.state_dict()
        model.load_state_dict(state)

    ranks(4, rank_main)


def test_the_default_device_is_the_models(monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        on_cuda = nn.ParameterList([torch.empty(2, device="cuda")])
    assert default_device(on_cuda, None) == torch.device("cuda", 0)
    assert default_device(nn.Linear(2, 2), None) == torch.device("cpu")
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend", lambda group: dist.Backend.NCCL)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    assert default_device(nn.Linear(2, 2, device="meta"), None) == torch.device("cuda", 3)


def test_a_plan_of_torchrecs_planner_and_isinstance_of_its_awaitables() -> None:
    torch.manual_seed(0)
    model = click_model(CONFIGS)
    planner = EmbeddingShardingPlanner(topology=TorchRecTopology(world_size=1, compute_device="cpu"), stats=[])
    theirs = planner.plan(model, [EmbeddingBagCollectionSharder()])
    sharded = shard(model, theirs)
    assert set(sharded.plan.by_name) == set(table_sizes(CONFIGS, "sparse"))
    output = sharded.module.sparse(random_bags(Random(0), ROWS, 2).kjt())
    assert isinstance(output, TorchRecLazyAwaitable)
    assert isinstance(output, TorchRecAwaitable)
    # TorchRec's own lazy values, and ours, in one torch function.
    both = torch.cat([output.values(), TheirLazy(torch.ones(2, 1))], dim=1)
    assert both.shape == (2, output.values().size(1) + 1)


class TheirLazy(TorchRecLazyAwaitable[Tensor]):
    def __init__(self, value: Tensor) -> None:
        super().__init__()
        self._value = value

    def _wait_impl(self) -> Tensor:
        return self._value


def test_their_lazy_values_force_ours() -> None:
    ours = shard(click_model(CONFIGS)).module.sparse(random_bags(Random(0), ROWS, 2).kjt())
    assert TorchRecLazyAwaitable._wait_async(ours) is ours.wait()
    assert torch.add(TheirLazy(torch.ones(2)), LazyNoWait(torch.ones(2))).tolist() == [2.0, 2.0]


def test_torchrecs_signature() -> None:
    model = click_model(CONFIGS)
    sharders = [EmbeddingBagCollectionSharder()]
    planner = EmbeddingShardingPlanner(topology=TorchRecTopology(world_size=1, compute_device="cpu"), stats=[])
    found = DistributedModelParallel(
        model, device=torch.device("cpu"), plan=planner.plan(model, sharders), sharders=sharders
    )
    assert found(torch.ones(2, 3), random_bags(Random(0), ROWS, 2).kjt()).shape == (2,)
    assert found.fused_optimizer.param_groups[0]["optimizer"] == "SGD"
    with pytest.raises(ConfigError, match=r"fused_params: give .* apply_optimizer_in_backward.*init_data_parallel is"):
        DistributedModelParallel(
            click_model(CONFIGS),
            sharders=[EmbeddingBagCollectionSharder(fused_params={"learning_rate": 0.1})],
            init_data_parallel=False,
        )


def seeded(rank: int, world_size: int, *, device: str = "cpu") -> Any:
    """Shard a model with each rank's own values."""
    torch.manual_seed(rank)
    bags = EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(name=name, num_embeddings=10, embedding_dim=4, feature_names=[name]) for name in "ab"
        ],
        device=torch.device(device),
    )
    copied = cuts.data_parallel("a", 10, 4), cuts.table_wise("b", 10, 4, rank=world_size - 1)
    return shard(bags, ShardingPlan(topology=Topology(ranks_per_host=world_size), tables=copied))


def test_ranks_with_other_values() -> None:
    """Replicated tables take rank 0's; a table that lies on one rank alone would not. On meta, ranks draw their own."""
    words = "^table 'b' has other values on rank 1 than on rank 0, .*: give all ranks one seed"
    raises_on_all(2, ConfigError, words, lambda: seeded(dist.get_rank(), 2))
    raises_on_all(2, ConfigError, words, lambda: seeded(0, 2, device=["cpu", "meta"][dist.get_rank()]))
    ranks(2, lambda: seeded(0, 2) and None)
    ranks(2, lambda: seeded(dist.get_rank(), 2, device="meta") and None)


def test_which_values_are_compared() -> None:
    """All rows of 1 MiB, and some of each part of a larger table."""

    def checksum(edit: int | None, rows: int) -> int:
        config = EmbeddingBagConfig(name="t", num_embeddings=rows, embedding_dim=256, feature_names=["f"])
        bags = EmbeddingBagCollection(tables=[config])
        weight = bags.embedding_bags["t"].weight.detach().zero_()
        if edit is not None:
            weight[edit:] = 1
        return value_checksums(bags)["t"]

    assert checksum(None, 1024) == checksum(None, 1024)
    assert checksum(1023, 1024) != checksum(None, 1024)
    assert checksum(2000, 2048) != checksum(None, 2048)


def test_a_process_of_a_launcher_without_a_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    model = click_model(CONFIGS)
    with pytest.raises(ConfigError, match=r"rank 1 of 2 .*: call torch\.distributed\.init_process_group first"):
        shard(model)
    assert isinstance(model.sparse, EmbeddingBagCollection)
    monkeypatch.setenv("WORLD_SIZE", "1")
    shard(model)


@pytest.mark.parametrize(("options", "words"), [({"replicas": 2}, r"Replicas\(2\)"), ({"servers": ["a"]}, "Servers")])
def test_options_that_are_records(options: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=f"is .*. Give a shardrec.*{words}"):
        shard(click_model(CONFIGS), mixed_plan(1), **options)


def test_servers_that_cannot_be() -> None:
    for names, options, words in [
        ([], {}, "names of Servers is"),
        (["a", ["b", "a"]], {}, "each once"),
        ([[], "a"], {}, "a server for each rank"),
        (["a"], {"staleness": -1}, "staleness=-1"),
        (["a"], {"timeout_s": 0.0}, r"timeout_s=0\.0"),
    ]:
        with pytest.raises(ConfigError, match=words):
            Servers(names, **options)  # type: ignore[arg-type]


def test_dense_parameters_are_what_an_ordinary_optimizer_trains() -> None:
    def rank_main() -> tuple[set[str], set[str]]:
        model: ShardedModel = shard(click_model(CONFIGS), mixed_plan(2))
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        return {names[id(parameter)] for parameter in model.dense_parameters()}, set(model.fused_optimizer.params)

    dense = {name for name, _ in click_model(CONFIGS).named_parameters() if "embedding_bags" not in name}
    for own, fused in ranks(2, rank_main):
        assert own == dense
        assert "sparse.embedding_bags.tags.weight" in fused, "the replicated table has a fused optimizer, too"
    plain = shard(click_model(CONFIGS, optimizer="none"), mixed_plan(1))
    assert set(map(id, plain.dense_parameters())) == set(map(id, plain.parameters()))
    torch.optim.Adam(plain.dense_parameters())

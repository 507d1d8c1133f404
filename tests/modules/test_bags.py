"""A sharded collection behaves as the unsharded one in every way that a user can see."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from shardrec.errors import ConfigError, PlanError
from shardrec.exchange.batch import KEY_ORDERS
from shardrec.layout import ShardingPlan, Topology, cuts
from shardrec.modules import ShardedEmbeddingBagCollection, shard
from shardrec.modules.collection import ShardedCollection
from shardrec.modules.initial import first_values
from shardrec.pending import LazyAwaitable
from tests.batches import random_bags
from tests.models import OPTIMIZERS, collection, feature_rows, random_configs, table_sizes
from tests.modules.both import POLICIES, sharded_both
from tests.modules.tables import assert_weights_equal, local_part
from tests.plans import CUTS, cut_plan, random_plan, topologies_of
from tests.ranks import ranks


def config(name: str, rows: int, dim: int, *features: str, **settings: Any) -> EmbeddingBagConfig:
    return EmbeddingBagConfig(
        name=name, num_embeddings=rows, embedding_dim=dim, feature_names=list(features), **settings
    )


CONFIGS = [
    config("movies", 10, 8, "watched", "liked"),
    config("tags", 6, 4, "tag", pooling=PoolingType.MEAN),
    config("users", 10, 12, "liked"),
]
ROWS = feature_rows(CONFIGS)


def plan_of(world_size: int, *cut_names: str) -> ShardingPlan:
    """A plan for CONFIGS, one cut per table."""
    rng = Random(3)
    topology = Topology(ranks_per_host=world_size)
    sizes = table_sizes(CONFIGS).items()
    return ShardingPlan(
        topology=topology,
        tables=tuple(CUTS[cut](rng, name, *size, topology) for cut, (name, size) in zip(cut_names, sizes, strict=True)),
    )


MIXED = ("row_wise", "data_parallel", "column_wise")


# ------------------------------------------------------------------------------------------------------- first values


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_first_values_are_those_of_the_unsharded_module(device: str) -> None:
    def rank_main() -> None:
        for cut in sorted(CUTS):
            rng = Random(cut)
            configs = [
                *random_configs(rng),
                config("wide", 5, 8, "a", init_fn=nn.init.ones_),
                config("bounded", 5, 8, "a", weight_init_max=0.01, weight_init_min=-0.01),
            ]
            plan = cut_plan(cut, rng, table_sizes(configs), rng.choice(topologies_of(2)))
            reference = collection(configs, seed=7)
            model = collection(configs, seed=7, device=device)
            torch.manual_seed(7)
            assert_weights_equal(shard(model, plan).module, reference, cut)

    ranks(2, rank_main)


def test_values_drawn_for_meta_tables_leave_the_generator_where_the_cpu_does() -> None:
    """So that whatever is initialised after the collection gets the same values, too."""
    reference = collection(CONFIGS, seed=7)
    after = torch.rand(3)
    meta = collection(CONFIGS, device="meta")
    torch.manual_seed(7)
    drawn = dict(first_values(meta))
    assert torch.equal(after, torch.rand(3))
    assert drawn.keys() == reference.embedding_bags.keys()
    for name, values in drawn.items():
        assert torch.equal(values, reference.embedding_bags[name].weight)


# ------------------------------------------------------------------------------------------------------------ output


def test_output_is_lazy_and_as_the_unsharded_one() -> None:
    def rank_main() -> None:
        model = shard(collection(CONFIGS, seed=1), plan_of(2, *MIXED))
        features = random_bags(Random(dist.get_rank()), ROWS, 4).kjt()
        output = model(features)
        assert isinstance(output, LazyAwaitable)
        assert not output.done()
        expected = collection(CONFIGS, seed=1)(features)
        assert output.keys() == ["watched", "liked@movies", "tag", "liked@users"] == expected.keys()
        assert output.length_per_key() == [8, 8, 4, 12] == expected.length_per_key()
        assert output.offset_per_key() == expected.offset_per_key()
        for key, part in expected.to_dict().items():
            assert torch.allclose(output[key], part)
        assert type(output.wait()) is KeyedTensor
        regrouped = KeyedTensor.regroup([output.wait()], [["tag"], ["watched", "liked@users"]])
        assert [tuple(part.shape) for part in regrouped] == [(4, 4), (4, 20)]

    ranks(2, rank_main)


def test_module_describes_itself_as_the_unsharded_one() -> None:
    module = shard(collection(CONFIGS), plan_of(1, *MIXED)).module
    assert isinstance(module, ShardedEmbeddingBagCollection)
    assert module.embedding_bag_configs() == CONFIGS
    assert not module.is_weighted()
    assert "10, 8, cut=row_wise" in repr(module)


def test_evaluation_with_and_without_gradients() -> None:
    def rank_main() -> None:
        model = shard(collection(CONFIGS, optimizers="sgd", seed=1), plan_of(2, *MIXED))
        reference = collection(CONFIGS, seed=1)
        features = random_bags(Random(dist.get_rank()), ROWS, 4).kjt()
        for module in (model, reference):
            module.eval()
        with torch.no_grad():
            values = model(features).values()
        assert not values.requires_grad
        assert torch.allclose(values, reference(features).values())
        with torch.inference_mode():
            values = model(features).values()
        assert torch.allclose(values, reference(features).values())
        with torch.no_grad():
            late = model(features)
        assert not late.values().requires_grad, "the value belongs to the forward, not to its first use"
        late = model(features)
        with torch.no_grad():
            assert late.values().requires_grad
        with torch.no_grad():
            late = model(features)
        with torch.inference_mode():
            assert not late.values().is_inference()
            late = model(features)
        with torch.no_grad():
            assert late.values().is_inference()
        assert_weights_equal(model.module, reference, "evaluation changes no weight")

    ranks(2, rank_main)


@pytest.mark.some(2)
@pytest.mark.parametrize("optimizer", sorted(OPTIMIZERS))
def test_outputs_of_earlier_steps_keep_their_values(optimizer: str) -> None:
    def rank_main(world_size: int) -> None:
        rng = Random(4)
        for cut in ("row_wise", "table_wise", "column_wise", "data_parallel"):
            plan = plan_of(world_size, cut, cut, cut)
            model = shard(collection(CONFIGS, optimizers=optimizer), plan)
            kept: list[tuple[Tensor, Tensor]] = []
            for _ in range(4):
                values = model(random_bags(rng, ROWS, 3).kjt()).values()
                kept.append((values, values.detach().clone()))
                values.square().sum().backward()
            assert all(torch.equal(values, copy) for values, copy in kept)

    for world_size in (1, 2):
        ranks(world_size, rank_main, world_size)


def test_values_may_be_changed_in_place() -> None:
    """A user who adds to the output adds to nothing else."""

    def rank_main() -> None:
        for cut in ("row_wise", "table_wise", "data_parallel"):
            model = shard(collection(CONFIGS, seed=1), plan_of(1, cut, cut, cut))
            features = random_bags(Random(0), ROWS, 4).kjt()
            with torch.no_grad():
                model(features).values().add_(1.0)
                again = model(features).values()
            assert torch.allclose(again, collection(CONFIGS, seed=1)(features).values())

    ranks(1, rank_main)


def test_forward_twice_before_backward() -> None:
    """Two outputs in one loss: with SGD the updates add up to that of the sum."""

    def rank_main() -> None:
        world_size, rank = dist.get_world_size(), dist.get_rank()
        model = shard(collection(CONFIGS, optimizers="sgd", seed=1), plan_of(world_size, *MIXED))
        reference = collection(CONFIGS, optimizers="sgd", seed=1)
        rng = Random(2)
        for _ in range(2):
            bags = [[random_bags(rng, ROWS, 3, shuffled=False) for _ in range(world_size)] for _ in range(2)]
            first, second = (model(one[rank].kjt()) for one in bags)
            (second.values().square().sum() + 2 * first.values().sum()).backward()
            loss = torch.zeros(())
            for one in range(world_size):
                first, second = (reference(batch[one].kjt()) for batch in bags)
                loss = loss + second.values().square().sum() + 2 * first.values().sum()
            (loss / world_size).backward()
        assert_weights_equal(model.module, reference, "two forwards")

    for world_size in (1, 2):
        ranks(world_size, rank_main)


def test_an_output_that_is_never_used() -> None:
    def rank_main() -> None:
        model = shard(collection(CONFIGS, optimizers="sgd", seed=1), plan_of(2, *MIXED))
        for _ in range(5):
            features = random_bags(Random(dist.get_rank()), ROWS, 4).kjt()
            model(features)
        assert torch.allclose(model(features).values(), collection(CONFIGS, seed=1)(features).values())

    ranks(2, rank_main)


def test_part_of_the_output_in_the_loss() -> None:
    def rank_main() -> None:
        model = shard(collection(CONFIGS, optimizers="adagrad", seed=1), plan_of(2, "row_wise", "table_wise", "grid"))
        reference = collection(CONFIGS, optimizers="adagrad", reference=True, seed=1)
        bags = [random_bags(Random(one), ROWS, 3).kjt() for one in range(2)]
        model(bags[dist.get_rank()])["tag"].sum().backward()
        (torch.stack([reference(one)["tag"].sum() for one in bags]).sum() / 2).backward()
        assert_weights_equal(model.module, reference, "only one feature is in the loss")

    ranks(2, rank_main)


# ------------------------------------------------------------------------------------------------------------ tables


@pytest.mark.some(1)
@pytest.mark.parametrize("optimizer", ["none", "adagrad"])
def test_frozen_tables_stay_as_they_are(optimizer: str) -> None:
    """A parameter without requires_grad keeps it, on every cut, and so does a model of such tables only."""

    def rank_main(frozen: Sequence[str]) -> None:
        for cut in sorted(CUTS):
            plan = plan_of(2, cut, cut, cut)
            module = collection(CONFIGS, optimizers=optimizer, seed=1)
            for name in frozen:
                module.embedding_bags[name].weight.requires_grad_(False)
            model = shard(module, plan)
            reference = collection(CONFIGS, seed=1)
            head = nn.Linear(32, 1)
            dense = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.1)
            for step in range(2):
                features = random_bags(Random(step), ROWS, 3).kjt()
                head(model(features).values()).sum().backward()
                dense.step()
            assert isinstance(model.module, ShardedEmbeddingBagCollection)
            for name, table in model.module.tables().items():
                for place, parameter in table.locals.items():
                    assert parameter.requires_grad == (name not in frozen), f"{cut}: {place or name}"
                    unmoved = torch.equal(parameter, local_part(reference.embedding_bags[name].weight, place))
                    assert unmoved or name not in frozen, f"{cut}: {place or name} moved"

    ranks(2, rank_main, ["tags"])
    ranks(2, rank_main, [one.name for one in CONFIGS])


def test_a_rank_with_frozen_tables_only_takes_part_in_the_others_backward() -> None:
    def rank_main() -> None:
        sizes = table_sizes(CONFIGS)
        tables = tuple(cuts.table_wise(name, *size, rank=int(name == "users")) for name, size in sizes.items())
        plan = ShardingPlan(topology=Topology(ranks_per_host=2), tables=tables)

        def build() -> EmbeddingBagCollection:
            module = collection(CONFIGS, seed=1)
            for name in ("movies", "tags"):
                module.embedding_bags[name].weight.requires_grad_(False)
            return module

        model, reference = shard(build(), plan), build()
        bags = [random_bags(Random(one), ROWS, 3).kjt() for one in range(2)]
        model(bags[dist.get_rank()]).values().sum().backward()
        (torch.stack([reference(one).values().sum() for one in bags]).sum() / 2).backward()
        parameters = list(model.parameters())
        if dist.get_rank() == 0:
            assert [one.grad for one in parameters] == [None, None]
        else:
            (parameter,) = parameters
            assert parameter.grad is not None
            assert torch.allclose(parameter.grad, reference.embedding_bags["users"].weight.grad)

    ranks(2, rank_main, timeout=20.0)


def test_ids_on_block_boundaries() -> None:
    def rank_main() -> None:
        configs = [config("t", 10, 4, "a")]
        plan = ShardingPlan(
            topology=Topology(ranks_per_host=2),
            tables=(cuts.row_wise("t", 10, 4, ranks=[1, 0, 1], boundaries=[0, 1, 9, 10]),),
        )
        model = shard(collection(configs, seed=1), plan)
        features = KeyedJaggedTensor(keys=["a"], values=torch.arange(10), lengths=torch.ones(10, dtype=torch.int64))
        expected = collection(configs, seed=1)
        assert torch.allclose(model(features).values(), expected.embedding_bags["t"].weight)

    ranks(2, rank_main)


@torch.no_grad()
def small_whole_numbers(weight: Tensor) -> Tensor:
    """Numbers whose sums float32 holds exactly."""
    return weight.random_(-3, 4)


def test_large_bags() -> None:
    """More ids of one sample than any buffer is likely to expect."""

    def rank_main() -> None:
        configs = [replace(one, init_fn=small_whole_numbers) for one in CONFIGS]
        model = shard(collection(configs, seed=1), plan_of(2, *MIXED))
        count = 20_000 * (1 - dist.get_rank())
        ids = torch.arange(3 * count) % 6
        lengths = torch.tensor([count, 0] * 3)
        features = KeyedJaggedTensor(keys=["tag", "liked", "watched"], values=ids, lengths=lengths)
        assert torch.allclose(model(features).values(), collection(configs, seed=1)(features).values())

    ranks(2, rank_main)


def bag_collection(**settings: Any) -> EmbeddingBagCollection:
    return EmbeddingBagCollection(tables=[config("t", 10, 8, "a", **settings)])


@pytest.mark.parametrize(
    ("module", "error", "words"),
    [
        (lambda: bag_collection(data_type=DataType.INT8), ConfigError, r"table 't' is INT8\. .* FP32, FP16, BF16"),
        (
            lambda: EmbeddingBagCollection(tables=[config("t", 12, 8, "a")]),
            PlanError,
            r"table 't' is \(12, 8\) in the model and \(10, 8\) in the plan. Plan the model again",
        ),
        (
            lambda: EmbeddingBagCollection(tables=[config("s", 10, 8, "a")]),
            PlanError,
            r"the plan has no table 's'",
        ),
    ],
)
def test_collections_that_cannot_be_sharded(
    module: Callable[[], EmbeddingBagCollection], error: type[Exception], words: str
) -> None:
    plan = ShardingPlan(topology=Topology(), tables=(cuts.table_wise("t", 10, 8, rank=0),))
    with pytest.raises(error, match=words):
        ShardedEmbeddingBagCollection(module(), plan)


def test_alone_without_a_model() -> None:
    """The collection itself can be built and used, without ``shard`` and its wrapper."""

    def rank_main() -> None:
        plan = plan_of(2, "row_wise", "grid", "column_wise")
        module = ShardedEmbeddingBagCollection(collection(CONFIGS, optimizers="sgd", seed=1), plan)
        features = random_bags(Random(dist.get_rank()), ROWS, 3).kjt()
        values = module(features).values()
        assert torch.allclose(values, collection(CONFIGS, seed=1)(features).values())
        values.sum().backward()

    ranks(2, rank_main)


def test_alone_with_replicated_tables_it_cannot_train_unnoticed() -> None:
    def rank_main() -> None:
        module = ShardedEmbeddingBagCollection(collection(CONFIGS, seed=1), plan_of(2, *MIXED))
        features = random_bags(Random(dist.get_rank()), ROWS, 3).kjt()
        with torch.no_grad():
            expected = collection(CONFIGS, seed=1)(features).values()
            assert torch.allclose(module(features).values(), expected)
        with pytest.raises(ConfigError, match=r"replicated tables 'tags' need their gradients averaged"):
            module(features).values().sum().backward()

    ranks(2, rank_main)


def test_random_plans_of_shared_features_without_gradient() -> None:
    def rank_main() -> None:
        for seed in range(8):
            rng = Random(seed)
            configs = random_configs(rng, most=6)
            plan = random_plan(rng, table_sizes(configs), topologies_of(4)[rng.randrange(3)])
            model = shard(collection(configs, seed=seed), plan)
            features = random_bags(Random(seed + dist.get_rank()), feature_rows(configs), 3).kjt()
            with torch.no_grad():
                assert torch.allclose(
                    model(features).values(), collection(configs, seed=seed)(features).values(), atol=1e-6
                ), seed

    ranks(4, rank_main)


def test_constants_are_kept_for_few_orders_of_keys() -> None:
    model = sharded_both(POLICIES)
    for number in range(3 * KEY_ORDERS):
        keys = ["a", "b", "c", f"unused {number}"]
        model(KeyedJaggedTensor(keys=keys, values=torch.tensor([1, 99, -1]), lengths=torch.tensor([1, 1, 1, 0])))
    assert model.bad_ids() == {f"{path}.{key}": 3 * KEY_ORDERS for path in ("bags", "rows") for key in "bc"}
    sizes = [
        kept.cache_info().currsize
        for collection in model.modules()
        if isinstance(collection, ShardedCollection)
        for owner in (collection.step_plan.output, collection.input, collection.input.cutter)
        for kept in vars(owner).values()
        if hasattr(kept, "cache_info")
    ]
    used = [size for size in sizes if size]
    assert len(used) == 8
    assert all(size <= KEY_ORDERS for size in used)

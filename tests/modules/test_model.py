"""Whole models: the dense part learns as the unsharded model does on the global batch, and names stay as they were."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torchrec.models.dlrm import DLRM
from torchrec.modules.embedding_configs import EmbeddingBagConfig

from shardrec.errors import ConfigError, PlanError
from shardrec.layout import ShardingPlan, Topology
from shardrec.modules import ShardedEmbeddingBagCollection, ShardedModel, shard
from tests.batches import joined, random_bags
from tests.models import (
    ClickModel,
    apply_optimizer_in_backward,
    click_model,
    collection,
    feature_rows,
    random_configs,
    table_sizes,
)
from tests.modules.parity import local_part
from tests.plans import CUTS, cut_plan, random_plan, topologies_of
from tests.ranks import raises_on_all, ranks

CONFIGS = [
    EmbeddingBagConfig(name="movies", num_embeddings=10, embedding_dim=8, feature_names=["watched", "liked"]),
    EmbeddingBagConfig(name="tags", num_embeddings=6, embedding_dim=4, feature_names=["tag"]),
    EmbeddingBagConfig(name="users", num_embeddings=9, embedding_dim=12, feature_names=["liked"]),
]
ROWS = feature_rows(CONFIGS)
SIZES = table_sizes(CONFIGS, "sparse")


def mixed_plan(world_size: int, path: str = "sparse") -> ShardingPlan:
    """Row-wise, data-parallel and column-wise."""
    rng, topology = Random(1), Topology(ranks_per_host=world_size)
    cuts = ("row_wise", "data_parallel", "column_wise")
    tables = [
        CUTS[cut](rng, name, rows, dim, topology)
        for cut, (name, (rows, dim)) in zip(cuts, table_sizes(CONFIGS, path).items(), strict=True)
    ]
    return ShardingPlan(topology=topology, tables=tuple(tables))


def assert_tables_equal(model: nn.Module, reference: nn.Module, where: str, atol: float = 1e-5) -> None:
    """This rank's shards of every collection of a model."""
    wholes = dict(reference.named_modules())
    for path, module in model.named_modules():
        if isinstance(module, ShardedEmbeddingBagCollection):
            for name, table in module.tables().items():
                whole = wholes[path].embedding_bags[name].weight
                for place, parameter in table.locals.items():
                    part = local_part(whole, place)
                    difference = (parameter - part).abs().max().item()
                    assert torch.allclose(parameter, part, atol=atol), f"{where}: {place or name} by {difference}"


def assert_dense_equal(model: nn.Module, reference: nn.Module, where: str, atol: float = 1e-5) -> None:
    mine = dict(model.named_parameters())
    for name, parameter in reference.named_parameters():
        if "embedding_bags" not in name:
            assert torch.allclose(mine[name], parameter, atol=atol), f"{where}: {name}"


def dense_parameters(model: nn.Module) -> list[nn.Parameter]:
    return [one for name, one in model.named_parameters() if "embedding_bags" not in name]


# ---------------------------------------------------------------------------------------------------------- training


def train_beside(model: ShardedModel, reference: nn.Module, configs: list[EmbeddingBagConfig], where: str) -> None:
    """Four steps of binary cross-entropy: local batches sharded, the global batch unsharded."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    optimizers = [torch.optim.Adam(dense_parameters(one), lr=0.05) for one in (model, reference)]
    generator, rng = torch.Generator().manual_seed(5), Random(5)
    size = 3
    mine = slice(rank * size, (rank + 1) * size)
    for step in range(4):
        bags = [random_bags(rng, feature_rows(configs), size, shuffled=False) for _ in range(world_size)]
        dense = torch.randn(size * world_size, 3, generator=generator)
        labels = torch.randint(0, 2, (size * world_size,), generator=generator).float()
        logits = model(dense[mine], bags[rank].kjt())
        expected = reference(dense, joined(bags).kjt())
        assert torch.allclose(logits, expected[mine], atol=1e-5), f"{where}: logits in step {step}"
        loss = nn.functional.binary_cross_entropy_with_logits(logits, labels[mine])
        whole = nn.functional.binary_cross_entropy_with_logits(expected, labels)
        loss.backward()
        whole.backward()
        dist.all_reduce(total := loss.detach().clone())
        assert torch.allclose(total / world_size, whole, atol=1e-5), f"{where}: loss in step {step}"
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_tables_equal(model.module, reference, where)
    assert_dense_equal(model, reference, where)


@pytest.mark.parametrize("dense_first", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_trains_as_the_unsharded_model_does_on_the_global_batch(world_size: int, dense_first: bool) -> None:
    def rank_main() -> None:
        for seed, cut in enumerate(["mixed", *sorted(CUTS)]):
            rng = Random(seed)
            configs = random_configs(rng)
            tables, topology = table_sizes(configs, "sparse"), rng.choice(topologies_of(world_size))
            plan = random_plan(rng, tables, topology) if cut == "mixed" else cut_plan(cut, rng, tables, topology)
            optimizer = rng.choice(["sgd", "rowwise_adagrad"])
            model = shard(click_model(configs, optimizer=optimizer, dense_first=dense_first), plan)
            train_beside(model, click_model(configs, optimizer=optimizer), configs, f"{cut} {optimizer}")

    ranks(world_size, rank_main)


def test_torchrec_dlrm() -> None:
    def rank_main() -> None:
        def build() -> DLRM:
            configs = [
                EmbeddingBagConfig(name=f"t{n}", num_embeddings=7 + n, embedding_dim=8, feature_names=[f"f{n}"])
                for n in range(4)
            ]
            torch.manual_seed(3)
            sparse = collection(configs, optimizers="adagrad", seed=3)
            return DLRM(sparse, dense_in_features=3, dense_arch_layer_sizes=[8, 8], over_arch_layer_sizes=[8, 1])

        class Squeezed(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.dlrm = build()

            def forward(self, dense: Tensor, features: Any) -> Tensor:
                logits: Tensor = self.dlrm(dense, features).squeeze(1)
                return logits

        torch.manual_seed(3)
        reference = Squeezed()
        torch.manual_seed(3)
        other = Squeezed()
        configs = reference.dlrm.sparse_arch.embedding_bag_collection.embedding_bag_configs()
        rng = Random(0)
        path = "dlrm.sparse_arch.embedding_bag_collection"
        plan = random_plan(rng, table_sizes(configs, path), topologies_of(2)[0])
        train_beside(shard(other, plan), reference, configs, "DLRM")

    ranks(2, rank_main)


def test_buffers_of_the_dense_part() -> None:
    """Batch norm keeps rank 0's running statistics, as DistributedDataParallel does."""

    def rank_main() -> None:
        model = click_model(CONFIGS)
        model.norm = nn.BatchNorm1d(8)  # type: ignore[assignment]
        sharded = shard(model, mixed_plan(2))
        for step in range(3):
            bags = random_bags(Random(step + dist.get_rank()), ROWS, 4)
            sharded(torch.randn(4, 3), bags.kjt()).sum().backward()
        sharded.eval()
        sharded(torch.randn(4, 3), bags.kjt())
        assert [name for name, _ in sharded.named_buffers()] == [
            "norm.running_mean",
            "norm.running_var",
            "norm.num_batches_tracked",
        ]
        assert int(sharded.norm.num_batches_tracked) == 3

    ranks(2, rank_main)


def test_optimizer_in_backward_of_the_dense_part() -> None:
    """``apply_optimizer_in_backward`` on every parameter.

    On several ranks DistributedDataParallel steps the dense ones itself, which torch can do on an accelerator only.
    """

    def rank_main() -> None:
        world_size, rank = dist.get_world_size(), dist.get_rank()

        def build() -> ClickModel:
            model = click_model(CONFIGS, optimizer="none")
            apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
            return model

        model, reference = shard(build(), mixed_plan(world_size)), build()
        rng = Random(0)
        for _ in range(3):
            bags = [random_bags(rng, ROWS, 2, shuffled=False) for _ in range(world_size)]
            dense = torch.randn(2 * world_size, 3, generator=torch.Generator().manual_seed(1))
            model(dense[2 * rank : 2 * rank + 2], bags[rank].kjt()).mean().backward()
            reference(dense, joined(bags).kjt()).mean().backward()
        assert_tables_equal(model.module, reference, "tables")
        assert_dense_equal(model, reference, "dense")

    ranks(1, rank_main)


def accumulate(backward_inside: bool) -> None:
    """Two micro-batches without reduction, then one with; tables cut are updated in each backward."""
    world_size, rank = dist.get_world_size(), dist.get_rank()
    plan = mixed_plan(world_size)
    model, reference = shard(click_model(CONFIGS), plan), click_model(CONFIGS, optimizer="none")
    replicated = reference.sparse.embedding_bags["tags"].weight  # type: ignore[union-attr,index]
    cut = [one for name, one in reference.sparse.named_parameters() if "tags" not in name]
    apply_optimizer_in_backward(torch.optim.SGD, cut, {"lr": 0.5})
    dense = torch.optim.SGD(dense_parameters(model), lr=0.1)
    reference_dense = torch.optim.SGD(
        [{"params": dense_parameters(reference), "lr": 0.1}, {"params": [replicated], "lr": 0.5}]
    )
    rng, generator = Random(0), torch.Generator().manual_seed(1)
    for _ in range(2):
        for micro in range(3):
            bags = [random_bags(rng, ROWS, 2, shuffled=False) for _ in range(world_size)]
            columns = torch.randn(2 * world_size, 3, generator=generator)
            mine = columns[2 * rank : 2 * rank + 2], bags[rank].kjt()
            if micro == 2:
                model(*mine).mean().backward()
            elif backward_inside:
                with model.no_sync():
                    model(*mine).mean().backward()
            else:
                with model.no_sync():
                    loss = model(*mine).mean()
                loss.backward()
            reference(columns, joined(bags).kjt()).mean().backward()
            if micro == 2:
                # The replicated table has its fused update in this backward already.
                for optimizer in (dense, reference_dense):
                    optimizer.step()
                    optimizer.zero_grad()
                assert_dense_equal(model, reference, "after the step")
            assert_tables_equal(model.module, reference, f"micro-batch {micro}")


@pytest.mark.parametrize("backward_inside", [True, False])
@pytest.mark.parametrize("world_size", [1, 2])
def test_gradient_accumulation(world_size: int, backward_inside: bool) -> None:
    """``no_sync`` counts for the backward of a forward made inside it, as with DistributedDataParallel."""

    def rank_main() -> None:
        accumulate(backward_inside)

    ranks(world_size, rank_main)


class Failing(torch.autograd.Function):
    """Raises in backward."""

    @staticmethod
    def forward(ctx: Any, one: Tensor) -> Tensor:
        return one.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        raise ValueError("no gradient today")


def test_replicated_tables_go_on_after_a_backward_that_raised() -> None:
    model = shard(
        collection(CONFIGS, optimizers="sgd", seed=1),
        cut_plan("data_parallel", Random(0), table_sizes(CONFIGS), Topology()),
    )
    reference = collection(CONFIGS, optimizers="sgd", seed=1)
    features = random_bags(Random(0), ROWS, 3).kjt()
    # Made first, so that its backward comes last.
    failing = Failing.apply(torch.ones((), requires_grad=True))  # type: ignore[no-untyped-call]
    with pytest.raises(ValueError, match="no gradient today"):
        (model(features).values().sum() * 0 + failing).backward()
    for module in (model, reference):
        module(features).values().sum().backward()
    assert_tables_equal(model.module, reference, "after a failed backward")


# -------------------------------------------------------------------------------------------------------- containers


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


def test_attributes_are_the_models_own() -> None:
    model = shard(click_model(CONFIGS, dense_first=True), mixed_plan(1))
    assert model.dense_first is True
    assert model.top is model.module.top
    model.eval()
    assert not model.bottom.training
    with pytest.raises(AttributeError, match="nonsense"):
        _ = model.nonsense


# --------------------------------------------------------------------------------------------------- names and states


def test_names_are_those_of_the_unsharded_model() -> None:
    def rank_main() -> tuple[list[str], list[str]]:
        model = shard(click_model(CONFIGS), mixed_plan(2))
        assert list(model.state_dict()) == list(click_model(CONFIGS).state_dict())
        named = dict(model.named_parameters())
        assert len(named) == len(list(model.parameters()))
        assert all(one is two for one, two in zip(named.values(), model.parameters(), strict=True))
        own = [name for name, one in named.items() if hasattr(one, "_in_backward_optimizers")]
        return list(named), own

    dense = [name for name, _ in click_model(CONFIGS).named_parameters() if "embedding_bags" not in name]
    tables = [f"sparse.embedding_bags.{name}.weight" for name in ("movies", "tags", "users")]
    for names, own in ranks(2, rank_main):
        assert names == [*tables, *dense]
        assert {tables[0], tables[2]} <= set(own)
        assert not set(own) & set(dense)


def test_several_shards_of_a_table_on_a_rank_have_names_of_their_own() -> None:
    sizes = table_sizes(CONFIGS, "sparse")
    plan = cut_plan("grid", Random(0), sizes, Topology(hosts=2, ranks_per_host=1))
    one_rank = ShardingPlan.from_json(
        {
            **plan.to_json(),
            "topology": {"hosts": 1, "ranks_per_host": 1},
            "tables": [
                {**table, "shards": [[*shard_[:4], 0] for shard_ in table["shards"]]}
                for table in plan.to_json()["tables"]
            ],
        }
    )
    model = shard(click_model(CONFIGS), one_rank)
    names = [name for name, _ in model.named_parameters() if "movies" in name]
    assert names == ["sparse.embedding_bags.movies.weight_r0_c0", "sparse.embedding_bags.movies.weight_r0_c4"]
    whole = model.state_dict()["sparse.embedding_bags.movies.weight"]
    assert torch.equal(whole, click_model(CONFIGS).state_dict()["sparse.embedding_bags.movies.weight"])


@pytest.mark.parametrize("world_size", [1, 2])
def test_state_dict_holds_this_ranks_part_of_each_table(world_size: int) -> None:
    def rank_main() -> None:
        reference = click_model(CONFIGS, seed=4).state_dict()
        for cut in sorted(CUTS):
            plan = cut_plan(cut, Random(cut), SIZES, topologies_of(world_size)[-1])
            state = shard(click_model(CONFIGS, seed=4), plan).state_dict()
            for name, value in state.items():
                if isinstance(value, ShardedTensor):
                    assert tuple(value.size()) == tuple(reference[name].shape)
                    for part in value.local_shards():
                        top, left = part.metadata.shard_offsets
                        rows, cols = part.metadata.shard_sizes
                        assert torch.equal(part.tensor, reference[name][top : top + rows, left : left + cols])
                else:
                    assert torch.equal(value, reference[name]), f"{cut}: {name}"

    ranks(world_size, rank_main)


@pytest.mark.parametrize("world_size", [1, 2])
def test_loads_the_unsharded_models_state_and_its_own(world_size: int) -> None:
    def rank_main() -> None:
        for cut in sorted(CUTS):
            plan = cut_plan(cut, Random(cut), SIZES, topologies_of(world_size)[-1])
            other = click_model(CONFIGS, seed=9)
            model = shard(click_model(CONFIGS, seed=4), plan)
            result = model.load_state_dict(other.state_dict())
            assert (result.missing_keys, result.unexpected_keys) == ([], [])
            assert_tables_equal(model.module, other, cut, atol=0.0)
            assert_dense_equal(model, other, cut, atol=0.0)
            again = shard(click_model(CONFIGS, seed=5), plan)
            again.load_state_dict(model.state_dict())
            assert_tables_equal(again.module, other, cut, atol=0.0)
            features = random_bags(Random(dist.get_rank()), ROWS, 3).kjt()
            dense = torch.randn(3, 3)
            assert torch.allclose(again(dense, features), other(dense, features), atol=1e-6), "the kernels see it too"

    ranks(world_size, rank_main)


def test_states_that_do_not_fit() -> None:
    model = shard(click_model(CONFIGS, seed=4), mixed_plan(1))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = click_model(CONFIGS, seed=9).state_dict()
    name = "sparse.embedding_bags.movies.weight"
    for shape in ((11, 8), (10, 4), (10,), (8, 10)):
        with pytest.raises(RuntimeError, match=rf"{name}.*shape \({shape[0]}.*the table \(10, 8\)"):
            model.load_state_dict({**state, name: torch.zeros(shape)})
        model.load_state_dict(before)
    with pytest.raises(RuntimeError, match=rf"Missing key.*{name}"):
        model.load_state_dict({key: value for key, value in state.items() if key != name})
    with pytest.raises(RuntimeError, match=r"Unexpected key.*nonsense"):
        model.load_state_dict({**state, "nonsense": torch.zeros(1)})


def test_a_state_cut_in_another_way() -> None:
    def rank_main() -> None:
        one, other = (
            cut_plan(cut, Random(0), SIZES, Topology(ranks_per_host=2)) for cut in ("row_wise", "column_wise")
        )
        state = shard(click_model(CONFIGS, seed=4), one).state_dict()
        shard(click_model(CONFIGS, seed=5), other).load_state_dict(state)

    raises_on_all(2, RuntimeError, r"sharded in another way than this plan.*load_checkpoint", rank_main)


# -------------------------------------------------------------------------------------------------------------- guards


def test_a_sharded_model_cannot_be_moved_or_cast() -> None:
    model = shard(click_model(CONFIGS), mixed_plan(1))
    for same in (model.cpu, lambda: model.to("cpu"), lambda: model.to(torch.float32), model.float):
        assert same() is model
    moves: list[Callable[[], Any]] = [
        model.double,
        model.half,
        lambda: model.to(torch.bfloat16),
        lambda: model.to("meta"),
        lambda: model.to_empty(device="meta"),
    ]
    for move in moves:
        with pytest.raises(ConfigError, match=r"cannot be moved or cast .*pass device= to shardrec\.shard, and cast"):
            move()
        assert {(one.dtype, one.device.type) for one in model.parameters()} == {(torch.float32, "cpu")}
    assert model(torch.randn(2, 3), random_bags(Random(0), ROWS, 2).kjt()).shape == (2,)


def test_a_dense_part_on_meta() -> None:
    model = click_model(CONFIGS)
    model.top = nn.Linear(40, 1, device="meta")
    with pytest.raises(ConfigError, match=r"parameters 'top.weight', 'top.bias' are on meta; only embedding"):
        shard(model, mixed_plan(1))


@pytest.mark.parametrize("odd", [0, 1])
def test_plans_that_differ_between_ranks(odd: int) -> None:
    def rank_main() -> None:
        cut = "column_wise" if dist.get_rank() == odd else "row_wise"
        shard(click_model(CONFIGS), cut_plan(cut, Random(0), SIZES, Topology(ranks_per_host=2)))

    raises_on_all(2, PlanError, r"the plan of rank\(s\) 1 differs from rank 0's; make the plan on one rank", rank_main)


@pytest.mark.parametrize("wrong", [1, 3, 4])
def test_plans_for_another_number_of_ranks(wrong: int) -> None:
    def rank_main() -> None:
        shard(click_model(CONFIGS), mixed_plan(wrong))

    words = rf"the plan is for {wrong} ranks? and the process group has 2; plan for 2, or start {wrong} ranks?"
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

"""A sharded model learns as the unsharded one does on the global batch, and passes for it otherwise."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from shardrec import export, serve
from shardrec.checkpoint import Checkpoints, load_checkpoint, save_checkpoint
from shardrec.errors import ConfigError
from shardrec.layout import Topology
from shardrec.modules import ShardedModel, shard
from shardrec.replicas import Replicas
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
from tests.modules.clicks import (
    CONFIGS,
    ROWS,
    assert_dense_equal,
    assert_tables_equal,
    dense_parameters,
    mixed_plan,
)
from tests.plans import CUTS, cut_plan, random_plan, topologies_of
from tests.ranks import ranks


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


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("world_size", "dense_first"),
    [
        pytest.param(size, first, marks=() if size > 1 and first == (size == 2) else pytest.mark.slow)
        for size in (1, 2, 4)
        for first in (False, True)
    ],
)
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
        (model(features).values().sum() + failing).backward()
    for module in (model, reference):
        module(features).values().sum().backward()
    assert_tables_equal(model.module, reference, "after a failed backward")


class _Pooled(nn.Module):
    def __init__(self, sparse: nn.Module) -> None:
        super().__init__()
        self.sparse = sparse

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        pooled: Tensor = self.sparse(features).values()
        return pooled.sum()


def test_models_that_are_let_go_of_are_freed() -> None:
    """torch keeps parameters alive that ``apply_optimizer_in_backward`` was given, but not by them the model."""

    def rank_main() -> None:
        rng = Random(0)
        configs = random_configs(rng)
        for cut in CUTS:
            plan = cut_plan(cut, rng, table_sizes(configs, "sparse"), Topology(ranks_per_host=2))
            sharded = shard(_Pooled(collection(configs, optimizers="adagrad")), plan, transport="group")
            sharded(random_bags(rng, feature_rows(configs), 3).kjt()).backward()
            context = weakref.ref(sharded.context)
            del sharded
            gc.collect()
            assert context() is None, cut

    ranks(2, rank_main)


def test_attributes_are_the_models_own() -> None:
    model = shard(click_model(CONFIGS, dense_first=True), mixed_plan(1))
    assert model.dense_first is True
    assert model.top is model.module.top
    model.eval()
    assert not model.bottom.training
    with pytest.raises(AttributeError, match="nonsense"):
        _ = model.nonsense


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
        with pytest.raises(ConfigError, match=r"cannot be moved or cast .*Pass device= to shardrec\.shard, and cast"):
            move()
        assert {(one.dtype, one.device.type) for one in model.parameters()} == {(torch.float32, "cpu")}
    assert model(torch.randn(2, 3), random_bags(Random(0), ROWS, 2).kjt()).shape == (2,)


def copied(optimizer: str) -> None:
    """A copy learns from the next step on as the model does, by itself; an average is that of the weights."""
    world_size, rank = dist.get_world_size(), dist.get_rank()

    def made() -> ShardedModel:
        torch.manual_seed(0)
        return shard(click_model(CONFIGS, optimizer=optimizer), mixed_plan(world_size))

    model, reference = made(), made()

    def step(models: list[nn.Module], seed: int) -> None:
        bags = [random_bags(Random(seed * world_size + other), ROWS, 3) for other in range(world_size)]
        for one in models:
            loss = one(torch.linspace(-1, 1, 9).view(3, 3), bags[rank].kjt()).square().sum()
            loss.backward()
            with torch.no_grad():
                for parameter in one.parameters():
                    if parameter.grad is not None:
                        parameter -= 0.05 * parameter.grad
                        parameter.grad = None

    step([model, reference], 0)
    other = copy.deepcopy(model)
    assert other.plan is model.plan
    assert list(other.state_dict()) == list(model.state_dict())
    step([other, reference], 1)
    for mine, theirs in zip(other.parameters(), reference.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.75))
    average.update_parameters(model)
    average.update_parameters(other)
    for mean, one, two in zip(average.parameters(), model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mean, 0.75 * one + 0.25 * two)
    found = average(torch.ones(2, 3), random_bags(Random(9), ROWS, 2).kjt())
    assert found.shape == (2,)
    assert torch.isfinite(found).all()


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_sharded_model_can_be_copied_and_averaged(world_size: int) -> None:
    for optimizer in ("adagrad", "adam", "none"):
        ranks(world_size, copied, optimizer)


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_copy_has_settings_frozen_tables_and_hooks(world_size: int) -> None:
    def rank_main() -> None:
        model = shard(click_model(CONFIGS, optimizer="adam"), mixed_plan(dist.get_world_size()))
        plain = shard(click_model(CONFIGS, optimizer="none"), mixed_plan(dist.get_world_size()))
        torch.optim.lr_scheduler.ExponentialLR(model.fused_optimizer, 0.5).step()
        seen = list[nn.Module]()
        model.register_forward_hook(lambda _, args, output: output * 0)
        model.module.sparse.register_forward_pre_hook(lambda module, features: seen.append(module))
        for parameter in plain.module.sparse.tables()["users"].parameters():
            parameter.requires_grad_(False)
        other = copy.deepcopy(model)
        assert [group["lr"] for group in other.fused_optimizer.param_groups] == [0.05]
        assert "initial_lr" in other.fused_optimizer.param_groups[0]
        found = other(torch.ones(2, 3), random_bags(Random(9), ROWS, 2).kjt())
        assert not found.any()
        assert seen == [other.module.sparse]
        frozen = [not parameter.requires_grad for parameter in plain.parameters()]
        assert [not parameter.requires_grad for parameter in copy.deepcopy(plain).parameters()] == frozen
        assert dist.get_world_size() > 1 or any(frozen)

    ranks(world_size, rank_main)


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_copy_trains_with_its_own_optimizers_in_backward(world_size: int) -> None:
    """Of tables and of the dense part; the model that was copied does not change."""

    def rank_main() -> None:
        unsharded = click_model(CONFIGS, optimizer="adam")
        for part in (unsharded.bottom, unsharded.top):
            apply_optimizer_in_backward(torch.optim.Adam, part.parameters(), {"lr": 0.1})
        model = shard(unsharded, mixed_plan(dist.get_world_size()))
        features = random_bags(Random(dist.get_rank()), ROWS, 3).kjt()

        def step(one: ShardedModel) -> list[Tensor]:
            one(torch.ones(3, 3), features).square().sum().backward()
            return [parameter.detach().clone() for parameter in one.parameters()]

        before = step(model)
        other = copy.deepcopy(model)
        of_copy = step(other)
        assert all(map(torch.equal, before, model.parameters()))
        assert all(map(torch.equal, step(model), of_copy))

    ranks(world_size, rank_main)


def test_a_copy_has_the_averages_of_rows() -> None:
    model = shard(click_model(CONFIGS, optimizer="adagrad"), mixed_plan(1), update="step")
    features = random_bags(Random(2), ROWS, 3).kjt()

    def step_and_average(one: ShardedModel) -> list[Tensor]:
        one(torch.ones(3, 3), features).sum().backward()
        one.fused_optimizer.step()
        kept = [rows for collection in one.sharded_collections for rows in collection.keep_averages(0.5)]
        return [average for rows in kept for _, average in rows.averages()]

    step_and_average(model)
    step_and_average(model)
    other = copy.deepcopy(model)
    for mine, theirs in zip(step_and_average(other), step_and_average(model), strict=True):
        assert torch.equal(mine, theirs)


def test_modes_of_modules_are_kept() -> None:
    """A frozen batch norm, and a frozen collection, stay so in the sharded model and in its copy."""
    unsharded = click_model(CONFIGS)
    for module in list(unsharded.children())[::2]:
        module.eval()
    modes = [module.training for module in unsharded.children()]
    assert True in modes
    assert False in modes
    model = shard(unsharded, mixed_plan(1))
    assert [module.training for module in model.module.children()] == modes
    assert [module.training for module in copy.deepcopy(model).module.children()] == modes


def test_a_module_around_a_sharded_model_loads_its_own_state() -> None:
    averages = [torch.optim.swa_utils.AveragedModel(shard(click_model(CONFIGS), mixed_plan(1))) for _ in range(2)]
    with torch.no_grad():
        for parameter in averages[0].parameters():
            parameter += 1.0
    averages[1].load_state_dict(averages[0].state_dict())
    for loaded, saved in zip(averages[1].parameters(), averages[0].parameters(), strict=True):
        assert torch.equal(loaded, saved)
    with pytest.raises(RuntimeError, match="Unexpected key"):
        averages[1].load_state_dict({**averages[0].state_dict(), "module.other": torch.zeros(1)})


def test_no_sync_inside_of_no_sync() -> None:
    for replicas in (None, Replicas(1)):
        model = shard(click_model(CONFIGS), mixed_plan(1), replicas=replicas)
        with model.no_sync():
            with model.no_sync():
                pass
            assert model.context.gradients.accumulates
            assert replicas is None or not model._counts_steps
        assert not model.context.gradients.accumulates
        assert replicas is None or model._counts_steps


def test_what_cannot_be_copied() -> None:
    model = shard(click_model(CONFIGS), mixed_plan(1))
    with pytest.raises(ConfigError, match=r"cannot be copied by itself.*copy the model that shardrec\.shard returned"):
        copy.deepcopy(model.module.sparse)
    replicated = shard(click_model(CONFIGS), mixed_plan(1), replicas=Replicas(1))
    with pytest.raises(ConfigError, match=r"ReplicatedModel cannot be copied.*load this one's state_dict into it"):
        copy.deepcopy(replicated)


@pytest.mark.parametrize(
    "take",
    [
        lambda model, path: serve.quantize(model),
        lambda model, path: serve.package(model, path / "m.pt2", ()),
        lambda model, path: export(model, ()),
        lambda model, path: save_checkpoint(path / "saved", model),
        lambda model, path: load_checkpoint(path, model),
        lambda model, path: Checkpoints(path).save(1, model),
        lambda model, path: Checkpoints(path).load_last(model),
    ],
    ids=["quantize", "package", "export", "save_checkpoint", "load_checkpoint", "Checkpoints.save", "load_last"],
)
def test_a_wrapper_made_after_sharding_is_told_apart(take: Callable[[nn.Module, Path], Any], tmp_path: Path) -> None:
    """Where the sharded model itself is wanted, such as that of an average: its place in the wrapper is named."""
    average = torch.optim.swa_utils.AveragedModel(shard(click_model(CONFIGS), mixed_plan(1))).eval()
    words = r"the sharded model itself, which AveragedModel holds as 'module': give it that one, or put the wrapper"
    with pytest.raises(ConfigError, match=words):
        take(average, tmp_path)
    with pytest.raises(ConfigError, match=r"not Linear: shard the model first"):
        take(nn.Linear(1, 1), tmp_path)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ConfigError, match=r"AveragedModel holds no .* to shard: if it is sharded already, use it"):
        shard(average)

"""The same training on CUDA with NCCL: one rank always, two where there are two devices."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import shardrec
from benchmarks.gpu.programs import is_wait
from shardrec.errors import InputError
from shardrec.layout import ShardingPlan, Topology
from shardrec.modules import ShardedModel, shard
from shardrec.pipeline import TrainPipeline
from shardrec.replicas import Replicas
from shardrec.trainer.data import ClickBatch
from tests.batches import Bags, joined, random_bags
from tests.cuda_ranks import DEVICES, WORLDS, cuda_ranks
from tests.models import OPTIMIZERS, click_model, collection, feature_rows, random_configs, table_sizes
from tests.modules.clicks import (
    CONFIGS,
    ROWS,
    assert_dense_equal,
    assert_tables_equal,
    dense_parameters,
    loss_fn,
    mixed_plan,
)
from tests.modules.replicated import Steps, copies_are_equal, replicated
from tests.modules.tables import local_part
from tests.plans import CUTS, cut_plan, random_plan

pytestmark = pytest.mark.skipif(DEVICES == 0, reason="needs a CUDA device, and this machine has none")

ATOL = 1e-4
"""A little looser than on the CPU: the kernels add rows up in an order that is not fixed."""


def check_parity(
    model: ShardedModel, reference: torch.nn.Module, rows: dict[str, int], rng: Random, where: str
) -> None:
    """Three steps on CUDA beside the unsharded collection on the CPU."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for step in range(3):
        bags = [random_bags(rng, rows, rng.randint(1, 4)) for _ in range(world_size)]
        start = sum(one.size for one in bags[:rank])
        values = model(on_device(bags[rank])).values()
        expected = reference(joined(bags).kjt()).values()
        mine = slice(start, start + bags[rank].size)
        assert values.is_cuda
        assert torch.allclose(values.cpu(), expected[mine], atol=ATOL), f"{where}: output of step {step}"
        gradient = torch.randn(expected.shape, generator=torch.Generator().manual_seed(step))
        (values * gradient[mine].cuda()).sum().backward()
        ((expected * gradient).sum() / world_size).backward()
    model.state_dict()  # brings rows that are newer in a cache to their tables
    for name, table in model.module.tables().items():  # type: ignore[operator]
        whole: Tensor = reference.embedding_bags[name].weight  # type: ignore[index,union-attr]
        for held, parameter in table.locals.items():
            assert torch.allclose(parameter.cpu(), local_part(whole, held), atol=ATOL), f"{where}: {held or name}"


def on_device(bags: Bags) -> Any:
    return bags.kjt().to(torch.device("cuda", torch.cuda.current_device()))


def train_every_cut(world_size: int) -> None:
    for cut in ["mixed", *sorted(CUTS)]:
        for optimizer in sorted(set(OPTIMIZERS) - {"none"}):
            rng = Random(f"{cut} {optimizer}")
            configs = random_configs(rng)
            tables, topology = table_sizes(configs), Topology(ranks_per_host=world_size)
            plan = random_plan(rng, tables, topology) if cut == "mixed" else cut_plan(cut, rng, tables, topology)
            model = shard(collection(configs, optimizers=optimizer), plan, device="cuda")
            reference = collection(configs, optimizers=optimizer, reference=True)
            check_parity(model, reference, feature_rows(configs), rng, f"{cut} {optimizer}")


def train_in_every_tier(world_size: int) -> None:
    for tier, load_factor in (("cached", 0.25), ("cached", 1.0), ("host", 0.0)):
        for optimizer in ("adam", "adagrad", "rowwise_adagrad", "sgd"):
            rng = Random(f"{tier} {optimizer}")
            configs = random_configs(rng)
            plan = cut_plan("row_wise", rng, table_sizes(configs), Topology(ranks_per_host=world_size))
            layouts = tuple(replace(one, tier=tier, load_factor=load_factor) for one in plan.tables)
            model = shard(collection(configs, optimizers=optimizer), replace(plan, tables=layouts), device="cuda")
            reference = collection(configs, optimizers=optimizer, reference=True)
            check_parity(model, reference, feature_rows(configs), rng, f"{tier} {load_factor} {optimizer}")


def refuse_bad_ids(world_size: int) -> None:
    rng = Random(3)
    configs = random_configs(rng)
    rows = feature_rows(configs)
    plan = random_plan(rng, table_sizes(configs), Topology(ranks_per_host=world_size))
    model = shard(collection(configs, optimizers="sgd", seed=1), plan, device="cuda")
    feature = sorted(rows)[0]
    for bad in (-1, rows[feature]):
        good = random_bags(rng, rows, 2)
        spoiled = Bags(keys=good.keys, size=2, ids={**good.ids, feature: [[0], [bad]]})
        features = on_device(spoiled if dist.get_rank() == world_size - 1 else good)
        with pytest.raises(InputError, match=rf"rank {world_size - 1}: feature '{feature}' .* id {bad} in sample 1"):
            model(features).values().sum().backward()  # one rank may raise there
    check_parity(model, collection(configs, optimizers="sgd", seed=1), rows, rng, "after bad ids")
    with pytest.raises(
        InputError, match=r"the ids are on cpu and the tables of this module .* on cuda. Move the batch"
    ):
        model(good.kjt())


def train_a_whole_model(world_size: int) -> None:
    rng = Random(4)
    configs = random_configs(rng)
    plan: ShardingPlan = random_plan(rng, table_sizes(configs, "sparse"), Topology(ranks_per_host=world_size))
    model = shard(click_model(configs), plan, device="cuda")
    reference = click_model(configs)
    optimizers = [
        torch.optim.SGD([one for name, one in module.named_parameters() if "embedding_bags" not in name], lr=0.1)
        for module in (model, reference)
    ]
    rank = dist.get_rank()
    mine = slice(3 * rank, 3 * rank + 3)
    for _ in range(4):
        bags = [random_bags(rng, feature_rows(configs), 3, shuffled=False) for _ in range(world_size)]
        dense = torch.randn(3 * world_size, 3, generator=torch.Generator().manual_seed(1))
        logits, expected = model(dense[mine].cuda(), on_device(bags[rank])), reference(dense, joined(bags).kjt())
        assert torch.allclose(logits.cpu(), expected[mine], atol=ATOL)
        logits.square().mean().backward()
        expected.square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def count_waits(world_size: int) -> None:
    """From the second step on the host waits once, for the header in forward or for the batch's flag in backward."""
    rng = Random(5)
    configs = random_configs(rng)
    for cut in ("mixed", "row_wise", "data_parallel"):
        tables, topology = table_sizes(configs), Topology(ranks_per_host=world_size)
        plan = random_plan(rng, tables, topology) if cut == "mixed" else cut_plan(cut, rng, tables, topology)
        model = shard(collection(configs, optimizers="adagrad"), plan, device="cuda")
        batches = [on_device(random_bags(rng, feature_rows(configs), 4, shuffled=False)) for _ in range(3)]
        for step, features in enumerate(batches):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                torch.cuda.set_sync_debug_mode("warn")
                try:
                    values = model(features).values()
                    unread = len(model.context.headers.flags.unread)
                    torch.cuda.set_sync_debug_mode("error" if step else "default")
                    values.backward(torch.ones_like(values))
                finally:
                    torch.cuda.set_sync_debug_mode("default")
            waits = [f"{one.filename}:{one.lineno}" for one in caught if is_wait(str(one.message))]
            if step:
                assert len(waits) + unread == 1, f"{cut}: the host waits at {waits}"
                assert all("step/id_exchange.py" in wait for wait in waits)


def script_with_adam(world_size: int) -> None:
    """A live program counts the steps of Adam, too."""
    rng = Random(6)
    configs = random_configs(rng)
    plan = random_plan(rng, table_sizes(configs), Topology(ranks_per_host=world_size))
    eager, model = (shard(collection(configs, optimizers="adam"), plan, device="cuda") for _ in range(2))
    scripted = shardrec.script(model)
    for _ in range(4):
        features = on_device(random_bags(rng, feature_rows(configs), 4))
        expected, found = eager(features).values(), scripted(features).values()
        assert torch.allclose(found, expected, atol=ATOL)
        expected.square().sum().backward()
        found.square().sum().backward()


def draw_on_the_device(world_size: int) -> None:
    """Tables on meta get values of their own, the same for one seed, within the bounds of their init_fn."""
    rng = Random(7)
    for rows, dim in ((100, 8), (300_000, 64)):  # drawn whole on the CPU, and by blocks on the device
        configs = [EmbeddingBagConfig(name="t", num_embeddings=rows, embedding_dim=dim, feature_names=["f"])]
        plan = cut_plan("row_wise", rng, table_sizes(configs), Topology(ranks_per_host=world_size))
        drawn = []
        for seed in (1, 1, 2):
            module = collection(configs, device="meta")
            torch.manual_seed(seed)
            model = shard(module, plan, device="cuda")
            drawn.append([one.detach().clone() for one in model.parameters()])
        for first, again, other in zip(*drawn, strict=True):
            assert torch.equal(first, again)
            assert not torch.equal(first, other)
            assert 0.5 < float(first.abs().max()) * rows**0.5 <= 1.001
            assert first.unique().numel() > 0.8 * rows * min(dim, 8) // world_size


LARGE = [
    EmbeddingBagConfig(name="t0", num_embeddings=900, embedding_dim=8, feature_names=["a", "b"]),
    EmbeddingBagConfig(name="t1", num_embeddings=700, embedding_dim=16, feature_names=["b"]),
]
"""Of more rows than a cache has place for, whose sets are of 32 rows."""


def load_ahead(world_size: int) -> None:
    """A pipeline's losses and weights, with an evaluation between two steps, are those of a loop on the CPU."""
    plan = cut_plan("row_wise", Random(1), table_sizes(LARGE, "sparse"), Topology(ranks_per_host=world_size))
    cached = replace(plan, tables=tuple(replace(one, tier="cached", load_factor=0.2) for one in plan.tables))
    batches = []
    for step in range(12):
        rng, generator = Random(100 * step + dist.get_rank()), torch.Generator().manual_seed(step)
        dense, labels = torch.randn(40, 3, generator=generator), torch.rand(40, generator=generator).round()
        batches.append(ClickBatch(dense=dense, sparse=random_bags(rng, feature_rows(LARGE), 40).kjt(), labels=labels))

    def run(plan: ShardingPlan, device: str, depth: int) -> tuple[list[float], ShardedModel]:
        model = shard(click_model(LARGE, optimizer=optimizer), plan, device=device)
        adam = torch.optim.Adam(dense_parameters(model))
        pipeline, losses = TrainPipeline(model, adam, batches[:10], loss_fn=loss_fn, depth=depth), []
        for step, loss in enumerate(pipeline):
            losses.append(loss.item())
            if step in (3, 6):
                losses += [one.item() for one in pipeline.evaluate(batches[10:])]
        return losses, model

    for optimizer in ("sgd", "adagrad", "adam"):
        expected, here = run(plan, "cpu", 0)
        weights = here.state_dict()
        for depth in (0, 1, 2):
            losses, model = run(cached, "cuda", depth)
            assert losses == pytest.approx(expected, rel=1e-3), f"{optimizer}, depth {depth}"
            for name, value in model.state_dict().items():
                assert torch.allclose(local(value), local(weights[name]), atol=ATOL), f"{optimizer} {depth} {name}"
            for _, numbers in model.sharded_collections[0].shards.cache_statistics():
                # Each batch is loaded once, but for those whose ids an evaluation finds under way.
                assert numbers["misses"] > 64 and 14 <= numbers["calls"] <= 18, f"{optimizer} {depth} {numbers}"


def local(value: Any) -> Tensor:
    """This rank's part of an entry of a state_dict, on the CPU."""
    parts = [one.tensor.flatten() for one in value.local_shards()] if hasattr(value, "local_shards") else [value]
    return torch.cat([one.to_local() if hasattr(one, "to_local") else one for one in parts]).cpu()


def train_replicas(world_size: int) -> None:
    """With SGD the unsharded model's steps, after a sync the same bits, and a bad batch fails in all."""
    for optimizer in ("sgd", "adagrad", "adam"):
        options = Replicas(world_size, sync_every=1 if optimizer == "sgd" else 2)
        model = replicated(
            click_model(CONFIGS, optimizer=optimizer, seed=dist.get_rank()),
            mixed_plan(1),
            replicas=options,
            device="cuda",
        )
        reference, steps = click_model(CONFIGS, optimizer=optimizer), Steps(ROWS)
        pairs = [(one, torch.optim.Adam(dense_parameters(one), lr=0.05)) for one in (model, reference)]
        for step in range(4):
            bags, dense, labels = steps.draw()
            mine, device = steps.mine, model.context.device
            features = bags[dist.get_rank()].kjt().to(device)
            if step == 2 and world_size > 1:
                ids = features.values() if dist.get_rank() else features.values() * 0 + 10**6
                bad = KeyedJaggedTensor(features.keys(), ids, lengths=features.lengths())
                with pytest.raises(InputError, match="id 1000000 in sample"):
                    model(dense[mine].to(device), bad)
            logits, expected = model(dense[mine].to(device), features), reference(dense, joined(bags).kjt())
            binary_cross_entropy_with_logits(logits, labels[mine].to(device)).backward()
            binary_cross_entropy_with_logits(expected, labels).backward()
            if optimizer == "sgd":
                assert torch.allclose(logits.cpu(), expected[mine], atol=ATOL), step
            for _, adam in pairs:
                adam.step()
                adam.zero_grad()
        model.sync_replicas()
        assert copies_are_equal(model)
        if optimizer == "sgd":
            assert_tables_equal(model.module, reference, "tables", atol=ATOL)
            assert_dense_equal(model, reference, "dense", atol=ATOL)


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("check", [load_ahead, train_replicas])
def test_loaded_ahead_and_replicas(world_size: int, check: Callable[[int], None]) -> None:
    cuda_ranks(world_size, check, world_size)


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("check", [count_waits, script_with_adam, draw_on_the_device])
def test_without_waits_by_script_and_from_meta(world_size: int, check: Callable[[int], None]) -> None:
    cuda_ranks(world_size, check, world_size)


@pytest.mark.parametrize("world_size", WORLDS)
def test_every_cut_with_every_optimizer(world_size: int) -> None:
    cuda_ranks(world_size, train_every_cut, world_size)


@pytest.mark.parametrize("world_size", WORLDS)
def test_every_tier(world_size: int) -> None:
    cuda_ranks(world_size, train_in_every_tier, world_size)


@pytest.mark.parametrize("world_size", WORLDS)
def test_bad_ids(world_size: int) -> None:
    cuda_ranks(world_size, refuse_bad_ids, world_size)


@pytest.mark.parametrize("world_size", WORLDS)
def test_a_whole_model(world_size: int) -> None:
    cuda_ranks(world_size, train_a_whole_model, world_size)

"""Sharded sequence embeddings in TorchScript, and three collections in one model."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingCollection

import shardrec
from shardrec._torchscript import inlined
from shardrec.layout import Topology
from shardrec.modules import ShardedModel, shard
from tests.batches import random_bags
from tests.models import OPTIMIZERS, apply_optimizer_in_backward, collection
from tests.plans import cut_plan, random_plan
from tests.ranks import ranks
from tests.scripting.scorers import Reader, Three

ROWS = {"a": 13, "b": 7, "c": 29}
DIM = 16
TABLES = [
    EmbeddingConfig(name="t0", num_embeddings=13, embedding_dim=DIM, feature_names=["a"]),
    EmbeddingConfig(name="t1", num_embeddings=7, embedding_dim=DIM, feature_names=["b", "c"]),
    EmbeddingConfig(name="t2", num_embeddings=29, embedding_dim=DIM, feature_names=["a"]),
]
KEY_ROWS = {"a": 13, "b": 7, "c": 7}


def words(optimizer: str, *, need_indices: bool = False) -> EmbeddingCollection:
    torch.manual_seed(0)
    made = EmbeddingCollection(tables=TABLES, need_indices=need_indices)
    choice = OPTIMIZERS[optimizer]
    if choice.optimizer is not None:
        apply_optimizer_in_backward(choice.optimizer, made.parameters(), dict(choice.settings))
    return made


def compare(seed: int) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    rng = Random(seed)
    optimizer = rng.choice(sorted(OPTIMIZERS))
    shapes = {f"words.{one.name}": (one.num_embeddings, one.embedding_dim) for one in TABLES}
    if optimizer == "rowwise_adagrad":
        # It takes stripes of one width.
        cut = rng.choice(["table_wise", "row_wise", "column_wise", "data_parallel"])
        plan = cut_plan(cut, rng, shapes, Topology(ranks_per_host=world_size))
    else:
        plan = random_plan(rng, shapes, Topology(ranks_per_host=world_size))
    dedup, need_indices = rng.random() < 0.5, rng.random() < 0.5

    def model() -> ShardedModel:
        return shard(Reader(words(optimizer, need_indices=need_indices), DIM), plan, dedup=dedup)

    eager, live = model(), model()
    scripted: Any = shardrec.script(live)
    if world_size > 1:
        scripted = DistributedDataParallel(scripted)
    for step in range(2):
        sizes = [rng.randrange(4) for _ in range(world_size)]
        bags = [random_bags(rng, KEY_ROWS, size, extra=("x",)) for size in sizes]
        expected, found = eager(bags[rank].kjt()), scripted(bags[rank].kjt())
        assert list(expected) == list(found)
        where = f"seed {seed}, step {step}, {optimizer}, dedup {dedup}: {plan}"
        for name, value in expected.items():
            assert torch.allclose(found[name], value, atol=1e-6), f"{name}, {where}"
        sum(value.square().sum() for value in expected.values() if value.requires_grad).backward()
        sum(value.square().sum() for value in found.values() if value.requires_grad).backward()
        for (name, one), (_, two) in zip(eager.named_parameters(), live.named_parameters(), strict=True):
            assert torch.allclose(one, two, atol=1e-5), f"{name}, {where}"
            if one.grad is not None:
                assert two.grad is not None and torch.allclose(one.grad, two.grad, atol=1e-4), f"{name}, {where}"


@pytest.mark.parametrize(
    ("world_size", "seeds"), [(2, 2), *(pytest.param(size, 6, marks=pytest.mark.slow) for size in (1, 2, 4))]
)
def test_training_steps_equal_the_eager_models(world_size: int, seeds: int) -> None:
    def rank_main() -> None:
        for seed in range(seeds):
            compare(seed)

    ranks(world_size, rank_main)


LEFT = [
    EmbeddingBagConfig(name="t0", num_embeddings=13, embedding_dim=8, feature_names=["a"]),
    EmbeddingBagConfig(name="t1", num_embeddings=7, embedding_dim=12, feature_names=["b"]),
]
RIGHT = [EmbeddingBagConfig(name="t0", num_embeddings=29, embedding_dim=16, feature_names=["c"])]


def three(world_size: int, optimizer: str) -> ShardedModel:
    made = Three(
        collection(LEFT, optimizers=optimizer, seed=1),
        collection(RIGHT, optimizers=optimizer, seed=2),
        words(optimizer),
        36,
        DIM,
    )
    shapes = {
        **{f"left.{one.name}": (one.num_embeddings, one.embedding_dim) for one in LEFT},
        **{f"right.{one.name}": (one.num_embeddings, one.embedding_dim) for one in RIGHT},
        **{f"words.{one.name}": (one.num_embeddings, one.embedding_dim) for one in TABLES},
    }
    return shard(made, random_plan(Random(3), shapes, Topology(ranks_per_host=world_size)))


@pytest.mark.parametrize("world_size", [2, *(pytest.param(size, marks=pytest.mark.slow) for size in (1, 4))])
def test_ten_steps_of_a_model_with_three_collections(world_size: int) -> None:
    def rank_main() -> None:
        rank = dist.get_rank()
        eager, live = three(world_size, "adagrad"), three(world_size, "adagrad")
        scripted: Any = shardrec.script(live)
        assert_all_are_issued_before_the_first_wait(scripted)
        if world_size > 1:
            scripted = DistributedDataParallel(scripted)
        dense = [torch.optim.SGD(module.dense_parameters(), lr=0.1) for module in (eager, live)]
        rng = Random(rank)
        for step in range(10):
            features, inputs = random_bags(rng, {**ROWS, "c": 7}, 3).kjt(), torch.randn(3, 3)
            expected, found = eager(inputs, features), scripted(inputs, features)
            assert torch.allclose(expected, found, atol=1e-5), step
            expected.square().mean().backward()
            found.square().mean().backward()
            for one in dense:
                one.step()
                one.zero_grad()
        for (name, one), (_, two) in zip(eager.named_parameters(), live.named_parameters(), strict=True):
            assert torch.allclose(one, two, atol=1e-5), name

    ranks(world_size, rank_main)


def assert_all_are_issued_before_the_first_wait(scripted: Any) -> None:
    kinds = []
    for node in inlined(scripted.graph).nodes():
        if node.kind() == "prim::awaitable_wait":
            kinds.append("wait")
        elif node.kind() == "prim::awaitable":
            kinds.append("issued")
    assert kinds[:4] == ["issued", "issued", "issued", "wait"], kinds
    assert kinds.count("wait") >= 3

"""Features with a batch size each and inverse indices: the unsharded collection's values and weights under any plan."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from shardrec.errors import InputError
from shardrec.layout import Topology
from shardrec.modules import shard
from tests.models import OPTIMIZERS, apply_optimizer_in_backward, collection, feature_rows, random_configs, table_sizes
from tests.modules.parity import assert_weights_equal, dense_adam, local_part
from tests.plans import random_plan, topologies_of
from tests.ranks import ranks


@dataclass(frozen=True, kw_only=True)
class Bags:
    """A batch whose features have a batch size each.

    Args:
        features: the input.
        samples: of the full batch.
    """

    features: KeyedJaggedTensor
    samples: int


def random_batch(rng: Random, rows: dict[str, int], *, weighted: bool, even: bool = False) -> Bags:
    """0 to 4 bags per feature, chosen from by 0 to 5 samples; further keys; ids at the tables' ends."""
    keys = [*rows, "x"]
    rng.shuffle(keys)
    samples = rng.randrange(6)
    size = rng.randint(1, 4)
    strides = {key: size if even else rng.randint(1 if samples else 0, 4) for key in keys}
    lengths: list[int] = []
    values: list[int] = []
    for key in keys:
        bags = [rng.randrange(4) for _ in range(strides[key])]
        lengths += bags
        values += [rng.choice([0, rows.get(key, 9) - 1, rng.randrange(rows.get(key, 9))]) for _ in range(sum(bags))]
    inverse_keys = [key for key in keys if key != "x"]
    rng.shuffle(inverse_keys)
    inverse = torch.tensor(
        [[rng.randrange(strides[key]) for _ in range(samples)] for key in inverse_keys], dtype=torch.int64
    ).view(len(inverse_keys), samples)
    if not samples:
        # Without samples there is nothing that could tell bags apart; the feature sizes are one, then.
        lengths, values = [0] * len(keys), []
        strides = dict.fromkeys(keys, 1)
    features = KeyedJaggedTensor(
        keys=keys,
        values=torch.tensor(values, dtype=torch.int64),
        lengths=torch.tensor(lengths, dtype=torch.int32),
        weights=torch.tensor([rng.randint(1, 8) / 8 for _ in values]) if weighted else None,
        stride_per_key_per_rank=[[strides[key]] for key in keys],
        inverse_indices=(inverse_keys, inverse) if samples else None,
    )
    return Bags(features=features, samples=samples or 1)


def compare(seed: int, steps: int = 2) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    rng = Random(seed)
    weighted = rng.random() < 0.3
    configs = random_configs(rng, weighted=weighted)
    plan = random_plan(rng, table_sizes(configs), rng.choice(topologies_of(world_size)))
    optimizer = rng.choice(["sgd", "adagrad", "rowwise_adagrad", "none"])
    reference = collection(configs, weighted=weighted, optimizers=optimizer, reference=True)
    model = shard(collection(configs, weighted=weighted, optimizers=optimizer), plan)
    dense = [dense_adam(module) for module in (reference, model)]
    for step in range(steps):
        # Some ranks' batches have one size for all features, with and without inverse indices.
        batches = [
            random_batch(rng, feature_rows(configs), weighted=weighted, even=rng.random() < 0.3)
            for _ in range(world_size)
        ]
        output = model(batches[rank].features)
        values = output.values()
        total = torch.zeros(())
        for other, batch in enumerate(batches):
            expected = reference(batch.features)
            scale = torch.sin(torch.arange(expected.values().numel(), dtype=torch.float32)).view_as(expected.values())
            total = total + (expected.values() * scale).sum()
            if other == rank:
                assert values.shape == (
                    batch.samples,
                    sum(config.embedding_dim * len(config.feature_names) for config in configs),
                )
                assert output.keys() == expected.keys()
                assert torch.allclose(values, expected.values(), atol=1e-5), f"seed {seed}, step {step}: {plan}"
                loss = (values * scale).sum()
        loss.backward()
        (total / world_size).backward()
        for one in dense:
            one.step()
            one.zero_grad()
    assert_weights_equal(model.module, reference, f"seed {seed}, {optimizer}")


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_random_plans(world_size: int) -> None:
    def rank_main() -> None:
        for seed in range({1: 15, 2: 25, 4: 15}[world_size]):
            compare(seed)

    ranks(world_size, rank_main)


SEQUENCES = [
    EmbeddingConfig(name="s0", num_embeddings=13, embedding_dim=8, feature_names=["a", "b"]),
    EmbeddingConfig(name="s1", num_embeddings=29, embedding_dim=8, feature_names=["c"]),
]


def sequences() -> EmbeddingCollection:
    torch.manual_seed(0)
    made = EmbeddingCollection(tables=SEQUENCES)
    choice = OPTIMIZERS["sgd"]
    assert choice.optimizer is not None
    apply_optimizer_in_backward(choice.optimizer, made.parameters(), dict(choice.settings))
    return made


@pytest.mark.parametrize("dedup", [False, True])
def test_sequences(dedup: bool) -> None:
    """Which need no inverse indices, as each feature stays by itself."""

    def rank_main() -> None:
        rank = dist.get_rank()
        for seed in range(8):
            rng = Random(seed)
            shapes = {one.name: (one.num_embeddings, one.embedding_dim) for one in SEQUENCES}
            model = shard(sequences(), random_plan(rng, shapes, Topology(ranks_per_host=2)), dedup=dedup)
            reference = sequences()
            batches = [random_batch(rng, {"a": 13, "b": 13, "c": 29}, weighted=False).features for _ in range(2)]
            found = model(batches[rank])
            loss = torch.zeros(())
            total = torch.zeros(())
            for other, batch in enumerate(batches):
                for key, expected in reference(batch).items():
                    total = total + expected.values().square().sum()
                    if other == rank:
                        assert found[key].lengths().tolist() == expected.lengths().tolist()
                        assert torch.allclose(found[key].values(), expected.values(), atol=1e-5)
                        loss = loss + found[key].values().square().sum()
            loss.backward()
            (total / 2).backward()
            for name, table in model.module.tables().items():  # type: ignore[operator]
                whole: Tensor = reference.embeddings[name].weight  # type: ignore[assignment]
                for place, part in table.locals.items():
                    assert torch.allclose(part, local_part(whole, place), atol=1e-4)

    ranks(2, rank_main)


def features_with(strides: list[int], inverse: list[list[int]] | None) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(
        keys=["a", "b"],
        values=torch.zeros(sum(strides), dtype=torch.int64),
        lengths=torch.ones(sum(strides), dtype=torch.int32),
        stride_per_key_per_rank=[[size] for size in strides],
        inverse_indices=None if inverse is None else (["a", "b"], torch.tensor(inverse)),
    )


def test_bad_inverse_indices_are_named_on_every_rank() -> None:
    def rank_main() -> None:
        rng = Random(0)
        configs = random_configs(rng)
        while set(feature_rows(configs)) != {"a", "b"}:
            configs = random_configs(rng)
        model = shard(collection(configs), random_plan(rng, table_sizes(configs), Topology(ranks_per_host=2)))
        good = features_with([2, 1], [[0, 1, 1], [0, 0, 0]])
        for bad, words in [
            (
                features_with([2, 1], None),
                r"batch size each \(\[2, 1\]\) and no inverse indices.*give .* inverse_indices",
            ),
            (features_with([2, 1], [[0, 2, 1], [0, 0, 0]]), r"'a': the inverse index of sample 1 is 2 and .* 2 bags"),
            (features_with([2, 1], [[0, 1, 1], [0, 0, -1]]), r"'b': the inverse index of sample 2 is -1"),
            (features_with([2, 2], [[0, 1, 1], [0, 0, 9]]), r"'b': the inverse index of sample 2 is 9"),
        ]:
            with pytest.raises(InputError, match=words):
                model(bad if dist.get_rank() == 1 else good)
            assert model(good).values().size(0) == 3

    ranks(2, rank_main)

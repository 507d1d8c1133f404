"""Shared memory, the process group, C++ and torch operators: the same outputs, gradients and weights."""

from __future__ import annotations

from random import Random

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingCollection

from shardrec import native
from shardrec.exchange.collectives import FunctionalCollectives
from shardrec.exchange.shared.collectives import SharedCollectives
from shardrec.modules import shard
from tests.batches import random_bags
from tests.models import apply_optimizer_in_backward, click_model, feature_rows, random_configs, table_sizes
from tests.plans import random_plan, topologies_of
from tests.ranks import ranks

TABLES = {"s0": (40, 8), "s1": (90, 16)}


class Both(torch.nn.Module):
    """A click model and a sequence collection."""

    def __init__(self, seed: int, optimizer: str) -> None:
        super().__init__()
        self.configs = random_configs(Random(seed))
        self.click = click_model(self.configs, optimizer=optimizer)
        torch.manual_seed(seed)
        tables = [
            EmbeddingConfig(name=name, num_embeddings=rows, embedding_dim=8, feature_names=[f"q{name}"])
            for name, (rows, _) in TABLES.items()
        ]
        self.words = EmbeddingCollection(tables=tables)
        apply_optimizer_in_backward(torch.optim.Adagrad, self.words.parameters(), {"lr": 0.1})


@pytest.mark.parametrize(
    ("seed", "world_size"),
    [
        pytest.param(seed, size, marks=() if (seed, size) in ((0, 2), (1, 4)) else pytest.mark.slow)
        for seed in range(4)
        for size in (2, 4)
    ],
)
def test_five_steps_are_alike(world_size: int, seed: int) -> None:
    optimizer = ["rowwise_adagrad", "sgd", "adam", "adagrad"][seed]
    topology = topologies_of(world_size)[seed % len(topologies_of(world_size))]
    shapes = table_sizes(random_configs(Random(seed)), "click.sparse")
    shapes |= {f"words.{name}": (rows, 8) for name, (rows, _) in TABLES.items()}
    plan = random_plan(Random(seed), shapes, topology)
    rows = feature_rows(random_configs(Random(seed)))
    words = {f"q{name}": count for name, (count, _) in TABLES.items()}

    def rank_main(transport: str, in_torch: bool) -> list[Tensor]:
        if in_torch:
            native.is_loaded = lambda: False  # type: ignore[assignment]
        try:
            model = shard(Both(seed, optimizer), plan, transport=transport)  # type: ignore[arg-type]
            kind = SharedCollectives if transport == "auto" else FunctionalCollectives
            assert isinstance(model.context.collectives, kind)
            found: list[Tensor] = []
            draw = Random(100 * seed + dist.get_rank())
            for step in range(5):
                torch.manual_seed(step)
                size = draw.randrange(5)
                output = model.click(torch.randn(size, 3), random_bags(draw, rows, size).kjt())
                pending = model.words(random_bags(draw, words, size).kjt())
                jagged = [one.values() for one in pending.values()]
                total = output.sum() + sum((one.square().sum() for one in jagged), torch.zeros(()))
                total.backward()
                found += [output.detach(), *(one.detach() for one in jagged)]
            return found + [parameter.detach().clone() for parameter in model.parameters()]
        finally:
            native.is_loaded = loaded  # type: ignore[assignment]

    loaded = native.is_loaded
    expected = ranks(world_size, rank_main, "group", True)
    for transport, in_torch in [("auto", True), ("auto", False), ("group", False)]:
        for mine, its in zip(ranks(world_size, rank_main, transport, in_torch), expected, strict=True):
            for one, other in zip(mine, its, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)

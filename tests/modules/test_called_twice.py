"""A collection that is called twice with the same features, by programs: one update, of both calls."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import shardrec
from tests.executors import executed
from tests.models import apply_optimizer_in_backward
from tests.ranks import ranks

ROWS, DIM = 5, 4


class Twice(nn.Module):
    """With ids' weights that are trained, if ``learned``."""

    def __init__(self, *, learned: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        config = EmbeddingBagConfig(name="t", num_embeddings=ROWS, embedding_dim=DIM, feature_names=["a"])
        self.bags = EmbeddingBagCollection(tables=[config], is_weighted=learned)
        apply_optimizer_in_backward(torch.optim.Adagrad, self.bags.parameters(), {"lr": 0.1, "eps": 1e-2})
        self.learned = learned
        self.importance = nn.Parameter(torch.linspace(0.5, 1.5, ROWS), requires_grad=learned)
        self.top = nn.Linear(DIM, 1)

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        if self.learned:
            features = KeyedJaggedTensor(
                keys=features.keys(),
                values=features.values(),
                lengths=features.lengths(),
                weights=self.importance[features.values()],
            )
        first = self.bags(features).values()
        second = self.bags(features).values()
        logits: Tensor = self.top(first * second + first)
        return logits


def features(step: int, rank: int) -> KeyedJaggedTensor:
    ids = torch.tensor([step, step + rank, 2 * step + 1]) % ROWS
    return KeyedJaggedTensor(keys=["a"], values=ids, lengths=torch.tensor([1, 2]))


def compiled(model: Any) -> Any:
    """By a compiler that computes equal expressions once."""
    torch._dynamo.reset()
    shardrec.annotate_for_dynamo(model, mode="traced")
    return torch.compile(model, backend="aot_eager_decomp_partition", fullgraph=True, dynamic=True)


@pytest.mark.parametrize(
    ("count", "executor", "learned"),
    [
        (1, "live script", False),
        (1, "compiled", True),
        (2, "live script", True),
        (2, "compiled", False),
    ],  # each two together
)
def test_a_program_updates_once(count: int, executor: str, learned: bool) -> None:
    def run() -> None:
        rank, expected, model = dist.get_rank(), Twice(learned=learned), shardrec.shard(Twice(learned=learned))
        program = compiled(model) if executor == "compiled" else executed(model, executor)
        dense = [*expected.top.parameters(), *([expected.importance] if learned else [])]
        optimizers = [torch.optim.SGD(dense, 0.1), torch.optim.SGD(model.dense_parameters(), 0.1)]
        for step in range(3):
            logits = program(features(step, rank))
            of_ranks = [expected(features(step, each)) for each in range(count)]
            torch.testing.assert_close(logits, of_ranks[rank])
            logits.square().sum().backward()
            sum(output.square().sum() / count for output in of_ranks).backward()  # type: ignore[union-attr]
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()

    ranks(count, run)

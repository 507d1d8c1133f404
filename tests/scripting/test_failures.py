"""A program whose own code fails on one rank, while a lookup waits for others to share its exchange."""

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
from shardrec import DynamicIds
from tests.models import apply_optimizer_in_backward
from tests.ranks import ranks


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        one, two = (
            EmbeddingBagConfig(name=name, num_embeddings=8, embedding_dim=4, feature_names=["a"]) for name in ("t", "u")
        )
        self.one, self.two = EmbeddingBagCollection(tables=[one]), EmbeddingBagCollection(tables=[two])
        for part in (self.one, self.two):
            apply_optimizer_in_backward(torch.optim.SGD, part.parameters(), {"lr": 0.5})

    def forward(self, features: KeyedJaggedTensor, fails: bool) -> Tensor:
        first = self.one(features)
        if fails:
            raise ValueError("on purpose")
        second = self.two(features)
        return first.values() + second.values()


def features(step: int) -> KeyedJaggedTensor:
    ids = torch.tensor([dist.get_rank(), step, step + 1])
    return KeyedJaggedTensor(keys=["a"], values=ids, lengths=torch.tensor([1, 2]))


def trained(fails_at: int) -> list[Any]:
    """Outputs and weights of four steps beside one that fails on rank 1, and the ids' counts."""
    model = shardrec.shard(Two(), dynamic_ids={"one.t": DynamicIds(evict="never")})
    program, values = shardrec.script(model), list[Any]()
    for step in range(4):
        if step == fails_at:
            words = ("rank 1: a scripted program failed between two lookups", "on purpose")
            with pytest.raises(Exception, match=words[dist.get_rank()]):
                program(features(7), fails=dist.get_rank() == 1)
        output = program(features(step), fails=False)
        output.sum().backward()
        values += [output.detach(), *(parameter.detach().clone() for parameter in model.parameters())]
    return [*values, model.id_stats()]


@pytest.mark.parametrize("fails_at", [0, 2])
def test_the_other_ranks_are_told_by_the_next_call(fails_at: int) -> None:
    def run() -> None:
        for value, expected in zip(trained(fails_at), trained(-1), strict=True):
            torch.testing.assert_close(value, expected)

    ranks(2, run, timeout=60)

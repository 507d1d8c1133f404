"""Replicated models for tests, their batches, and whether the copies are alike."""

from __future__ import annotations

from random import Random
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardrec.modules import shard
from shardrec.replicas import ReplicatedModel
from tests.batches import Bags, random_bags

__all__ = ["Steps", "click_loss", "copies_are_equal", "copies_of", "replicated"]


def replicated(model: nn.Module, *args: Any, **kwargs: Any) -> ReplicatedModel:
    made = shard(model, *args, **kwargs)
    assert isinstance(made, ReplicatedModel)
    return made


def copies_of(model: ReplicatedModel) -> list[list[Tensor]]:
    """This rank's table parameters and fused states, as each replica has them."""
    mine = [one.clone() for one in (*(weight for _, weight in model._weights()), *model._states())]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    place = model.replica_groups.ranks[model.replica_groups.replica].index(dist.get_rank())
    return [everyone[row[place]] for row in model.replica_groups.ranks]


def copies_are_equal(model: ReplicatedModel) -> bool:
    """To the last bit, on every rank."""
    first, *others = copies_of(model)
    alike = all(torch.equal(one, two) for other in others for one, two in zip(first, other, strict=True))
    dist.all_reduce(flag := torch.tensor(int(alike)), dist.ReduceOp.MIN)
    return bool(flag)


class Steps:
    """Batches of every rank, alike on every rank."""

    def __init__(self, rows: dict[str, int] | Any, seed: int = 0, size: int = 3) -> None:
        self.rng, self.generator = Random(seed), torch.Generator().manual_seed(seed)
        self.rows, self.size, self.world = rows, size, dist.get_world_size()
        self.mine = slice(dist.get_rank() * size, (dist.get_rank() + 1) * size)

    def bags(self) -> list[Bags]:
        return [random_bags(self.rng, self.rows, self.size, shuffled=False) for _ in range(self.world)]

    def draw(self) -> tuple[list[Bags], Tensor, Tensor]:
        dense = torch.randn(self.size * self.world, 3, generator=self.generator)
        labels = torch.randint(0, 2, (self.size * self.world,), generator=self.generator).float()
        return self.bags(), dense, labels


def click_loss(model: nn.Module, dense: Tensor, bags: Bags, labels: Tensor) -> Tensor:
    return nn.functional.binary_cross_entropy_with_logits(model(dense, bags.kjt()), labels)

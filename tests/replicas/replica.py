"""An elastic replica on some ranks of the test session, and its batches."""

from __future__ import annotations

import time
from collections.abc import Callable
from random import Random
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardrec.modules import shard
from shardrec.replicas import Replicas
from shardrec.replicas.elastic_model import ElasticModel
from tests.batches import Bags, joined, random_bags
from tests.models import click_model
from tests.modules.clicks import CONFIGS, ROWS, dense_parameters, mixed_plan

PATIENCE_S = 0.7
SIZE = 3


def batch_of(step: int, replica: int, rank: int = 0) -> tuple[Tensor, Bags, Tensor]:
    seed = 100 * step + 10 * replica + rank
    generator = torch.Generator().manual_seed(seed)
    dense = torch.randn(SIZE, 3, generator=generator)
    labels = torch.rand(SIZE, generator=generator).round()
    return dense, random_bags(Random(seed), ROWS, SIZE, shuffled=False), labels


def loss_of(model: nn.Module, parts: list[tuple[Tensor, Bags, Tensor]]) -> Tensor:
    dense, bags, labels = zip(*parts, strict=True)
    device = next(model.parameters()).device
    features = (joined(list(bags)) if len(bags) > 1 else bags[0]).kjt().to(device)
    logits = model(torch.cat(dense).to(device), features)
    return nn.functional.binary_cross_entropy_with_logits(logits, torch.cat(labels).to(device))


def groups_of(size: int) -> list[Any]:
    return [dist.new_group(list(range(first, first + size))) for first in range(0, dist.get_world_size(), size)]


class Replica:
    """A replica of some ranks of the pool, trained by Adam (dense part) beside its tables' optimizer."""

    def __init__(
        self,
        address: str,
        size: int = 1,
        *,
        seed: int = 0,
        optimizer: str = "sgd",
        device: str = "cpu",
        groups: list[Any] | None = None,
        **options: Any,
    ) -> None:
        groups = groups or groups_of(size)
        self.number, self.rank = divmod(dist.get_rank(), size)
        elastic = Replicas(**{"count": 2, "elastic": address, "patience_s": PATIENCE_S, **options})
        made = shard(
            click_model(CONFIGS, optimizer=optimizer, seed=seed),
            mixed_plan(size),
            replicas=elastic,
            group=groups[self.number],
            device=device,
        )
        assert isinstance(made, ElasticModel)
        self.model = made
        self.dense = torch.optim.Adam(dense_parameters(made), lr=0.05)

    def step(self) -> float:
        loss = loss_of(self.model, [batch_of(self.model.steps, self.number, self.rank)])
        loss.backward()
        self.dense.step()
        self.dense.zero_grad()
        return loss.item()

    def state(self) -> list[Tensor]:
        """All that replicas have alike after an averaging."""
        adam = [value for entry in self.dense.state.values() for value in entry.values()]
        return [one.detach().clone() for one in (*self.model._tensors(), *self.model._states(), *adam)]


def values_of(outcomes: list[Any]) -> list[Any]:
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
    return outcomes


def assert_alike(states: list[list[Tensor]]) -> None:
    for state in states[1:]:
        assert all(torch.equal(one, other) for one, other in zip(states[0], state, strict=True))


def wait_for(condition: Callable[[], bool]) -> None:
    give_up = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < give_up
        time.sleep(0.01)

"""A step reaches the points of its model's life cycle in one order, whatever executes it; what subscribes is called."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from shardrec import ShardedModel, shard
from shardrec.exchange.life_cycle import LifeCycle
from shardrec.pipeline import TrainPipeline
from shardrec.trainer.data import ClickBatch
from tests.executors import executed
from tests.models import collection
from tests.modules.clicks import CONFIGS, batch, dense_parameters, mixed_plan
from tests.ranks import ranks

POINTS = [*LifeCycle().points()]
FORWARD = POINTS[:4]
EVALUATION = FORWARD[1:]


class Scored(nn.Module):
    """A score from pooled features."""

    def __init__(self) -> None:
        super().__init__()
        self.sparse = collection(CONFIGS)
        self.top = nn.Linear(sum(config.embedding_dim * len(config.feature_names) for config in CONFIGS), 1)

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        return self.top(self.sparse(features).values())


def clicks() -> ShardedModel:
    return shard(Scored(), mixed_plan(dist.get_world_size()))


def loss_fn(model: nn.Module, one: ClickBatch) -> Tensor:
    assert isinstance(one.sparse, KeyedJaggedTensor), "a name that TorchScript looks up among those of this function"
    loss: Tensor = model(one.sparse).square().sum()
    return loss


def noted(model: ShardedModel) -> list[str]:
    """The points that the model reaches from now on."""
    reached: list[str] = []

    def note(name: str, *_: object) -> None:
        reached.append(name)

    for name, functions in model.context.life_cycle.points().items():
        functions.append(partial(note, name))
    return reached


def points_of_steps(executor: str) -> dict[str, list[str]]:
    model = clicks()
    reached, rank = noted(model), dist.get_rank()
    run = executed(model, executor)
    points = {}
    for step in range(2):  # compiled programs run otherwise at first
        reached.clear()
        loss = loss_fn(run, batch(step, rank))
        points["forward"] = reached[:]
        loss.backward()
        points["step"] = reached[:]
    reached.clear()
    with torch.no_grad():
        loss_fn(model, batch(0, rank))
    points["evaluation"] = reached[:]
    return points


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("executor", ["eager", "live script", pytest.param("traced", marks=pytest.mark.slow)])
def test_a_step_reaches_the_points_in_order(executor: str, world: int) -> None:
    # One rank averages no gradients, and sends none but between the operators of a program.
    # The backward of a program has graph tasks of its own, each of which begins.
    begins, rest = POINTS[4:5], POINTS[5:]
    if executor != "eager":
        backward = begins + begins + rest[:1] + (begins + rest[1:] if world > 1 else [])
    else:
        backward = POINTS[4:] if world > 1 else []
    everywhere = FORWARD + backward
    for points in ranks(world, points_of_steps, executor):
        assert points == {"forward": FORWARD, "step": everywhere, "evaluation": EVALUATION}


def points_of_a_pipeline(depth: int) -> list[str]:
    model = clicks()
    batches = [batch(step, dist.get_rank()) for step in range(4)]
    steps = TrainPipeline(model, torch.optim.Adam(dense_parameters(model)), batches, loss_fn=loss_fn, depth=depth)
    next(steps)
    next(steps)
    reached = noted(model)
    next(steps)
    return reached


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_pipeline_reaches_the_same_points(depth: int) -> None:
    assert ranks(2, points_of_a_pipeline, depth) == [POINTS, POINTS]

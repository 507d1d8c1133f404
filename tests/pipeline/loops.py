"""The loop that a program writes by hand, and the pipeline of the same steps."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardrec.modules import ShardedModel, shard
from shardrec.pipeline import TrainPipeline
from tests.models import click_model
from tests.modules.clicks import CONFIGS, dense_parameters, loss_fn, mixed_plan


def world() -> tuple[int, int]:
    return dist.get_rank(), dist.get_world_size()


def clicks(**options: Any) -> ShardedModel:
    return shard(click_model(CONFIGS, **options), mixed_plan(dist.get_world_size()))


def pipeline_of(model: ShardedModel, batches: Iterable[Any], depth: int, loss: Any = loss_fn) -> TrainPipeline:
    return TrainPipeline(model, torch.optim.Adam(dense_parameters(model)), batches, loss_fn=loss, depth=depth)


def weights(model: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def plain(model: ShardedModel, batches: Iterable[Any], loss: Any = loss_fn) -> list[float]:
    optimizer = torch.optim.Adam(dense_parameters(model))
    losses = []
    for one in batches:
        optimizer.zero_grad()
        value = loss(model, one)
        value.backward()
        optimizer.step()
        losses.append(value.item())
    return losses

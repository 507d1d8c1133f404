"""The view of the fused optimizers: schedules reach the kernels, states save and load."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torchrec
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor

from shardrec.errors import ConfigError
from shardrec.layout import ShardingPlan, TableLayout, Topology, cuts
from shardrec.modules import ShardedModel, shard
from tests.ranks import ranks

ROWS, DIM = 11, 8
CLASSES: dict[str, Any] = {
    "SGD": torch.optim.SGD,
    "Adagrad": torch.optim.Adagrad,
    "RowWiseAdagrad": torchrec.optim.RowWiseAdagrad,
    "Adam": torch.optim.Adam,
}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bags = EmbeddingBagCollection(
            tables=[
                EmbeddingBagConfig(name=f"t{i}", num_embeddings=ROWS, embedding_dim=DIM, feature_names=[f"f{i}"])
                for i in range(3)
            ]
        )

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        values: torch.Tensor = self.bags(features).values()
        return values


def batch() -> KeyedJaggedTensor:
    """Every row of every table, so that a lazy optimizer does what a dense one does."""
    return KeyedJaggedTensor(
        keys=["f0", "f1", "f2"], values=torch.arange(ROWS).repeat(3), lengths=torch.ones(3 * ROWS, dtype=torch.int32)
    )


def layouts(world: int) -> tuple[TableLayout, ...]:
    everyone = range(world)
    return (
        cuts.row_wise("bags.t0", ROWS, DIM, ranks=everyone),
        cuts.column_wise("bags.t1", ROWS, DIM, ranks=everyone)
        if world < 4
        else cuts.table_wise("bags.t1", ROWS, DIM, rank=3),
        cuts.data_parallel("bags.t2", ROWS, DIM),
    )


def sharded(name: str) -> ShardedModel:
    torch.manual_seed(1)
    model = Model()
    _apply_optimizer_in_backward(CLASSES[name], model.parameters(), {"lr": 0.5})
    world = dist.get_world_size() if dist.is_initialized() else 1
    return shard(model, ShardingPlan(topology=Topology(ranks_per_host=world), tables=layouts(world)))


def weights_after(model: nn.Module, scheduler: Any, steps: range) -> None:
    for step in steps:
        output = model(batch())
        (output * torch.sin(torch.arange(output.numel()).view_as(output) + step)).sum().backward()
        scheduler.step()


def schedule(name: str) -> None:
    model = sharded(name)
    torch.manual_seed(1)
    reference = Model()
    optimizer = CLASSES[name](reference.parameters(), lr=0.5)
    dense = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    fused = torch.optim.lr_scheduler.ExponentialLR(model.fused_optimizer, 0.5)
    for step in range(4):
        for net in (reference, model):
            output = net(batch())
            (output * torch.sin(torch.arange(output.numel()).view_as(output) + step)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        model.fused_optimizer.step()
        dense.step()
        fused.step()
        torch.testing.assert_close(model(batch()), reference(batch()), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("world", [1, 2, 4])
def test_a_learning_rate_schedule_reaches_every_kernel(world: int, name: str) -> None:
    ranks(world, schedule, name)


def save_and_load(name: str) -> None:
    model, other = sharded(name), sharded(name)
    weights_after(model, torch.optim.lr_scheduler.ExponentialLR(model.fused_optimizer, 0.5), range(2))
    saved = {key: value for key, value in model.fused_optimizer.state_dict().items()}
    other.load_state_dict(model.state_dict())
    other.fused_optimizer.load_state_dict(saved)
    for net in (model, other):
        scheduler = torch.optim.lr_scheduler.ExponentialLR(net.fused_optimizer, 0.5, last_epoch=2)
        weights_after(net, scheduler, range(2, 4))
    torch.testing.assert_close(model(batch()), other(batch()), atol=0, rtol=0)


@pytest.mark.parametrize("name", CLASSES)
def test_states_save_and_load(name: str) -> None:
    ranks(2, save_and_load, name)


def test_a_model_without_fused_optimizers_has_no_view() -> None:
    model = shard(Model(), ShardingPlan(topology=Topology(), tables=layouts(1)))
    with pytest.raises(ConfigError, match="no table of this model has a fused optimizer"):
        _ = model.fused_optimizer


def test_states_of_another_optimizer_are_refused() -> None:
    adam, adagrad = sharded("Adam"), sharded("Adagrad")
    with pytest.raises(ConfigError, match=r"saved states of a shard are \['exp_avg'"):
        adagrad.fused_optimizer.load_state_dict(adam.fused_optimizer.state_dict())

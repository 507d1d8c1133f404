"""The view of the fused optimizers: schedules reach the kernels, states save and load."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torchrec
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.warmup import WarmupOptimizer, WarmupPolicy, WarmupStage

from shardrec.errors import ConfigError
from shardrec.layout import ShardingPlan, TableLayout, Topology, cuts
from shardrec.modules import ShardedModel, shard
from shardrec.modules.table import local_parts
from tests.executors import TRAINING, executed
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


def sharded(name: str, **settings: Any) -> ShardedModel:
    torch.manual_seed(1)
    model = Model()
    _apply_optimizer_in_backward(CLASSES[name], model.parameters(), {"lr": 0.5, **settings})
    world = dist.get_world_size() if dist.is_initialized() else 1
    return shard(model, ShardingPlan(topology=Topology(ranks_per_host=world), tables=layouts(world)))


def weights_after(model: nn.Module, scheduler: Any, steps: range) -> None:
    for step in steps:
        output = model(batch())
        (output * torch.sin(torch.arange(output.numel()).view_as(output) + step)).sum().backward()
        scheduler.step()


def schedule(name: str, **settings: Any) -> None:
    model = sharded(name, **settings)
    torch.manual_seed(1)
    reference = Model()
    optimizer = CLASSES[name](reference.parameters(), lr=0.5, **settings)
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


@pytest.mark.some(3)
@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("world", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_learning_rate_schedule_reaches_every_kernel(world: int, name: str) -> None:
    ranks(world, schedule, name)


@pytest.mark.some(2)
@pytest.mark.parametrize("executor", ["module", *TRAINING])
@pytest.mark.parametrize("name", ["SGD", "Adam"])
def test_a_learning_rate_that_was_set_is_used_whoever_calls_the_tables(executor: str, name: str) -> None:
    """A module of the model by itself too, and no forward of the whole model between."""
    model, reference = sharded(name), sharded(name)
    program = model.module if executor == "module" else executed(model, executor)
    for rate in (0.5, 0.001, 0.2):
        for net, call in ((model, program), (reference, reference)):
            net.fused_optimizer.param_groups[0]["lr"] = rate
            call(batch()).sum().backward()
        torch.testing.assert_close(model.state_dict(), reference.state_dict())


def test_a_scheduler_begins_from_the_learning_rate_that_was_set() -> None:
    model = sharded("Adagrad")
    model.fused_optimizer.param_groups[0]["lr"] = 0.25
    torch.optim.lr_scheduler.LambdaLR(model.fused_optimizer, lambda epoch: 0.5)
    assert model.fused_optimizer.param_groups[0]["lr"] == 0.125


def with_weight_decay() -> None:
    for name in CLASSES:
        schedule(name, weight_decay=0.25)


@pytest.mark.some(1)
@pytest.mark.parametrize("world", [1, 4])
def test_weight_decay_is_that_of_the_unsharded_optimizer_on_rows_that_are_looked_up(world: int) -> None:
    ranks(world, with_weight_decay)


def combined() -> None:
    """TorchRec's own wrappers over the view: the same weights as two that step by themselves, and states that load."""
    models = [sharded("Adam"), sharded("Adam")]
    warmup = [WarmupStage(WarmupPolicy.LINEAR, max_iters=4, value=0.0)]
    theirs = CombinedOptimizer([("fused", WarmupOptimizer(models[0].fused_optimizer, warmup, lr=0.5))])
    for step in range(3):
        models[1].fused_optimizer.param_groups[0]["lr"] = 0.5 * step / 4
        for model in models:
            (model(batch()) * (step + 1)).sum().backward()
        theirs.step()
    torch.testing.assert_close(models[0](batch()), models[1](batch()), atol=0, rtol=0)
    saved = theirs.state_dict()
    assert all(name.startswith("fused.") for name in saved["state"])
    steps = {float(value) for state in saved["state"].values() for key, value in state.items() if key.endswith("step")}
    assert steps == ({3.0} if models[0].fused_optimizer.param_groups[0]["params"] else set())
    other = sharded("Adam")
    again = CombinedOptimizer([("fused", WarmupOptimizer(other.fused_optimizer, warmup, lr=0.5))])
    again.step()  # TorchRec's loading takes states that are there
    again.load_state_dict(saved)
    own = other.fused_optimizer.state_dict()["state"]
    for name, state in models[0].fused_optimizer.state_dict()["state"].items():
        for key, value in state.items():
            torch.testing.assert_close(local_parts(own[name][key]), local_parts(value))


@pytest.mark.parametrize("world", [1, 2])
def test_torchrecs_optimizers_take_the_view(world: int) -> None:
    ranks(world, combined)


def test_a_dense_optimizer_goes_beside_it() -> None:
    model = sharded("Adagrad")
    top = nn.Linear(3 * DIM, 1)
    dense = KeyedOptimizerWrapper(dict(top.named_parameters()), lambda p: torch.optim.SGD(p, lr=0.1))
    both = CombinedOptimizer([model.fused_optimizer, dense])
    before = top.weight.detach().clone()
    for _ in range(2):
        both.zero_grad()
        top(model(batch())).sum().backward()
        both.step()
    assert not torch.equal(top.weight, before)
    assert sorted(both.state_dict()["state"])[:2] == ["bags.embedding_bags.t0.weight", "bags.embedding_bags.t1.weight"]
    assert [group["lr"] for group in both.param_groups] == [0.5, 0.1]


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


@pytest.mark.some(2)
@pytest.mark.parametrize("name", CLASSES)
def test_states_save_and_load(name: str) -> None:
    ranks(2, save_and_load, name)


def go_back() -> list[float]:
    model = sharded("Adam")
    model(batch()).sum().backward()
    saved = copy.deepcopy(model.fused_optimizer.state_dict())
    for _ in range(3):
        model(batch()).sum().backward()
    model.fused_optimizer.load_state_dict(saved)
    states = model.fused_optimizer.state_dict()["state"].values()
    return [float(value) for state in states for key, value in state.items() if key.endswith(".step")]


@pytest.mark.parametrize("world", [1, 4])
def test_an_earlier_state_has_its_count_of_steps(world: int) -> None:
    assert {step for steps in ranks(world, go_back) for step in steps} == {1.0}


def test_a_model_without_fused_optimizers_has_no_view() -> None:
    model = shard(Model(), ShardingPlan(topology=Topology(), tables=layouts(1)))
    with pytest.raises(ConfigError, match="no table of this model has a fused optimizer"):
        _ = model.fused_optimizer


def test_states_of_another_optimizer_are_refused() -> None:
    adam, adagrad = sharded("Adam"), sharded("Adagrad")
    with pytest.raises(ConfigError, match=r"eps of the fused optimizer of bags\.t0, bags\.t1, bags\.t2 is"):
        adagrad.fused_optimizer.load_state_dict(adam.fused_optimizer.state_dict())
    adam.fused_optimizer.save_param_groups(False)
    with pytest.raises(ConfigError, match=r"saved states of bags\.embedding_bags\.t0\.weight are \['t0\.exp"):
        adagrad.fused_optimizer.load_state_dict(adam.fused_optimizer.state_dict())

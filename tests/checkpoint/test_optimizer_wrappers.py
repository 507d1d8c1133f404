"""TorchRec's wrappers of optimizers, which keep states and parameters of their own, through each carrier of state."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torchrec.optim.clipping import GradientClipping, GradientClippingOptimizer
from torchrec.optim.keyed import KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.warmup import WarmupOptimizer, WarmupStage

from shardrec import load_checkpoint, save_checkpoint, warm_start
from shardrec.layout import Topology
from shardrec.modules import ShardedModel
from tests.checkpoint.reshards import Case, Table, batch_of, make, plan_of
from tests.ranks import ranks

TABLES = {
    "a": Table(rows=40, cuts=("table_wise", "row_wise")),
    "b": Table(rows=24, optimizer="none", cuts=("row_wise", "column_wise")),
}
CASE = Case(tables=TABLES, plans=[plan_of(TABLES, number, Random(5), Topology(ranks_per_host=2)) for number in (0, 1)])


def warm_up(optimizer: Any) -> Any:
    return WarmupOptimizer(optimizer, [WarmupStage(max_iters=10, value=0.1)], lr=0.5)


def keyed(model: ShardedModel) -> Any:
    trained = dict(in_backward_optimizer_filter(model.named_parameters()))
    optimizer = KeyedOptimizerWrapper(trained, partial(torch.optim.Adagrad, lr=0.1))
    return GradientClippingOptimizer(optimizer, GradientClipping.VALUE, 0.01)


def train(model: ShardedModel, optimizers: list[Any], steps: range) -> list[float]:
    """The losses of some steps, and the learning rates that they are made with."""
    seen = []
    for step in steps:
        optimizers[1].zero_grad()
        loss = model(batch_of(CASE, step)).sum()
        seen += [loss.item(), *(group["lr"] for each in optimizers for group in each.param_groups)]
        loss.backward()
        for each in optimizers:
            each.step()
    return seen


def carried(carrier: str, model: ShardedModel, optimizers: list[Any], folder: Path) -> tuple[ShardedModel, list[Any]]:
    """The model that goes on, with its optimizers."""
    if carrier == "reshard":
        model.reshard(CASE.plans[1], optimizers[1])
        return model, optimizers
    if carrier == "deep copy":
        other = copy.deepcopy(model)
        ordinary = warm_up(keyed(other))
        if optimizers[1]._warmup_param in optimizers[1].state:
            ordinary.init_state()  # TorchRec's loading takes states that are there
        ordinary.load_state_dict(optimizers[1].state_dict())
        return other, [warm_up(other.fused_optimizer), ordinary]
    other = make(CASE, CASE.plans[1])[0]
    ordinary = warm_up(keyed(other))
    fused = [warm_up(other.fused_optimizer)] if carrier == "checkpoint" else []
    save_checkpoint(folder / "1", model, optimizers[1])
    load_checkpoint(folder / "1", other, ordinary)
    if carrier == "checkpoint of a checkpoint":
        save_checkpoint(folder / "2", other, ordinary)
        other = make(CASE, CASE.plans[0])[0]
        load_checkpoint(folder / "2", other, ordinary := warm_up(keyed(other)))
    return other, [*(fused or [warm_up(other.fused_optimizer)]), ordinary]


CARRIERS = ["checkpoint", "checkpoint before the wrapper", "checkpoint of a checkpoint", "deep copy", "reshard"]


def warmed_up(steps: int) -> tuple[ShardedModel, list[Any]]:
    """A model and its optimizers after some steps."""
    model = make(CASE, CASE.plans[0])[0]
    optimizers = [warm_up(model.fused_optimizer), warm_up(keyed(model))]
    train(model, optimizers, range(steps))
    return model, optimizers


def test_a_warm_up_goes_on(tmp_path: Path) -> None:
    """Through each carrier, before the first step and in the middle, as without it."""

    def rank_main() -> None:
        for steps in (0, 4):
            expected = train(*warmed_up(steps), range(steps, steps + 3))
            for carrier in CARRIERS:
                other, of_other = carried(carrier, *warmed_up(steps), tmp_path / f"{carrier} {steps}")
                losses = train(other, of_other, range(steps, steps + 3))
                assert losses == pytest.approx(expected, rel=1e-5), carrier
                for each in of_other:
                    each.load_state_dict(each.state_dict())
                trained = dict(in_backward_optimizer_filter(other.named_parameters()))
                assert {*of_other[1].params} == {"__warmup", *trained}, carrier

    ranks(2, rank_main)


def test_a_wrapper_is_not_touched_by_a_warm_start_and_begins_again_with_a_checkpoint_without_it(tmp_path: Path) -> None:
    def rank_main() -> None:
        model, other = (make(CASE, CASE.plans[0])[0] for _ in range(2))
        optimizers = [[warm_up(each.fused_optimizer), warm_up(keyed(each))] for each in (model, other)]
        save_checkpoint(tmp_path / "first", model, optimizers[0][1])
        train(model, optimizers[0], range(2))
        save_checkpoint(tmp_path / "second", model, optimizers[0][1])
        train(other, optimizers[1], range(3))
        warm_start(tmp_path / "second", other)
        assert [int(each.state[each._warmup_param]["warmup"][0]) for each in optimizers[1]] == [3, 3]
        load_checkpoint(tmp_path / "second", other, optimizers[1][1])
        assert [int(each.state[each._warmup_param]["warmup"][0]) for each in optimizers[1]] == [2, 2]
        load_checkpoint(tmp_path / "first", other, optimizers[1][1])
        assert not any(each._warmup_param in each.state for each in optimizers[1])

    ranks(2, rank_main)


def test_a_reshard_that_fails_leaves_a_keyed_optimizer_as_it_was() -> None:
    def rank_main() -> None:
        model = make(CASE, CASE.plans[0])[0]
        optimizer = keyed(model)
        train(model, [model.fused_optimizer, optimizer], range(1))
        before, state = dict(optimizer.params), optimizer.state_dict()["state"]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("shardrec.checkpoint.reshard.Messages", fail)
            with pytest.raises(ZeroDivisionError):
                model.reshard(CASE.plans[1], optimizer)
        assert optimizer.params == before
        assert optimizer.state_dict()["state"].keys() == state.keys()

    def fail(*_: object) -> None:
        raise ZeroDivisionError

    ranks(2, rank_main)

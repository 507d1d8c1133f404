"""Checkpoints: saved under one plan, loaded under another, training goes on as if nothing had happened."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torchrec
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor

from shardrec import load_checkpoint, save_checkpoint, shard
from shardrec.errors import CheckpointError, ConfigError
from shardrec.layout import ShardingPlan, Topology, cuts
from shardrec.modules import ShardedModel
from tests.ranks import ranks

ROWS = {"a": 13, "b": 9, "c": 21}
DIM = 8


class Model(nn.Module):
    def __init__(self, rows: dict[str, int]) -> None:
        super().__init__()
        self.bags = EmbeddingBagCollection(
            tables=[
                EmbeddingBagConfig(name=f"t_{key}", num_embeddings=size, embedding_dim=DIM, feature_names=[key])
                for key, size in rows.items()
            ]
        )
        self.norm = nn.BatchNorm1d(len(rows) * DIM)
        self.top = nn.Linear(len(rows) * DIM, 1)

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        value: torch.Tensor = self.top(self.norm(self.bags(features).values()))
        return value


def make(kind: str, world: int, optimizer: str, rows: dict[str, int] = ROWS) -> ShardedModel:
    torch.manual_seed(3)
    model = Model(rows)
    classes: dict[str, Any] = {
        "adagrad": torch.optim.Adagrad,
        "rowwise": torchrec.optim.RowWiseAdagrad,
        "adam": torch.optim.Adam,
    }
    if optimizer in classes:
        _apply_optimizer_in_backward(classes[optimizer], model.bags.parameters(), {"lr": 0.1})
    everyone = list(range(world))
    layouts = []
    for index, (key, size) in enumerate(rows.items()):
        name = f"bags.t_{key}"
        if kind == "rows":
            layouts.append(cuts.row_wise(name, size, DIM, ranks=everyone))
        elif kind == "columns":
            layouts.append(cuts.column_wise(name, size, DIM, ranks=[index % world, (index + 1) % world]))
        elif index == 0:
            layouts.append(cuts.data_parallel(name, size, DIM))
        else:
            layouts.append(cuts.table_wise(name, size, DIM, rank=index % world))
    return shard(model, ShardingPlan(topology=Topology(ranks_per_host=world), tables=tuple(layouts)))


def batch(step: int, size: int) -> KeyedJaggedTensor:
    generator = torch.Generator().manual_seed(step)
    values = [torch.randint(rows, (size * 2,), generator=generator) for rows in ROWS.values()]
    lengths = torch.full((len(ROWS) * size,), 2, dtype=torch.int32)
    return KeyedJaggedTensor(keys=list(ROWS), values=torch.cat(values), lengths=lengths)


def train(model: ShardedModel, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    """The same batch on every rank, so that the losses do not depend on the number of ranks."""
    losses = []
    for step in steps:
        optimizer.zero_grad()
        loss = (model(batch(step, 6)) - 1.0).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def dense_optimizer(model: ShardedModel) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.dense_parameters(), lr=0.01)


def save_run(path: Path, kind: str, name: str) -> list[float]:
    world = dist.get_world_size()
    model = make(kind, world, name)
    optimizer = dense_optimizer(model)
    train(model, optimizer, range(2))
    save_checkpoint(path, model, optimizer, extra={"step": 2})
    return train(model, optimizer, range(2, 5))


def load_run(path: Path, kind: str, name: str) -> list[float]:
    world = dist.get_world_size()
    model = make(kind, world, name)
    optimizer = dense_optimizer(model)
    train(model, optimizer, range(7, 8))  # so that nothing is left of a fresh start
    assert load_checkpoint(path, model, optimizer) == {"step": 2}
    return train(model, optimizer, range(2, 5))


@pytest.mark.parametrize("name", ["adagrad", "rowwise", "adam", "none"])
@pytest.mark.parametrize(("saved", "loaded"), [((2, "rows"), (4, "columns")), ((2, "columns"), (1, "rows"))])
def test_training_goes_on_under_another_plan(
    tmp_path: Path, saved: tuple[int, str], loaded: tuple[int, str], name: str
) -> None:
    path = tmp_path / "ckpt"
    expected = ranks(saved[0], save_run, path, saved[1], name)[0]
    actual = ranks(loaded[0], load_run, path, loaded[1], name)[0]
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["ckpt"]


@pytest.mark.parametrize("name", ["adam", "none"])
def test_replicated_tables(tmp_path: Path, name: str) -> None:
    path = tmp_path / "ckpt"
    expected = ranks(2, save_run, path, "mixed", name)[0]
    actual = ranks(2, load_run, path, "mixed", name)[0]
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(ranks(1, load_run, path, "rows", name)[0], expected, rtol=1e-4, atol=1e-5)


def test_an_older_checkpoint_is_replaced(tmp_path: Path) -> None:
    model = make("rows", 1, "adagrad")
    for step in range(2):
        save_checkpoint(tmp_path / "ckpt", model, extra={"step": step})
    assert load_checkpoint(tmp_path / "ckpt", model) == {"step": 1}
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["ckpt"]


def test_a_folder_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is not a complete checkpoint"):
        load_checkpoint(tmp_path, make("rows", 1, "adagrad"))


def test_another_model_is_refused_and_keeps_its_weights(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "ckpt", make("rows", 1, "adagrad"))
    bigger = make("rows", 1, "adagrad", {**ROWS, "b": 10})
    before = bigger.state_dict()["bags.embedding_bags.t_b.weight"].clone()
    with pytest.raises(ConfigError, match=r"t_b\.weight has shape \(9, 8\)"):
        load_checkpoint(tmp_path / "ckpt", bigger)
    with pytest.raises(ConfigError, match=r"it lacks .*t_d"):
        load_checkpoint(tmp_path / "ckpt", make("rows", 1, "adagrad", {**ROWS, "d": 5}))
    assert torch.equal(before, bigger.state_dict()["bags.embedding_bags.t_b.weight"])


def test_other_fused_optimizers_are_refused(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "ckpt", make("rows", 1, "adagrad"))
    with pytest.raises(ConfigError, match="exp_avg"):
        load_checkpoint(tmp_path / "ckpt", make("rows", 1, "adam"))

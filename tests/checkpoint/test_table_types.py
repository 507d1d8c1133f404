"""Checkpoints of 16-bit tables: weights keep their bits and states stay float32, under any plan and number of ranks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from random import Random

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from shardrec import load_checkpoint, save_checkpoint, shard
from shardrec.checkpoint.data_files import DTYPES
from shardrec.checkpoint.manifest import read_manifest
from shardrec.layout import Shard
from shardrec.modules import ShardedModel
from shardrec.modules.collection import ShardedCollection
from shardrec.modules.given_tables import TABLE_DTYPES
from tests.batches import random_bags
from tests.models import OPTIMIZERS, apply_optimizer_in_backward
from tests.plans import cut_plan, topologies_of
from tests.ranks import ranks

ROWS = {"a": 13, "b": 9, "c": 21}
DIM = 8
MIXED = {"a": DataType.FP16, "b": DataType.BF16, "c": DataType.FP32}

Parts = list[tuple[str, Shard | None, Tensor]]
"""A rank's parts of tables and states: ``"<table>.<weight or state>"``, place, numbers."""


def make(cut: str, optimizer: str, types: Mapping[str, DataType]) -> ShardedModel:
    torch.manual_seed(3)
    configs = [
        EmbeddingBagConfig(
            name=f"t_{key}", num_embeddings=rows, embedding_dim=DIM, feature_names=[key], data_type=types[key]
        )
        for key, rows in ROWS.items()
    ]
    module = EmbeddingBagCollection(tables=configs)
    choice = OPTIMIZERS[optimizer]
    if choice.optimizer is not None:
        apply_optimizer_in_backward(choice.optimizer, module.parameters(), dict(choice.settings))
    sizes = {f"t_{key}": (rows, DIM) for key, rows in ROWS.items()}
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    return shard(module, cut_plan(cut, Random(cut), sizes, topologies_of(world_size)[0]))


def dense_optimizer(model: ShardedModel) -> torch.optim.Optimizer | None:
    collection = model.module
    assert isinstance(collection, ShardedCollection)
    if collection.fused_optimizers():
        return None
    return torch.optim.Adagrad(model.parameters(), lr=0.1, initial_accumulator_value=0.1)


def train(model: ShardedModel, optimizer: torch.optim.Optimizer | None, seed: int) -> None:
    values = model(random_bags(Random(seed), ROWS, 5).kjt()).values()
    (values - 0.3).square().sum().backward()
    if optimizer is not None:
        optimizer.step()
        optimizer.zero_grad()


def parts_of(model: ShardedModel, optimizer: torch.optim.Optimizer | None) -> Parts:
    """Weights, fused states and a dense optimizer's sums."""
    collection = model.module
    assert isinstance(collection, ShardedCollection)
    found: Parts = []
    fused = collection.fused_optimizers()
    for name, table in collection.tables().items():
        found += [(f"{name}.weight", place, weight.detach()) for place, weight in table.locals.items()]
        for state in fused[name].states if name in fused else ():
            found += [(f"{name}.{state}", place, one) for place, one in collection.fused_state(name, state).items()]
        for place, weight in table.locals.items():
            if optimizer is not None and weight in optimizer.state:
                found.append((f"{name}.dense sum", place, optimizer.state[weight]["sum"]))
    return found


def save_run(path: Path, cut: str, name: str, types: Mapping[str, DataType]) -> Parts:
    model = make(cut, name, types)
    optimizer = dense_optimizer(model)
    for seed in range(2):
        train(model, optimizer, seed)
    save_checkpoint(path, model, optimizer)
    return parts_of(model, optimizer)


def load_run(path: Path, cut: str, name: str, types: Mapping[str, DataType]) -> Parts:
    model = make(cut, name, types)
    optimizer = dense_optimizer(model)
    train(model, optimizer, 7)  # so that nothing is left of a fresh start
    load_checkpoint(path, model, optimizer)
    return parts_of(model, optimizer)


def whole(results: list[Parts]) -> dict[str, Tensor]:
    """The tables and states put together from all ranks' parts."""
    found: dict[str, Tensor] = {}
    for name, place, part in (entry for parts in results for entry in parts):
        rows = ROWS[name[2]]
        shape = (rows,) if part.dim() == 1 else (rows, DIM)
        value = found.setdefault(name, torch.full(shape, float("nan"), dtype=part.dtype))
        if place is None:
            value.copy_(part)
        elif part.dim() == 1:
            value[place.row_start : place.row_end] = part
        else:
            value[place.row_start : place.row_end, place.col_start : place.col_end] = part
    return found


@pytest.mark.some(4)
@pytest.mark.parametrize("name", ["rowwise_adagrad", "adam", "none"])
@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        ((2, "row_wise"), (4, "column_wise")),
        ((2, "column_wise"), (1, "table_wise")),
        ((2, "data_parallel"), (2, "grid")),
    ],
)
def test_another_plan_gets_the_same_bits(
    tmp_path: Path, saved: tuple[int, str], loaded: tuple[int, str], name: str
) -> None:
    path = tmp_path / "checkpoint"
    before = whole(ranks(saved[0], save_run, path, saved[1], name, MIXED))
    stored = read_manifest(path).tensors
    for key, data_type in MIXED.items():
        dtype = TABLE_DTYPES[data_type]
        assert before[f"t_{key}.weight"].dtype is dtype
        assert DTYPES[stored[f"model.embedding_bags.t_{key}.weight"].dtype] is dtype
    after = whole(ranks(loaded[0], load_run, path, loaded[1], name, MIXED))
    assert after.keys() == before.keys()
    for key, value in before.items():
        assert after[key].dtype is value.dtype, key
        assert not key.endswith(("sum", "exp_avg", "exp_avg_sq")) or value.dtype is torch.float32 or "dense" in key
        assert torch.equal(after[key], value), key


@pytest.mark.parametrize(("saved", "loaded"), [(DataType.FP32, DataType.FP16), (DataType.BF16, DataType.FP32)], ids=str)
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_model_of_another_type_gets_the_numbers_rounded_to_it(
    tmp_path: Path, world_size: int, saved: DataType, loaded: DataType
) -> None:
    """As ``load_state_dict`` does; optimizer states are float32 on both sides."""
    path = tmp_path / "checkpoint"
    before, after = (
        whole(ranks(world_size, run, path, cut, "adagrad", dict.fromkeys(ROWS, types)))
        for run, cut, types in ((save_run, "row_wise", saved), (load_run, "grid", loaded))
    )
    for key, value in before.items():
        expected = value.to(TABLE_DTYPES[loaded]) if key.endswith("weight") else value
        assert torch.equal(after[key], expected), key

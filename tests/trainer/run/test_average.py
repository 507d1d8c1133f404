"""Averaged weights, beside those that are kept whole after each step; in checkpoints, metrics and exports."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torchrec
from torch import Tensor, nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import shardrec
from shardrec import Checkpoints
from shardrec.layout import ShardingPlan, Topology, cuts
from shardrec.modules import ShardedModel
from shardrec.trainer.run import RunFolder, TrainConfig
from shardrec.trainer.run.average import Average
from tests.models import apply_optimizer_in_backward
from tests.ranks import ranks
from tests.trainer.run.broken_off import FEW_TABLES, SMALL, broken_off

ROWS, DIM = 20, 8
OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.3}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.1, "initial_accumulator_value": 2.0}),
    "rowwise_adagrad": (torchrec.optim.RowWiseAdagrad, {"lr": 0.1}),
}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tables = EmbeddingBagCollection(
            tables=[
                EmbeddingBagConfig(name=f"t{n}", num_embeddings=ROWS, embedding_dim=DIM, feature_names=[f"f{n}"])
                for n in range(4)
            ]
        )
        self.top = nn.Linear(4 * DIM, 1)

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        logits: Tensor = self.top(self.tables(features).values())
        return logits


def sharded(optimizer: str) -> tuple[ShardedModel, list[torch.optim.Optimizer]]:
    """A model with a table by each of four cuts, and its optimizers."""
    model = Model()
    cls, settings = OPTIMIZERS[optimizer]
    apply_optimizer_in_backward(cls, model.tables.parameters(), dict(settings))
    world = dist.get_world_size() if dist.is_initialized() else 1
    layouts = (
        cuts.row_wise("tables.t0", ROWS, DIM, ranks=range(world)),
        cuts.table_wise("tables.t1", ROWS, DIM, rank=world - 1),
        cuts.column_wise("tables.t2", ROWS, DIM, ranks=range(world)),
        cuts.data_parallel("tables.t3", ROWS, DIM),
    )
    plan = ShardingPlan(topology=Topology(ranks_per_host=world), tables=layouts)
    trained = shardrec.shard(model, plan, update="step")
    return trained, [torch.optim.Adam(trained.dense_parameters(), lr=0.01), trained.fused_optimizer]


def train_step(
    model: ShardedModel, optimizers: list[torch.optim.Optimizer], generator: torch.Generator, rows: int
) -> None:
    """On ids below ``rows``, of this rank's own."""
    ids = torch.randint(rows, (4 * 3 * 2,), generator=generator)
    names = [f"f{number}" for number in range(4)]
    features = KeyedJaggedTensor.from_lengths_sync(names, ids, torch.full((4 * 3,), 2, dtype=torch.int32))
    (model(features) ** 2).mean().backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def weights(model: ShardedModel) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def furthest_average(optimizer: str, decay: float) -> float:
    """The largest difference of an averaged weight from the average of what was kept after each step."""
    model, optimizers = sharded(optimizer)
    average = Average(model, optimizers[0], decay)
    generator = torch.Generator().manual_seed(dist.get_rank())
    with average.applied():
        first = weights(model)
    assert all(torch.equal(value, now) for value, now in zip(first, weights(model), strict=True))
    kept: list[list[Tensor]] = []
    most = 0.0
    for step in range(8):
        train_step(model, optimizers, generator, rows=3 + 4 * (step % 3))  # so that rows rest for some steps
        kept.append(weights(model))
        total = sum(decay**age for age in range(len(kept)))
        expected = [
            sum(decay**age * value for age, value in enumerate(reversed(values))) / total
            for values in zip(*kept, strict=True)
        ]
        with average.applied():
            most = max(most, *(float((a - b).abs().max()) for a, b in zip(weights(model), expected, strict=True)))
        assert all(torch.equal(value, now) for value, now in zip(kept[-1], weights(model), strict=True))
    steps = [
        state["average_step"]
        for collection in model.sharded_collections
        for rows in collection.shards.row_optimizers()
        for state in rows.states()
        if len(state["average_step"]) == ROWS
    ]
    assert steps, "those of the column-wise table"
    assert all(int(last.max()) == 7 for last in steps)
    assert all(int(last[11:].max()) == 0 for last in steps), "rows that no step has looked up are not written"
    return most


@pytest.mark.some(3)
@pytest.mark.parametrize("decay", [0.5, 0.99])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_averages_are_those_of_the_weights_after_each_step(optimizer: str, decay: float) -> None:
    """Of tables by four cuts, replicated ones among them, and of the dense part."""
    assert max(ranks(2, furthest_average, optimizer, decay)) < 1e-6


def test_the_average_of_a_row_with_a_new_id_is_its_new_value() -> None:
    model, optimizers = sharded("adagrad")
    average = Average(model, optimizers[0], 0.9)
    (collection,) = model.sharded_collections
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        train_step(model, optimizers, generator, ROWS)
    shard = next(shard for shard in collection.shards.shards if shard.table == "tables.t0")
    weight, rows = collection.shards.weight(shard), torch.tensor([3, 7])
    collection.renew_rows(shard, rows, step=3)
    drawn = weight[rows].clone()
    assert int(collection.shards.states(shard)["average_step"][rows].max()) == 0
    with average.applied():
        torch.testing.assert_close(weight[rows], drawn, rtol=0, atol=0)
        assert not torch.equal(weight[[2, 6]], drawn)
    train_step(model, optimizers, generator, ROWS)
    with average.applied():
        assert torch.isfinite(weight).all()


@pytest.mark.usefixtures("few_tables")
def test_metrics_checkpoints_and_exports_take_the_averages(tmp_path: Path) -> None:
    """Of two ranks with tables by rows and by columns, loaded on one; the checkpoint has the weights, too."""

    def train(config: TrainConfig) -> None:
        broken_off(config)

    config = SMALL.changed(
        ema=0.9, batch_size=32, embedding_lr=0.1, out=str(tmp_path), checkpoint_incremental=1, checkpoint_every="10"
    ).changed(constraint=("t_cat_1*=row_wise", "t_cat_2=column_wise", "t_cat_3=data_parallel"))
    ranks(2, train, config)
    metrics = json.loads((tmp_path / "metrics.json").read_text(encoding="utf-8"))
    assert metrics["curve"][-1]["logloss"] == metrics["final"]["logloss"]
    run = RunFolder(tmp_path)
    assert run.evaluate()[0].logloss == pytest.approx(metrics["final"]["logloss"], abs=1e-6)
    averaged, model = run.model(), sharded_as_trained(run)
    assert Checkpoints(tmp_path / "checkpoints").load_last(model) is not None
    moved = [float((a - b).abs().max()) for a, b in zip(weights(averaged), weights(model), strict=True)]
    assert sum(distance > 1e-4 for distance in moved) > len(FEW_TABLES), "the weights themselves are in the checkpoint"


def sharded_as_trained(run: RunFolder) -> ShardedModel:
    """The run's model, without averages."""
    from shardrec.trainer.run.model import build_model, fuse_optimizer

    model = build_model(run.config, run.spec.schema_)
    fuse_optimizer(model, run.config)
    return shardrec.shard(model)

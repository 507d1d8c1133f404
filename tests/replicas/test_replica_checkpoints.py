"""Checkpoints of replicas: written once, and loaded at any world size."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from shardrec import load_checkpoint, save_checkpoint
from shardrec.layout import Topology
from shardrec.modules import ShardedModel, shard
from shardrec.replicas import Replicas, ReplicatedModel
from tests.batches import random_bags
from tests.models import (
    click_model,
    collection,
)
from tests.modules.clicks import (
    CONFIGS,
    ROWS,
    SIZES,
    assert_tables_equal,
)
from tests.modules.replicated import click_loss, copies_are_equal
from tests.modules.tables import local_part
from tests.plans import random_plan
from tests.ranks import ranks


def checkpoint_model(optimizer: str, size: int, **kwargs: Any) -> ShardedModel:
    model = click_model(CONFIGS, optimizer=optimizer)
    inside = random_plan(Random(8), SIZES, Topology(ranks_per_host=size))
    return shard(model, inside, **kwargs)


def train_on(model: ShardedModel, optimizer: torch.optim.Optimizer, steps: int, seed: int) -> Tensor:
    """Steps with the same batch on every rank, so that they do not depend on the number of ranks."""
    rng, losses = Random(seed), []
    for _ in range(steps):
        bags = random_bags(rng, ROWS, 4, shuffled=False)
        loss = click_loss(model, torch.ones(4, 3), bags, torch.tensor([0.0, 1.0, 1.0, 0.0]))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses)


def dense_adam(model: ShardedModel) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.dense_parameters(), lr=0.02)


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("optimizer", "sync_optimizer"),
    [("adagrad", True), ("adam", False), pytest.param("none", True, marks=pytest.mark.slow)],
)
def test_a_checkpoint_of_drifted_replicas_loads_anywhere(tmp_path: Path, optimizer: str, sync_optimizer: bool) -> None:
    def save_main() -> tuple[Tensor, dict[str, Tensor]]:
        model = checkpoint_model(optimizer, 2, replicas=Replicas(2, sync_every=9, sync_optimizer=sync_optimizer))
        assert isinstance(model, ReplicatedModel)
        adam = dense_adam(model)
        train_on(model, adam, 2, seed=1)
        drift = train_on(model, adam, 2, seed=2 + model.replica_groups.replica)
        assert drift.isfinite().all()
        save_checkpoint(tmp_path / "ckpt", model, adam, extra={"step": 4})
        assert model.steps_since_sync == 0
        whole = collection(CONFIGS)
        gathered: list[Any] = [None] * 4
        dist.all_gather_object(
            gathered,
            [
                (name, place, parameter.detach())
                for name, table in model.module.sparse.tables().items()
                for place, parameter in table.locals.items()
            ],
        )
        for name, place, values in (entry for entries in gathered[:2] for entry in entries):
            local_part(whole.embedding_bags[name].weight.detach(), place).copy_(values)
        return train_on(model, adam, 2, seed=7), {name: one.detach() for name, one in whole.named_parameters()}

    # The second loss also depends on the states, as far as replica 0 has them.
    def load_main(size: int, **kwargs: Any) -> tuple[Tensor, bool]:
        model = checkpoint_model(optimizer, size, **kwargs)
        adam = dense_adam(model)
        train_on(model, adam, 1, seed=5)
        assert load_checkpoint(tmp_path / "ckpt", model, adam) == {"step": 4}
        alike = not isinstance(model, ReplicatedModel) or (copies_are_equal(model) and not model.steps_since_sync)
        whole = unsharded(tables)
        assert_tables_equal(model.module, whole, "loaded", atol=0.0)
        return train_on(model, adam, 2, seed=7), alike

    def unsharded(values: dict[str, Tensor]) -> nn.Module:
        model = click_model(CONFIGS)
        model.sparse.load_state_dict(values)
        return model

    expected, tables = ranks(4, save_main)[0]
    for world, size, kwargs in (
        (1, 1, {}),
        (2, 2, {}),
        (4, 1, {"replicas": Replicas(4)}),
        (4, 2, {"replicas": Replicas(2)}),
    ):
        for losses, alike in ranks(world, load_main, size, **kwargs):
            assert alike
            torch.testing.assert_close(losses, expected, rtol=1e-4, atol=1e-5)


def test_a_state_dict_is_saved_once_per_shard(tmp_path: Path) -> None:
    """torch.distributed.checkpoint over all the ranks, as users call it themselves."""

    def rank_main() -> None:
        model = checkpoint_model("adagrad", 2, replicas=Replicas(2, sync_every=9))
        assert isinstance(model, ReplicatedModel)
        train_on(model, dense_adam(model), 2, seed=dist.get_rank() // 2)
        model.sync_replicas()
        dcp.save(model.state_dict(), checkpoint_id=tmp_path / "dcp")
        saved = [one.clone() for _, one in model._weights()]
        for _, weight in model._weights():
            weight.zero_()
        target = model.state_dict()
        dcp.load(target, checkpoint_id=tmp_path / "dcp")
        model.load_state_dict(target)
        assert all(
            torch.equal(one, two) for one, two in zip(saved, (weight for _, weight in model._weights()), strict=True)
        )

    ranks(4, rank_main)
    written = sum(path.stat().st_size for path in (tmp_path / "dcp").glob("*.distcp"))
    listed = dcp.FileSystemReader(tmp_path / "dcp").read_metadata().storage_data
    assert written == sum(entry.length for entry in listed.values())

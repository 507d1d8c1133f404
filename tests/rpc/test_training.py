"""Two trainers with two servers against the same model sharded by collectives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import shardrec
from shardrec.rpc import EmbeddingServer, RpcWorld
from tests.ranks import ranks
from tests.rpc.jobs import in_job, make_model, make_plan, train

STEPS = 50


def _whole(folder: Path, optimizer: str) -> dict[str, Tensor]:
    """Weights, states and step counts of a checkpoint, on one rank."""
    model = shardrec.shard(make_model(optimizer))
    shardrec.load_checkpoint(folder, model)
    found = {name: value.clone() for name, value in model.state_dict().items()}
    for collection in (model.bags, model.sequences):
        for name, fused in collection.fused_optimizers().items():
            for state in fused.states:
                (part,) = collection.fused_state(name, state).values()
                found[f"{name}.{state}"] = part.clone()
        found |= {f"{name}.steps": torch.tensor(count) for name, count in collection.step_counts().items()}
    return found


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "rowwise_adagrad", "adam"])
def test_staleness_0_equals_collectives(optimizer: str, tmp_path: Path) -> None:
    plan = make_plan(optimizer)

    def by_collectives() -> list[float]:
        model = shardrec.shard(make_model(optimizer), plan)
        losses = train(model, dist.get_rank(), range(STEPS))
        shardrec.save_checkpoint(tmp_path / "collectives", model)
        return losses

    def trainer(world: RpcWorld, rank: int, group: Any) -> list[float]:
        model = shardrec.shard(make_model(optimizer), plan, servers=world.servers, group=group)
        losses = train(model, rank, range(STEPS // 2))
        shardrec.save_checkpoint(tmp_path / "half", model)
        shardrec.load_checkpoint(tmp_path / "half", model)
        losses += train(model, rank, range(STEPS // 2, STEPS))
        shardrec.save_checkpoint(tmp_path / "servers", model)
        return losses

    def with_servers() -> Any:
        return in_job(str(tmp_path / "store"), trainer, lambda rank: EmbeddingServer(make_model(optimizer), plan, rank))

    expected = ranks(2, by_collectives)
    found = ranks(4, with_servers)[:2]
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=0, atol=1e-6)
    wanted, got = _whole(tmp_path / "collectives", optimizer), _whole(tmp_path / "servers", optimizer)
    assert got.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(got[name], value, rtol=0, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")

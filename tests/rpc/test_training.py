"""Two trainers with two servers against the same model sharded by collectives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardrec
from shardrec.rpc import EmbeddingServer, RpcWorld
from tests.ranks import ranks
from tests.rpc.jobs import batch, in_job, make_model, make_plan, train


def _by_collectives(optimizer: str, steps: int) -> list[Any]:
    def run() -> Any:
        rank = dist.get_rank()
        model = shardrec.shard(make_model(optimizer), make_plan(optimizer))
        losses = train(model, rank, range(steps))
        from tests.modules.parity import whole_state

        return losses, whole_state(model)

    return ranks(2, run)


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "rowwise_adagrad", "adam"])
def test_staleness_0_equals_collectives(optimizer: str, tmp_path: Path) -> None:
    def trainer(world: RpcWorld, rank: int, group: Any) -> Any:
        model = shardrec.shard(make_model(optimizer), make_plan(optimizer), servers=world.servers, group=group)
        losses = train(model, rank, range(50))
        return losses, {name: value.clone() for name, value in model.state_dict().items()}

    def run() -> Any:
        plan = make_plan(optimizer)
        return in_job(str(tmp_path / "store"), trainer, lambda rank: EmbeddingServer(make_model(optimizer), plan, rank))

    remote = ranks(4, run)
    print(remote[0][0][:5], remote[0][0][-3:])

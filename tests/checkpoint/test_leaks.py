"""What is left of a model that is dropped: no tables, no groups, no descriptors, no threads."""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from shardrec import save_checkpoint, shard
from shardrec.layout import ShardingPlan, Topology, cuts
from shardrec.modules import ShardedModel
from shardrec.replicas import Replicas
from tests.batches import random_bags
from tests.checkpoint.models import DIM, ROWS, Click
from tests.models import apply_optimizer_in_backward
from tests.ranks import ranks


def open_here() -> list[int]:
    gc.collect()
    dist.barrier()
    return [len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), len(distributed_c10d._world.pg_map)]


def make(ranks_of_plan: int = 2, **options: Any) -> tuple[ShardedModel, list[weakref.ref[torch.Tensor]]]:
    torch.manual_seed(0)
    module = Click()
    apply_optimizer_in_backward(torch.optim.Adam, module.bags.parameters(), {"lr": 0.1})
    tables = [weakref.ref(weight) for weight in module.bags.parameters()]
    layouts = [cuts.row_wise(f"bags.t_{key}", rows, DIM, ranks=range(ranks_of_plan)) for key, rows in ROWS.items()]
    plan = ShardingPlan(topology=Topology(ranks_per_host=ranks_of_plan), tables=tuple(layouts))
    return shard(module, plan, **options), tables


def plain(folder: Path) -> tuple[ShardedModel, Any]:
    return make()


def at_step(folder: Path) -> tuple[ShardedModel, Any]:
    return make(update="step")


def replicated(folder: Path) -> tuple[ShardedModel, Any]:
    return make(1, replicas=Replicas(2))


def saved(folder: Path) -> tuple[ShardedModel, Any]:
    model, tables = make()
    save_checkpoint(folder, model, wait=False).wait()
    return model, tables


@pytest.mark.parametrize("use", [plain, at_step, replicated, saved])
def test_nothing_is_left_of_a_model(use: Callable[[Path], tuple[ShardedModel, Any]], tmp_path: Path) -> None:
    def rank_main() -> None:
        counts = []
        for _ in range(3):
            model, tables = use(tmp_path / "ckpt")
            gc.collect()
            assert not any(table() is not None for table in tables), "the unsharded tables are kept"
            model(random_bags(Random(3), ROWS, 5).kjt()).sum().backward()
            model.fused_optimizer.step()
            dropped = weakref.ref(model)
            del model
            counts.append(open_here())
            assert dropped() is None
        assert counts[-1] == counts[0]

    ranks(2, rank_main)

"""2 embedding servers and 2 trainers on this machine: ``python -m examples.parameter_server.main``.

Each trainer trains the model with its tables on the servers, then the same model sharded over the two trainers by
collectives. The first trainer prints both losses.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.functional import binary_cross_entropy_with_logits

import shardrec
from examples.parameter_server.model import DIM, FEATURES, batch, build
from shardrec.launch.ranks import RankInfo
from shardrec.launch.run import on_new_ranks
from shardrec.layout import ShardingPlan, Topology, cuts
from shardrec.rpc import RemoteModel, RpcWorld
from shardrec.rpc.server_process import open_store

__all__ = ["compare", "main", "make_plan", "train"]

SERVERS = ["server0", "server1"]
STEPS = 200


def make_plan() -> ShardingPlan:
    """Half of the tables whole, half of them cut by rows."""
    rows = build().sparse_arch.embedding_bag_collection.embedding_bag_configs()[0].num_embeddings
    path = "sparse_arch.embedding_bag_collection.t"
    tables = [
        cuts.row_wise(f"{path}{one}", rows, DIM, ranks=[0, 1])
        if one % 2
        else cuts.table_wise(f"{path}{one}", rows, DIM, rank=one // 2 % 2)
        for one in range(FEATURES)
    ]
    return ShardingPlan(topology=Topology(ranks_per_host=2), tables=tuple(tables))


def train(model: shardrec.ShardedModel, trainer: int, steps: int) -> list[float]:
    """Losses of this trainer's batches."""
    optimizer = torch.optim.Adagrad(model.dense_parameters(), lr=0.01)
    losses = []
    for step in range(steps):
        dense, features, labels = batch(step, trainer)
        loss = binary_cross_entropy_with_logits(model(dense, features).squeeze(1), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def compare(rank_info: RankInfo, store: str, steps: int, staleness: int) -> tuple[list[float], list[float]]:
    """On one of two trainers: its losses with servers, up to ``staleness`` updates late, and by collectives."""
    world = RpcWorld(open_store(store), trainers=2, servers=SERVERS, name=f"trainer{rank_info.rank}")
    with world.joined():
        servers = shardrec.Servers(world.servers, staleness=staleness)
        model = shardrec.shard(build(), make_plan(), servers=servers)
        remote = train(model, rank_info.rank, steps)
        if isinstance(model, RemoteModel):
            model.flush()
        dist.barrier()
        world.end()
    local = train(shardrec.shard(build(), make_plan()), rank_info.rank, steps)
    return remote, local


def main(steps: int = STEPS, staleness: int = 0) -> None:
    """Start the servers, and train on two ranks."""
    with tempfile.TemporaryDirectory() as folder:
        store, plan = f"file://{folder}/store", Path(folder) / "plan.json"
        make_plan().save(plan)
        serve = [sys.executable, "-W", "ignore", "-m", "shardrec.trainer.cli", "serve-embeddings"]
        serve += ["examples.parameter_server.model:build", "--store", store, "--servers", ",".join(SERVERS)]
        serve += ["--trainers", "2", "--plan", str(plan), "--timeout", "100"]
        quiet = {**os.environ, "TORCH_CPP_LOG_LEVEL": "ERROR"}  # what agents say of those that leave before them
        servers = [subprocess.Popen([*serve, "--rank", str(rank)], env=quiet) for rank in range(len(SERVERS))]
        try:
            remote, local = on_new_ranks(compare, store, steps, staleness, nproc=2)
            if any([server.wait() for server in servers]):
                raise SystemExit("an embedding server failed")
        finally:
            for server in servers:
                server.kill()
                server.wait()
    last = max(1, len(remote) // 10)
    for name, losses in {"with 2 embedding servers": remote, "by collectives": local}.items():
        print(f"{name:24}  first loss {losses[0]:.6f}, mean of the last {last}: {sum(losses[-last:]) / last:.6f}")
    print(f"largest difference of a step's loss: {max(abs(a - b) for a, b in zip(remote, local, strict=True)):.2g}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))

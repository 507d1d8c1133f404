"""A job of two trainers and two servers, on the ranks of the test session, and a model for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from random import Random
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import rpc
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from shardrec.layout import ShardingPlan, Topology, cuts
from shardrec.rpc import EmbeddingServer, RpcWorld
from tests.batches import random_bags
from tests.models import OPTIMIZERS, apply_optimizer_in_backward

__all__ = ["BAGS", "ROWS", "SEQUENCES", "Model", "batch", "in_job", "make_model", "make_plan", "train"]

BAGS = [
    EmbeddingBagConfig(name="user", num_embeddings=40, embedding_dim=8, feature_names=["u", "v"]),
    EmbeddingBagConfig(name="item", num_embeddings=23, embedding_dim=4, feature_names=["i"], pooling=PoolingType.MEAN),
    EmbeddingBagConfig(name="wide", num_embeddings=11, embedding_dim=16, feature_names=["w"]),
    EmbeddingBagConfig(name="small", num_embeddings=5, embedding_dim=4, feature_names=["i"]),
]
SEQUENCES = [
    EmbeddingConfig(name="clicks", num_embeddings=31, embedding_dim=8, feature_names=["c"]),
    EmbeddingConfig(name="views", num_embeddings=7, embedding_dim=8, feature_names=["d"]),
]
ROWS = {"u": 40, "v": 40, "i": 5, "w": 11, "c": 31, "d": 7}


class Model(nn.Module):
    """Pooled and sequence embeddings, and a dense part, to one logit per sample."""

    def __init__(self, bags: EmbeddingBagCollection, sequences: EmbeddingCollection) -> None:
        super().__init__()
        self.bags = bags
        self.sequences = sequences
        self.top = nn.Linear(2 * 8 + 4 + 16 + 4 + 8, 1)

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        pooled = self.bags(features)
        sequences = self.sequences(features)
        history = torch.ops.fbgemm.jagged_to_padded_dense(
            sequences["c"].values(), [torch.ops.fbgemm.asynchronous_complete_cumsum(sequences["c"].lengths())], [8], 0.0
        ).sum(dim=1)
        viewed = sequences["d"].values().sum()
        logits: Tensor = self.top(torch.cat([pooled.values(), history], dim=1)).squeeze(1) + 0.1 * viewed
        return logits


def make_model(optimizer: str, device: str = "cpu") -> Model:
    """The model, the same for the same arguments; its replicated table has SGD, as its rows have in any case."""
    torch.manual_seed(0)
    bags = EmbeddingBagCollection(tables=BAGS, device=torch.device(device))
    sequences = EmbeddingCollection(tables=SEQUENCES, device=torch.device(device))
    choice = OPTIMIZERS[optimizer]
    assert choice.optimizer is not None, "tables on servers have an optimizer"
    for parameters in (bags.parameters(), sequences.parameters()):
        apply_optimizer_in_backward(choice.optimizer, parameters, dict(choice.settings))
    return Model(bags, sequences)


def make_plan() -> ShardingPlan:
    """Row-wise, table-wise, column-wise and replicated tables on two ranks."""
    return ShardingPlan(
        topology=Topology(ranks_per_host=2),
        tables=(
            cuts.row_wise("bags.user", 40, 8, ranks=[0, 1]),
            cuts.table_wise("bags.item", 23, 4, rank=1),
            cuts.column_wise("bags.wide", 11, 16, ranks=[1, 0]),
            cuts.data_parallel("bags.small", 5, 4),
            cuts.row_wise("sequences.clicks", 31, 8, ranks=[0, 1]),
            cuts.table_wise("sequences.views", 7, 8, rank=0),
        ),
    )


def batch(rank: int, step: int) -> KeyedJaggedTensor:
    """The same for the same arguments; now and then without samples."""
    rng = Random(1000 * step + rank)
    return random_bags(rng, ROWS, rng.choice([0, 1, 5, 9]) if step % 3 == 2 else 6, shuffled=False).kjt()


def train(model: Any, rank: int, steps: range) -> list[float]:
    """Losses of some steps; the learning rates of the tables change on the way."""
    optimizer = torch.optim.SGD(model.dense_parameters(), 0.1)
    losses = []
    for step in steps:
        for group in model.fused_optimizer.param_groups:
            group["lr"] = group.setdefault("initial_lr", group["lr"]) / (1 + 0.05 * step)
        loss = (model(batch(rank, step)) - 1.0).square().sum() / 6
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def in_job(
    path: str,
    trainer: Callable[[RpcWorld, int, dist.ProcessGroup | None], Any],
    server: Callable[[int], EmbeddingServer],
    trainers: int = 2,
    *,
    polls: bool = True,
) -> Any:
    """On each of four ranks (or three, with one trainer): two are servers, the others trainers.

    Args:
        path: of a file for the store, which is not there yet.
        trainer: what a trainer does, given its number and the trainers' process group.
        server: makes a server, given its number.
        trainers: number of trainers.
        polls: whether agents are as users have them, for tests of what fails; see :func:`waiting_agents`.

    Returns:
        The trainer's value; None on servers.
    """
    with nullcontext() if polls else waiting_agents():
        return _in_job(path, trainer, server, trainers)


def _in_job(
    path: str,
    trainer: Callable[[RpcWorld, int, dist.ProcessGroup | None], Any],
    server: Callable[[int], EmbeddingServer],
    trainers: int,
) -> Any:
    rank = dist.get_rank()
    group = dist.new_group(list(range(trainers)))
    name = f"trainer{rank}" if rank < trainers else f"server{rank - trainers}"
    world = RpcWorld(dist.FileStore(path), trainers=trainers, servers=2, name=name, timeout_s=30.0)
    if rank >= trainers:
        made = server(rank - trainers)
        try:
            world.serve()
        finally:
            made.close()
        return None
    with world.joined():
        try:
            return trainer(world, rank, group)
        finally:
            dist.barrier(group)
            if rank == 0:
                world.end()


@contextmanager
def waiting_agents() -> Iterator[None]:
    """Inside the block, RPC agents wait in the kernel.

    Otherwise each has a thread that polls without end, as TensorPipe's transport through shared memory does, and that
    through sockets once the listening one is shut down. On two cores the four threads take four times as long as a row.
    """
    options = rpc.TensorPipeRpcBackendOptions
    with (
        mock.patch.object(
            rpc, "TensorPipeRpcBackendOptions", lambda **given: options(**{**given, "_transports": ["uv"]})
        ),
        mock.patch("shardrec.rpc.world._close_doors"),
    ):
        yield

"""Models with parts that a loss may leave out, sharded and unsharded, and their gradients."""

from __future__ import annotations

from random import Random
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from shardrec.layout import ShardingPlan, Topology, cuts
from shardrec.modules import ShardedModel, shard
from tests.collective_counts import CountCollectives
from tests.models import apply_optimizer_in_backward

ROWS = {"cut": 13, "copied": 7, "row": 11, "other": 5}
DIM = 4
PARTS = ("copied", "row", "other", "bottom", "left", "right", "words")
EVERYTHING = frozenset(PARTS)


class Parts(nn.Module):
    """A sum of parts, of which each call names those that take part; the cut table always does.

    ``unused`` never does. ``words`` has a sparse gradient.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        config = {"embedding_dim": DIM}
        self.bags = EmbeddingBagCollection(
            tables=[
                EmbeddingBagConfig(name=name, num_embeddings=ROWS[name], feature_names=[name], **config)
                for name in ("cut", "copied")
            ]
        )
        self.rows = EmbeddingCollection(
            tables=[
                EmbeddingConfig(name=name, num_embeddings=ROWS[name], feature_names=[name], **config)
                for name in ("row", "other")
            ]
        )
        self.bottom, self.unused = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
        self.left, self.right = nn.Linear(DIM, 1), nn.Linear(DIM, 1)
        self.words = nn.EmbeddingBag(9, DIM, mode="sum", sparse=True)

    def forward(self, features: KeyedJaggedTensor, used: frozenset[str]) -> Tensor:
        pooled, rows = self.bags(features), self.rows(features)
        x = pooled["cut"].sum(dim=0)
        if "bottom" in used:
            x = x + self.bottom(torch.linspace(-1, 1, DIM))
        parts = [x.square().sum()]
        parts += [getattr(self, name)(x).square().sum() for name in ("left", "right") if name in used]
        parts += [rows[name].values().square().sum() for name in ("row", "other") if name in used]
        if "copied" in used:
            parts.append(pooled["copied"].square().sum())
        if "words" in used:
            parts.append(self.words(features["row"].values()[None] % 9).square().sum())
        return torch.stack(parts).sum()


class Scorer(nn.Module):
    """Its loss uses ``right`` for negative scales only."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        tables = [
            EmbeddingBagConfig(name=n, num_embeddings=ROWS[n], embedding_dim=DIM, feature_names=[n])
            for n in ("cut", "copied")
        ]
        self.bags = EmbeddingBagCollection(tables=tables)
        apply_optimizer_in_backward(torch.optim.SGD, self.bags.parameters(), {"lr": 0.1})
        self.left, self.right = nn.Linear(2 * DIM, 1), nn.Linear(2 * DIM, 1)

    def forward(self, features: KeyedJaggedTensor, scale: float) -> Tensor:
        pooled = self.bags(features).values()
        if scale < 0:
            return self.right(pooled).square().sum()
        return self.left(pooled).square().sum() * scale


class EmbeddingsAlone(nn.Module):
    """Its loss uses ``top`` if it is told to, and else the table, which is cut, alone."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        table = EmbeddingBagConfig(name="cut", num_embeddings=ROWS["cut"], embedding_dim=DIM, feature_names=["cut"])
        self.bags = EmbeddingBagCollection(tables=[table])
        apply_optimizer_in_backward(torch.optim.SGD, self.bags.parameters() if fused else [], {"lr": 0.1})
        self.top = nn.Linear(DIM, 1)

    def forward(self, features: KeyedJaggedTensor, uses_top: bool) -> Tensor:
        pooled = self.bags(features).values()
        if uses_top:
            return self.top(pooled).square().sum()
        return pooled.square().sum()


def features_of(step: int, rank: int) -> KeyedJaggedTensor:
    rng = Random(100 * step + rank)
    return KeyedJaggedTensor(
        keys=list(ROWS),
        values=torch.tensor([rng.randrange(rows) for rows in ROWS.values() for _ in range(2)]),
        lengths=torch.ones(2 * len(ROWS), dtype=torch.int32),
    )


def used_of(step: int, rank: int) -> frozenset[str]:
    rng = Random(100 * step + 10 * rank)
    # In step 2 no rank uses any; in step 3 one rank only.
    if step == 2 or (step == 3 and rank):
        return frozenset()
    return frozenset(name for name in PARTS if rng.random() < 0.5)


def plan_of(world_size: int) -> ShardingPlan:
    return ShardingPlan(
        topology=Topology(ranks_per_host=world_size),
        tables=(
            cuts.row_wise("bags.cut", ROWS["cut"], DIM, ranks=range(world_size)),
            cuts.data_parallel("bags.copied", ROWS["copied"], DIM),
            cuts.data_parallel("rows.row", ROWS["row"], DIM),
            cuts.data_parallel("rows.other", ROWS["other"], DIM),
        ),
    )


def made(fused: bool = False, **options: Any) -> tuple[ShardedModel, Parts]:
    """A sharded model and the unsharded one."""
    both = []
    for _ in range(2):
        model = Parts()
        tables = [*model.bags.parameters(), *model.rows.parameters()] if fused else []
        apply_optimizer_in_backward(torch.optim.SGD, tables, {"lr": 0.1})
        both.append(model)
    return shard(both[0], plan_of(dist.get_world_size()), **options), both[1]


def dense_of(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: one for name, one in model.named_parameters() if ".cut." not in name}


def whole(tensor: Tensor) -> Tensor:
    tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return tensor.to_dense() if tensor.is_sparse else tensor


def assert_gradients_equal(model: ShardedModel, reference: Parts, where: str) -> None:
    expected = dense_of(reference)
    for name, parameter in dense_of(model).items():
        other = expected[name].grad
        assert (parameter.grad is None) == (other is None), f"{where}: {name} {parameter.grad} {other}"
        if parameter.grad is not None and other is not None:
            torch.testing.assert_close(
                whole(parameter.grad), whole(other), msg=lambda text, n=name: f"{where}: {n}: {text}"
            )


def reference_loss(reference: Parts, step: int) -> Tensor:
    world_size = dist.get_world_size()
    losses = [reference(features_of(step, rank), used_of(step, rank)) for rank in range(world_size)]
    return torch.stack(losses).mean()


def train_beside(model: ShardedModel, reference: Parts, run: Any, *, steps: int = 6) -> list[dict[str, int]]:
    """Adam with weight decay, which moves what has a gradient of zero. Gives the collectives of each backward."""
    rank = dist.get_rank()
    optimizers: list[torch.optim.Optimizer] = []
    for one in (model, reference):
        others = [p for name, p in dense_of(one).items() if "words" not in name]
        optimizers.append(torch.optim.AdamW(others, lr=0.05, weight_decay=0.1))
        optimizers.append(torch.optim.SGD(one.words.parameters(), lr=0.1))  # type: ignore[union-attr]
    counts = []
    for step in range(steps):
        loss = run(features_of(step, rank), used_of(step, rank))
        with CountCollectives() as counted:
            loss.backward()
        counts.append(dict(counted))
        reference_loss(reference, step).backward()
        assert_gradients_equal(model, reference, f"step {step}")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for (name, one), other in zip(dense_of(model).items(), dense_of(reference).values(), strict=True):
            torch.testing.assert_close(whole(one.detach()), other.detach(), msg=f"step {step}: {name}")
    return counts

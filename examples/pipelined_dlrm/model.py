"""The model as a sequential: what is looked up in the first layer is popped in the third.

::

    (dense, ids) ► Embed ► Bottom ► Interact ► Cross ► … ► Cross ► Top ► logits
                     └── "pooled" ────►┘
    2 stages:      stage 0 ─────────┐┌── stage 1 ──────────────────────

Shapes: B samples, D columns of a table, F features.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import torch
from torch import Tensor, nn
from torchrec.modules.crossnet import LowRankCrossNet
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from shardrec.pipeline.skip import pop, skippable, stash

__all__ = ["BALANCE", "DENSE", "DIM", "FEATURES", "ROWS", "pipelined_dlrm"]

DENSE, FEATURES, ROWS, DIM, CROSS = 13, 8, 1000, 16, 3
BALANCE = [2, 2 + CROSS]
"""Layers of the two stages."""


@skippable(stash=["pooled"])
class Embed(nn.Module):
    """Starts the lookup, and hands the dense columns on while rows are under way."""

    def __init__(self, bags: nn.Module) -> None:
        super().__init__()
        self.bags = bags

    def forward(self, input: tuple[Tensor, KeyedJaggedTensor]) -> Generator[stash, Any, Tensor]:
        dense, ids = input
        yield stash("pooled", self.bags(ids))
        return dense


class Bottom(nn.Sequential):
    """(B, 13) dense columns to (B, D)."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(DENSE, 64), nn.ReLU(), nn.Linear(64, DIM), nn.ReLU())


@skippable(pop=["pooled"])
class Interact(nn.Module):
    """(B, D) and the pooled (B, F · D) side by side."""

    def forward(self, input: Tensor) -> Generator[pop, Any, Tensor]:
        pooled = yield pop("pooled")
        return torch.cat([input, pooled.values()], dim=1)


def pipelined_dlrm() -> nn.Sequential:
    """The unsharded model, with the same values for the same seed."""
    tables = [
        EmbeddingBagConfig(name=f"t{one}", num_embeddings=ROWS, embedding_dim=DIM, feature_names=[f"f{one}"])
        for one in range(FEATURES)
    ]
    width = DIM * (1 + FEATURES)
    cross = [LowRankCrossNet(in_features=width, num_layers=2, low_rank=8) for _ in range(CROSS)]
    return nn.Sequential(Embed(EmbeddingBagCollection(tables)), Bottom(), Interact(), *cross, nn.Linear(width, 1))

"""A model all of whose tensors say when they were last changed, so that half a version of it is seen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor

from shardrec import Publisher, shard
from shardrec.modules import ShardedModel
from shardrec.serve import ServedModel, quantize

__all__ = ["ROWS", "Ticks", "models", "rows_at", "set_tick"]

ROWS = 40


class Ticks(nn.Module):
    """Two tables and a dense part, all of which say when they were last changed."""

    def __init__(self) -> None:
        super().__init__()
        tables = [
            EmbeddingBagConfig(name=f"t_{key}", num_embeddings=ROWS, embedding_dim=8, feature_names=[key])
            for key in "ab"
        ]
        self.bags = EmbeddingBagCollection(tables=tables)
        self.top = nn.Linear(16, 1)
        self.register_buffer("tick", torch.zeros(()))

    def forward(self, features: KeyedJaggedTensor) -> tuple[Tensor, Tensor, Tensor]:
        sums = self.bags(features)
        return self.tick + 0, sums["a"], sums["b"]


def rows_at(tick: int) -> Tensor:
    """(ROWS, 8): each tick changes every fifth row."""
    last = torch.tensor([max((t for t in range(1, tick + 1) if (row - t) % 5 == 0), default=0) for row in range(ROWS)])
    return last.float().unsqueeze(1).expand(ROWS, 8).contiguous()


def set_tick(model: ShardedModel, tick: int) -> None:
    with torch.no_grad():
        for table in model.module.bags.tables().values():
            for weight in table.locals.values():
                weight.copy_(rows_at(tick))
        model.module.tick.fill_(tick)


def models(folder: str | Path, weights: str = "int8", **kwargs: Any) -> tuple[ShardedModel, Publisher, ServedModel]:
    model = shard(Ticks())
    set_tick(model, 0)
    return model, Publisher(model, folder, weights, **kwargs), quantize(model, weights)

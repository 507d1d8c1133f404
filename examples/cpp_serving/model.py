"""A click model for the example: categorical features in sharded tables, dense columns, one score per sample."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.modules.embedding_configs import PoolingType
from torchrec.optim import RowWiseAdagrad
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

__all__ = ["DENSE", "FEATURES", "ClickModel"]

FEATURES = {"user": 2000, "item": 5000, "history": 5000, "country": 200}
"""Rows of the table behind each feature. ``item`` and ``history`` share a table."""

DENSE = 4
"""Dense columns."""


class ClickModel(nn.Module):
    """Pooled features and dense columns through two layers. Optimizers are fused into the tables' backward."""

    def __init__(self) -> None:
        super().__init__()
        tables = [
            EmbeddingBagConfig(name="t_user", num_embeddings=2000, embedding_dim=32, feature_names=["user"]),
            EmbeddingBagConfig(
                name="t_item",
                num_embeddings=5000,
                embedding_dim=32,
                feature_names=["item", "history"],
                pooling=PoolingType.MEAN,
            ),
            EmbeddingBagConfig(name="t_country", num_embeddings=200, embedding_dim=8, feature_names=["country"]),
        ]
        self.bags = EmbeddingBagCollection(tables=tables)
        apply_optimizer_in_backward(RowWiseAdagrad, self.bags.parameters(), {"lr": 0.1})
        self.over = nn.Sequential(nn.Linear(3 * 32 + 8 + DENSE, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, dense: Tensor, sparse: KeyedJaggedTensor) -> Tensor:
        """(B,) scores from (B, DENSE) and the features' bags."""
        pooled = self.bags(sparse)
        scores: Tensor = self.over(torch.cat([dense, pooled.values()], dim=1)).squeeze(1)
        return scores

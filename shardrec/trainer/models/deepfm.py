"""DeepFM: a factorization machine and a multi-layer perceptron over the same embeddings.

"DeepFM: A Factorization-Machine based Neural Network for CTR Prediction", Guo et al., 2017. The weight of a single
feature is a learned linear function of its embedding, so that a feature has one table. A dense feature's embedding is
its value times a learned vector.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from shardrec.trainer.data import ClickSchema
from shardrec.trainer.models.parts import MLP, FactorizationMachine, FeatureVectors, Share, Size, Sizes


class DeepFM(nn.Module):
    """See the file's text."""

    def __init__(
        self,
        schema: ClickSchema,
        *,
        dim: Size = 16,
        hidden: Sizes = (128, 64),
        dropout: Share = 0.0,
        batch_norm: bool = False,
    ) -> None:
        super().__init__()
        self.vectors = FeatureVectors(schema, dim)
        self.dense_embeddings = nn.Parameter(torch.randn(len(schema.dense_names), dim) * 0.01)
        columns = dim * (len(schema.sparse_names) + len(schema.dense_names))
        self.single = nn.Linear(columns, 1)
        self.pairs = FactorizationMachine()
        self.deep = MLP(columns, hidden, 1, dropout=dropout, batch_norm=batch_norm)

    def forward(self, dense: Tensor, sparse: KeyedJaggedTensor) -> Tensor:
        """Logits (B,)."""
        dense_BMD = dense.unsqueeze(2) * self.dense_embeddings
        features = torch.cat([self.vectors(sparse), dense_BMD], dim=1)
        flat = features.flatten(1)
        logits: Tensor = self.pairs(features) + (self.single(flat) + self.deep(flat)).squeeze(1)
        return logits

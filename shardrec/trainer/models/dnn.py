"""A multi-layer perceptron over concatenated embeddings.

"Deep Neural Networks for YouTube Recommendations", Covington et al., 2016: its ranking network.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from shardrec.trainer.data import ClickSchema
from shardrec.trainer.models.parts import MLP, Share, Size, Sizes, columns_of, pooled_features


class DNN(nn.Module):
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
        self.bags = pooled_features(schema, dim)
        columns = len(columns_of(self.bags))
        self.over = MLP(columns + len(schema.dense_names), hidden, 1, dropout=dropout, batch_norm=batch_norm)

    def forward(self, dense: Tensor, sparse: KeyedJaggedTensor) -> Tensor:
        """Logits (B,)."""
        logits: Tensor = self.over(torch.cat([self.bags(sparse).values(), dense], dim=1)).squeeze(1)
        return logits

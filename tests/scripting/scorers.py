"""Models to be scripted, in a module of their own: TorchScript evaluates their annotations in its names."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

__all__ = ["FromTensors", "Scorer"]


class Scorer(nn.Module):
    """Pooled features through a layer.

    Args:
        sparse: the embedding bags.
        pooled: columns of their output.
    """

    def __init__(self, sparse: nn.Module, pooled: int) -> None:
        super().__init__()
        self.sparse = sparse
        torch.manual_seed(5)
        self.over = nn.Linear(pooled, 1)

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        pooled = self.sparse(features)
        return self.head(pooled)

    def head(self, pooled: KeyedTensor) -> Tensor:
        scores: Tensor = self.over(pooled.values()).squeeze(1)
        return scores


class FromTensors(nn.Module):
    """A model with an entry that takes plain tensors, as a program without torchrec calls it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        scores: Tensor = self.model(features)
        return scores

    @torch.jit.export
    def from_tensors(self, keys: list[str], values: Tensor, lengths: Tensor) -> Tensor:
        scores: Tensor = self.model(KeyedJaggedTensor(keys, values, lengths=lengths))
        return scores

"""PLE: levels of experts, each of one task or of all; a task's gate mixes its own and the shared ones.

"Progressive Layered Extraction (PLE): A Novel Multi-Task Learning (MTL) Model for Personalized Recommendations", Tang
et al., 2020.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from shardrec import ConfigError
from shardrec.trainer.data import ClickSchema
from shardrec.trainer.models.parts import MLP, Experts, Share, Size, Sizes, columns_of, pooled_features

__all__ = ["PLE"]


class PLE(nn.Module):
    """See the file's text.

    Args:
        levels: of experts.
        experts: of each task in a level, whose layers are ``hidden``.
        shared: experts of all tasks in a level.
        tower: widths of a task's layers before its columns of the output.
    """

    def __init__(
        self,
        schema: ClickSchema,
        *,
        dim: Size = 16,
        levels: Size = 2,
        experts: Size = 2,
        shared: Size = 2,
        hidden: Sizes = (128, 64),
        tower: Sizes = (32,),
        dropout: Share = 0.0,
        batch_norm: bool = False,
    ) -> None:
        super().__init__()
        if not hidden:
            raise ConfigError("hidden is empty: an expert needs one layer at least")
        self.bags, self.tasks = pooled_features(schema, dim), len(schema.outputs)
        settings: dict[str, Any] = {"dropout": dropout, "batch_norm": batch_norm}
        inputs = [len(columns_of(self.bags)) + len(schema.dense_names), *[hidden[-1]] * (levels - 1)]
        gates = [self.tasks + 1] * (levels - 1) + [self.tasks]
        self.levels = nn.ModuleList(
            Experts(width, hidden, self.tasks, shared, experts, count, **settings)
            for width, count in zip(inputs, gates, strict=True)
        )
        self.towers = nn.ModuleList(MLP(hidden[-1], tower, outputs, **settings) for outputs in schema.outputs)

    def forward(self, dense: Tensor, sparse: KeyedJaggedTensor) -> Tensor:
        """The columns of all tasks, side by side."""
        mixtures = [torch.cat([self.bags(sparse).values(), dense], dim=1)] * (self.tasks + 1)
        for level in self.levels:
            mixtures = level(mixtures)
        outputs: list[Tensor] = []
        for number, tower in enumerate(self.towers):
            outputs.append(tower(mixtures[number]))
        return torch.cat(outputs, dim=1)

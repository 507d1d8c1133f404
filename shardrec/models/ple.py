"""PLE: levels of experts, each of one task or of all; a task's gate mixes its own and the shared ones.

"Progressive Layered Extraction (PLE): A Novel Multi-Task Learning (MTL) Model for Personalized Recommendations", Tang
et al., 2020.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from shardrec.data import ClickSchema
from shardrec.models.parts import Experts, Share, Size, Sizes, Towers, pooled_features

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
        self.bags, self.tasks = pooled_features(schema, dim), len(schema.outputs)
        columns = dim * len(schema.sparse_names) + len(schema.dense_names)
        self.levels = nn.ModuleList(
            Experts(inputs, hidden, self.tasks, shared, experts, dropout=dropout, batch_norm=batch_norm)
            for inputs in (columns, *[hidden[-1]] * (levels - 1))
        )
        self.towers = Towers(hidden[-1], tower, schema.outputs, dropout=dropout, batch_norm=batch_norm)

    def forward(self, dense: Tensor, sparse: KeyedJaggedTensor) -> Tensor:
        """The columns of all tasks, side by side."""
        mixtures = [torch.cat([self.bags(sparse).values(), dense], dim=1)] * (self.tasks + 1)
        for level in self.levels:
            mixtures = level(mixtures)
        outputs: Tensor = self.towers(mixtures)
        return outputs

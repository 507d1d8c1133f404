"""MMoE: experts that all tasks share, mixed for each task by a gate of its own.

"Modeling Task Relationships in Multi-task Learning with Multi-gate Mixture-of-Experts", Ma et al., 2018.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from shardrec.data import ClickSchema
from shardrec.models.parts import Experts, Share, Size, Sizes, Towers, pooled_features

__all__ = ["MMoE"]


class MMoE(nn.Module):
    """See the file's text.

    Args:
        experts: number of experts, whose layers are ``hidden``.
        tower: widths of a task's layers before its columns of the output.
    """

    def __init__(
        self,
        schema: ClickSchema,
        *,
        dim: Size = 16,
        experts: Size = 4,
        hidden: Sizes = (128, 64),
        tower: Sizes = (32,),
        dropout: Share = 0.0,
        batch_norm: bool = False,
    ) -> None:
        super().__init__()
        self.bags, self.tasks = pooled_features(schema, dim), len(schema.outputs)
        columns = dim * len(schema.sparse_names) + len(schema.dense_names)
        self.experts = Experts(columns, hidden, self.tasks, experts, 0, dropout=dropout, batch_norm=batch_norm)
        self.towers = Towers(hidden[-1], tower, schema.outputs, dropout=dropout, batch_norm=batch_norm)

    def forward(self, dense: Tensor, sparse: KeyedJaggedTensor) -> Tensor:
        """The columns of all tasks, side by side."""
        inputs = torch.cat([self.bags(sparse).values(), dense], dim=1)
        outputs: Tensor = self.towers(self.experts([inputs] * (self.tasks + 1)))
        return outputs

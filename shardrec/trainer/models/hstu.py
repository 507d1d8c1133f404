"""HSTU: the next item of a user's sequence, by pointwise attention with a gate.

"Actions Speak Louder than Words: Trillion-Parameter Sequential Transducers for Generative Recommendations", Zhai et
al., 2024. In place of softmax, each pair of positions has SiLU of its score, over ``max_length``, so that how often an
item occurs is not normalized away. Times of the actions are not among a sequence's ids: the bias of a pair depends on
the positions alone. The loss is SASRec's.

Legend: R rows of like length, H heads, W positions.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardrec.trainer.models.sequence import Groups, SequenceModel

__all__ = ["HSTU"]


class _Block(nn.Module):
    """Queries, keys, values and a gate of each token; causal pointwise attention; the gate."""

    def __init__(self, dim: int, heads: int, max_length: int, dropout: float) -> None:
        super().__init__()
        self.dim, self.heads, self.columns, self.max_length = dim, heads, dim // heads, max_length
        # Norms without a learned scale, and first values, as in the authors' code.
        self.norm, self.attended_norm = (nn.LayerNorm(dim, eps=1e-6, elementwise_affine=False) for _ in range(2))
        self.project_in, self.project_out = nn.Linear(dim, 4 * dim, bias=False), nn.Linear(dim, dim)
        nn.init.normal_(self.project_in.weight, std=0.02)
        nn.init.xavier_uniform_(self.project_out.weight)
        self.bias = nn.Parameter(torch.zeros(heads, max_length))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x_TD: Tensor, groups: Groups) -> Tensor:
        projected = F.silu(self.project_in(self.norm(x_TD)))
        gate_TD, others = projected[:, : self.dim], projected[:, self.dim :]
        attended_TD = torch.zeros_like(x_TD)
        for tokens, offsets, width in groups:
            padded = torch.ops.fbgemm.jagged_to_padded_dense(others[tokens], [offsets], [width], 0.0)
            query, key, value = padded.unflatten(2, [3, self.heads, self.columns]).permute(2, 0, 3, 1, 4).unbind(0)
            position_W = torch.arange(width, device=x_TD.device)
            age_WW = position_W.unsqueeze(1) - position_W
            scores_RHWW = query @ key.transpose(2, 3) + self.bias[:, age_WW.clamp(min=0)]
            weights_RHWW = F.silu(scores_RHWW) * (age_WW >= 0) / self.max_length
            flat = (weights_RHWW @ value).transpose(1, 2).flatten(2)
            jagged = torch.ops.fbgemm.dense_to_jagged(flat, [offsets], tokens.size(0))[0]
            attended_TD = attended_TD.index_copy(0, tokens, jagged)
        mixed_TD: Tensor = x_TD + self.project_out(self.dropout(self.attended_norm(attended_TD) * gate_TD))
        return mixed_TD


class HSTU(SequenceModel):
    """See the file's text, and for the arguments :class:`~shardrec.trainer.models.sequence.SequenceModel`."""

    block = _Block

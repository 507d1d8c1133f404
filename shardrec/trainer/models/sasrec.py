"""SASRec: the next item of a user's sequence, by causal self-attention.

"Self-Attentive Sequential Recommendation", Kang and McAuley, 2018, with layer norms before each sublayer, and with a
softmax over random items, which a batch shares, as loss.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardrec.trainer.models.sequence import Groups, SequenceModel

__all__ = ["SASRec"]


class _Block(nn.Module):
    """Causal self-attention, then a network for each token."""

    def __init__(self, dim: int, heads: int, max_length: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.columns = heads, dim // heads
        self.attention_norm, self.token_norm = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.project_in, self.project_out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.network = nn.Sequential(nn.Linear(dim, dim), nn.GELU(), nn.Linear(dim, dim))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x_TD: Tensor, groups: Groups) -> Tensor:
        projected = self.project_in(self.attention_norm(x_TD))
        attended_TD = torch.zeros_like(x_TD)
        for tokens, offsets, width in groups:
            padded = torch.ops.fbgemm.jagged_to_padded_dense(projected[tokens], [offsets], [width], 0.0)
            query, key, value = padded.unflatten(2, [3, self.heads, self.columns]).permute(2, 0, 3, 1, 4).unbind(0)
            mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
            flat = mixed.transpose(1, 2).flatten(2)
            jagged = torch.ops.fbgemm.dense_to_jagged(flat, [offsets], tokens.size(0))[0]
            attended_TD = attended_TD.index_copy(0, tokens, jagged)
        x_TD = x_TD + self.dropout(self.project_out(attended_TD))
        x_TD = x_TD + self.dropout(self.network(self.token_norm(x_TD)))
        return x_TD


class SASRec(SequenceModel):
    """See the file's text, and for the arguments :class:`~shardrec.trainer.models.sequence.SequenceModel`."""

    block = _Block

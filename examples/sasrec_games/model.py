"""SASRec: the next item of a user's sequence, by causal self-attention.

"Self-Attentive Sequential Recommendation", Kang and McAuley, 2018, with layer norms before each sublayer, and with a
softmax over random items, which a batch shares, as loss. Linear layers and norms see a batch's tokens end to end;
attention sees them padded, rows of like length together, because most histories are short and a few fill all positions.

Legend: B rows, T tokens (the items of all histories, row after row), D columns, N negatives.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from shardrec.data import ClickSchema

__all__ = ["SASRec"]

_DIM = 64
_HEADS = 1
_BLOCKS = 2
_DROPOUT = 0.5
_NEGATIVES = 1024
_WIDTHS = (4, 8, 16, 50)
"""Histories of up to this number of items are padded together; the last is ``max_length`` in features.yaml."""
_STD = 0.02


class SASRec(nn.Module):
    """Scores an item after a history; trained to tell the next item at each position from random ones.

    Args:
        schema: has the features "history", a sequence, and "item", one id a row, which share a table.
    """

    def __init__(self, schema: ClickSchema) -> None:
        super().__init__()
        self.num_items = schema.num_embeddings[schema.sparse_names.index("item")]
        self.num_negatives = _NEGATIVES
        self.widths = [*_WIDTHS]
        table = EmbeddingConfig(
            name="t_item",
            num_embeddings=self.num_items,
            embedding_dim=_DIM,
            feature_names=["history", "item"],
            init_fn=lambda weight: nn.init.normal_(weight, std=_STD),
        )
        self.items = EmbeddingCollection(tables=[table])
        self.positions = nn.Embedding(_WIDTHS[-1], _DIM)
        nn.init.normal_(self.positions.weight, std=_STD)
        self.dropout = nn.Dropout(_DROPOUT)
        self.blocks = nn.ModuleList(_Block() for _ in range(_BLOCKS))
        self.norm = nn.LayerNorm(_DIM)

    def forward(self, dense: Tensor, sparse: KeyedJaggedTensor) -> Tensor:
        """The logit of each row's item after its history.

        A history is encoded once for neighbouring rows that have the same, such as the candidates for a user.

        Args:
            dense: not read.
            sparse: features "history" and "item", stride B.

        Returns:
            float32 (B,); 0 for an empty history.
        """
        history = sparse["history"]
        found = self.items(sparse)
        lengths_B = history.lengths()
        differs_B = _differs_from_row_before(history.values(), lengths_B)
        own_B = torch.where(differs_B, lengths_B, 0)
        tokens_TD = found["history"].values()[torch.repeat_interleave(differs_B, lengths_B)]
        # The last token so far is that of the row, or of the row before that has the same history.
        encoded = F.pad(self.encode(tokens_TD, own_B), [0, 0, 1, 0])
        users_BD = encoded[own_B.cumsum(0)] * (lengths_B > 0).unsqueeze(1)
        logits: Tensor = (users_BD * found["item"].values()).sum(1)
        return logits

    def loss(self, dense: Tensor, sparse: KeyedJaggedTensor, labels: Tensor) -> Tensor:
        """Softmax cross entropy of the next item at each position of the histories against random items.

        Args:
            dense: not read.
            sparse: features "history" and "item", stride B; the item is the last one's next.
            labels: float32 (B,), 0 leaves the item out.

        Returns:
            The mean over the T positions, in nats.
        """
        history, item = sparse["history"], sparse["item"]
        drawn_N = torch.randint(1, self.num_items, (self.num_negatives,), device=labels.device)
        lengths = torch.arange(2, device=labels.device) * self.num_negatives  # none as history, all as item
        found = self.items(sparse)
        others_ND = self.items(KeyedJaggedTensor(["history", "item"], drawn_N, lengths=lengths))["item"].values()
        tokens_TD, lengths_B = found["history"].values(), history.lengths()
        encoded_TD = self.encode(tokens_TD, lengths_B)
        there_B = lengths_B > 0
        last = lengths_B.cumsum(0)[there_B] - 1
        next_T = history.values().roll(-1).index_copy(0, last, item.values()[there_B])
        next_TD = tokens_TD.roll(-1, 0).index_copy(0, last, found["item"].values()[there_B])
        weights_T = torch.ones_like(encoded_TD[:, 0]).index_copy(0, last, labels[there_B])
        logits_TN = (encoded_TD @ others_ND.t()).masked_fill(next_T.unsqueeze(1) == drawn_N, -torch.inf)
        losses_T = F.softplus(logits_TN.logsumexp(1) - (encoded_TD * next_TD).sum(1))
        loss: Tensor = (losses_T * weights_T).sum() / weights_T.sum().clamp(min=1)
        return loss

    def encode(self, tokens_TD: Tensor, lengths_B: Tensor) -> Tensor:
        """What each position knows of its item and those before it.

        Args:
            tokens_TD: embeddings, float32.
            lengths_B: int64, each row's; their sum is T.

        Returns:
            float32 (T, D).
        """
        ends_T = torch.repeat_interleave(lengths_B.cumsum(0), lengths_B)
        age_T = ends_T - 1 - torch.arange(tokens_TD.size(0), device=ends_T.device)
        x_TD = self.dropout(tokens_TD * tokens_TD.size(1) ** 0.5 + self.positions(age_T))
        groups = _by_length(lengths_B, self.widths)
        for block in self.blocks:
            x_TD = block(x_TD, groups)
        encoded: Tensor = self.norm(x_TD)
        return encoded


class _Block(nn.Module):
    """Causal self-attention, then a network for each token."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = _HEADS
        self.attention_norm, self.token_norm = nn.LayerNorm(_DIM), nn.LayerNorm(_DIM)
        self.project_in, self.project_out = nn.Linear(_DIM, 3 * _DIM), nn.Linear(_DIM, _DIM)
        self.network = nn.Sequential(nn.Linear(_DIM, _DIM), nn.GELU(), nn.Linear(_DIM, _DIM))
        self.dropout = nn.Dropout(_DROPOUT)

    def forward(self, x_TD: Tensor, groups: list[tuple[Tensor, Tensor, int]]) -> Tensor:
        projected = self.project_in(self.attention_norm(x_TD))
        attended_TD = torch.zeros_like(x_TD)
        for tokens, offsets, width in groups:
            padded = torch.ops.fbgemm.jagged_to_padded_dense(projected[tokens], [offsets], [width], 0.0)
            query, key, value = padded.unflatten(2, [3, self.heads, -1]).permute(2, 0, 3, 1, 4).unbind(0)
            mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
            flat = mixed.transpose(1, 2).flatten(2)
            jagged = torch.ops.fbgemm.dense_to_jagged(flat, [offsets], tokens.size(0))[0]
            attended_TD = attended_TD.index_copy(0, tokens, jagged)
        x_TD = x_TD + self.dropout(self.project_out(attended_TD))
        x_TD = x_TD + self.dropout(self.network(self.token_norm(x_TD)))
        return x_TD


def _by_length(lengths_B: Tensor, widths: list[int]) -> list[tuple[Tensor, Tensor, int]]:
    """Groups of rows of like length: where their tokens are, the rows' offsets (R + 1,), and the width to pad to."""
    groups: list[tuple[Tensor, Tensor, int]] = []
    above = 0
    for width in widths:
        rows_B = (lengths_B > above) & (lengths_B <= width)
        above = width
        tokens = torch.repeat_interleave(rows_B, lengths_B).nonzero().squeeze(1)
        groups.append((tokens, F.pad(lengths_B[rows_B].cumsum(0), [1, 0]), width))
    return groups


def _differs_from_row_before(ids_T: Tensor, lengths_B: Tensor) -> Tensor:
    """Whether each row has other ids than the one before it: bool (B,); the first row has."""
    starts_B = lengths_B.cumsum(0) - lengths_B
    row_T = torch.repeat_interleave(lengths_B)
    shift_T = (starts_B - starts_B.roll(1))[row_T]
    before_T = torch.arange(ids_T.numel(), device=ids_T.device) - shift_T
    changed_T = ids_T != ids_T[before_T.clamp(0, max(0, ids_T.numel() - 1))]
    changes_B = torch.zeros_like(lengths_B).index_add(0, row_T, changed_T.long())
    differs_B = (changes_B > 0) | (lengths_B != lengths_B.roll(1))
    return differs_B.index_fill(0, torch.zeros_like(lengths_B[:1]), True)
